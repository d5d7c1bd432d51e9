"""One rank of a generation: load the weights, generate for its prompts, show the text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from harness.config.job import Job
from harness.data.tokenizer import build_tokenizer
from harness.data.tokenizer_base import Tokenizer
from harness.tools.inference.generate.config import GenerateConfig, GenerateJob
from harness.tools.inference.generate.decode import generate_batch
from harness.tools.inference.generate.prompts import Prompt
from harness.tools.inference.generate.sampling import Sampler
from harness.tools.inference.generate.text import TextStream
from harness.tools.inference.model import InferenceModel

# Reasons why a text ended.
LENGTH, END, STOP = "length", "end", "stop"
SECONDS = ("load_seconds", "prefill_seconds", "decode_seconds")


@dataclass
class Generated:
    """The text after one prompt."""

    number: int
    prompt: str
    prompt_tokens: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    ended_by: str = LENGTH


@dataclass
class Outcome:
    """Generated texts, durations in seconds, and numbers of tokens."""

    texts: list[Generated] = field(default_factory=list)
    load_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0


def generate(
    job: GenerateJob,
    device: torch.device,
    load: Callable[[Job], InferenceModel],
    prompts: Sequence[Prompt],
    show: bool,
) -> Outcome:
    """Generate on this rank of a process group.

    Args:
        job: the resolved job; training.seq_len is the longest sequence.
        device: where this rank computes.
        load: returns a job's model with its weights.
        prompts: all prompts.
        show: whether to print a single prompt, and its text while it is generated.

    Returns:
        The texts of all prompts in their order, and the durations of the slowest rank.
    """
    started = time.perf_counter()
    model = load(job)
    model.part.use_cache(job.training.seq_len)
    seconds, tokenizer = time.perf_counter() - started, build_tokenizer(job.tokenizer)
    outcome = generate_texts(model, prompts, job.generate, tokenizer, show=show)
    outcome.load_seconds = max(model.ranks.gather(seconds))
    return outcome


def generate_texts(
    model: InferenceModel,
    prompts: Sequence[Prompt],
    config: GenerateConfig,
    tokenizer: Tokenizer,
    *,
    show: bool = False,
) -> Outcome:
    """Generate the texts of all prompts on all ranks together; see ``generate``."""
    outcome, replicas = Outcome(), model.job.parallelism.data_parallel
    is_first = model.mesh.rank("tp") == 0
    shows = show and is_first and model.mesh.data_rank == 0 and len(prompts) == 1
    numbered = list(enumerate(prompts))
    for start in range(0, len(prompts), config.batch_size * replicas):
        batch = numbered[start : start + config.batch_size * replicas]
        own = batch[model.mesh.data_rank :: replicas]
        # Every rank takes part in every pass: one without a prompt of its own repeats the first.
        made = _Batch(own or batch[:1], tokenizer, config, show=shows)
        made.run(model, outcome)
        if own and is_first:
            outcome.texts += made.texts
    return _joined(model.ranks.gather(outcome))


class _Batch:
    """Prompts that are generated together on this rank."""

    def __init__(
        self,
        numbered: Sequence[tuple[int, Prompt]],
        tokenizer: Tokenizer,
        config: GenerateConfig,
        *,
        show: bool,
    ) -> None:
        self.config, self.show = config, show
        ends = {tokenizer.eos_id, *(prompt.end_of_turn for _, prompt in numbered)}
        self.ends = ends if config.stop_at_end else set()
        self.numbers = [number for number, _ in numbered]
        self.prompts = [prompt.ids for _, prompt in numbered]
        self.streams = [TextStream(tokenizer, prompt, self.config.stop) for prompt in self.prompts]
        self.texts = [Generated(number, prompt.text, len(prompt.ids)) for number, prompt in numbered]

    def run(self, model: InferenceModel, outcome: Outcome) -> None:
        """Generate, and add to the outcome's durations."""
        of = self.config
        self._print(self.texts[0].prompt)
        sampler = Sampler(of.temperature, of.top_k, of.top_p, of.seed, self.numbers)
        timing = generate_batch(model, self.prompts, sampler, of.max_new_tokens, self._add)
        for text, stream in zip(self.texts, self.streams, strict=True):
            self._print(stream.finish())
            text.text = stream.text
            if stream.is_stopped:  # perhaps by characters that were complete only now
                text.ended_by = STOP
        outcome.prefill_seconds += timing.prefill
        outcome.decode_seconds += timing.decode

    def _add(self, row: int, token: int) -> bool:
        """Take a token; return whether the text goes on."""
        text, stream = self.texts[row], self.streams[row]
        text.tokens.append(token)
        if token in self.ends:
            text.ended_by = END
            return False
        self._print(stream.add(token))
        if stream.is_stopped:
            text.ended_by = STOP
        return not stream.is_stopped and len(text.tokens) < self.config.max_new_tokens

    def _print(self, text: str) -> None:
        if self.show:
            sys.stdout.write(text)
            sys.stdout.flush()


def _joined(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome of all ranks: all texts, the longest durations, and the tokens of each text once."""
    texts = sorted((text for each in outcomes for text in each.texts), key=lambda text: text.number)
    return Outcome(
        texts,
        **{name: max(getattr(each, name) for each in outcomes) for name in SECONDS},
        prefill_tokens=sum(text.prompt_tokens for text in texts),
        # The first new token of a text is chosen in the pass over its prompt.
        decode_tokens=sum(len(text.tokens) - 1 for text in texts),
    )
