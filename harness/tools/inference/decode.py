"""One rank of a generation: choose tokens on any layout, and decode them to text piece by piece."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from harness.config.job import Job
from harness.data.tokenizer import Tokenizer, build_tokenizer
from harness.model.cache import CachedPass
from harness.tools.inference.generate import GenerateConfig, GenerateJob, Prompt
from harness.tools.inference.model import InferenceModel

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer returns for bytes that are not a complete character."""
CONTEXT = 8
"""Tokens of the prompt to decode with the new ones: a token's text can depend on its neighbours."""
LONGEST_CHARACTER = 4
"""Bytes of the longest character in UTF-8; fewer undecodable bytes can be the beginning of one."""


class TextStream:
    """Decodes one sequence while it is generated.

    Args:
        prompt: ids of the prompt.
        stops: strings that end the text; they are not part of it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids = list(prompt[-CONTEXT:])
        # Ids from ``_start`` on are decoded together; the text has the first ``_taken`` characters of them.
        self._start, self._read = 0, len(self._ids)
        self._taken = len(tokenizer.decode(self._ids))
        self.text, self._shown = "", 0
        self.is_stopped = False

    def add(self, token: int) -> str:
        """Add a token; return the text that can be shown since the last call."""
        self._ids.append(token)
        self._decode(last=False)
        return self._show(last=False)

    def finish(self) -> str:
        """Return the rest of the text."""
        if not self.is_stopped:
            self._decode(last=True)
        return self._show(last=True)

    def _decode(self, *, last: bool) -> None:
        full = self._tokenizer.decode(self._ids[self._start :])
        kept = full if last else _complete(full)
        self.text += kept[self._taken :]
        self._taken = max(self._taken, len(kept))
        if kept == full:
            self._start, self._read = self._read, len(self._ids)
            self._taken = len(self._tokenizer.decode(self._ids[self._start : self._read]))
        found = [place for stop in self._stops if (place := self.text.find(stop, self._shown)) >= 0]
        if found:
            self.text, self.is_stopped = self.text[: min(found)], True

    def _show(self, *, last: bool) -> str:
        """Text that was not shown; without an end that may be the beginning of a stop string."""
        end = len(self.text)
        if not last and not self.is_stopped:
            end -= max((_overlap(self.text[self._shown :], stop) for stop in self._stops), default=0)
        shown, self._shown = self.text[self._shown : end], end
        return shown


def _complete(text: str) -> str:
    """Text without undecodable bytes at its end that later tokens can complete."""
    undecodable = len(text) - len(text.rstrip(UNFINISHED))
    return text[: len(text) - min(undecodable, LONGEST_CHARACTER - 1)]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


# B: sequences, V: vocabulary


class Sampler:
    """Greedy choice, or sampling with a temperature from the most probable tokens.

    A sequence has a random generator of its own, so that its text depends on the seed and its number, but not
    on the other sequences or the layout.

    Args:
        temperature: logits are divided by it; 0 chooses the most probable token.
        top_k: sample from this many tokens; None: all.
        top_p: sample from the most probable tokens whose probabilities sum to at least this
            (arXiv:1904.09751).
        numbers: number of each sequence.
    """

    def __init__(
        self, temperature: float, top_k: int | None, top_p: float, seed: int, numbers: Sequence[int]
    ) -> None:
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self._generators = [random.Random(f"{seed}.{number}") for number in numbers]

    def choose(self, logits_BV: Tensor) -> Tensor:
        """Return the chosen token of each sequence, int64 [B]."""
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        logits_BV, tokens_BV = logits_BV.float().sort(dim=-1, descending=True, stable=True)
        # Relative to the largest, so that no quotient by a small temperature is infinity.
        logits_BV = (logits_BV - logits_BV[:, :1]).double() / self.temperature
        if self.top_k is not None:
            logits_BV, tokens_BV = logits_BV[:, : self.top_k], tokens_BV[:, : self.top_k]
        ends_BV = logits_BV.softmax(-1).cumsum(-1)
        if self.top_p < 1:
            # A token is left out if those before it already have the probability.
            starts_BV = ends_BV - logits_BV.softmax(-1)
            kept_BV = starts_BV < self.top_p
            kept_BV[:, 0] = True
            ends_BV = logits_BV.masked_fill(~kept_BV, float("-inf")).softmax(-1).cumsum(-1)
        drawn = torch.tensor([each.random() for each in self._generators])
        drawn_B1 = drawn.to(ends_BV).unsqueeze(1) * ends_BV[:, -1:]
        place_B1 = torch.searchsorted(ends_BV, drawn_B1, right=True).clamp(max=ends_BV.shape[1] - 1)
        return tokens_BV.gather(1, place_B1).squeeze(1)


PADDING = 0


@dataclass(frozen=True)
class Timing:
    """Durations of one batch, seconds: the pass over the prompts, and all later passes."""

    prefill: float
    decode: float


@torch.no_grad()
def generate_batch(
    model: InferenceModel,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    most: int,
    add: Callable[[int, int], bool],
) -> Timing:
    """Generate until every sequence has ended.

    All ranks call it together, with the same ``most``; the ranks of one data-parallel position have the same
    prompts, other positions may have others.

    Args:
        model: the model, with ``use_cache`` called.
        prompts: ids of each prompt, at least one.
        most: number of new tokens of a sequence.
        add: called with a row and its new token; returns whether the sequence goes on.
    """
    lengths, open_rows = [len(prompt) for prompt in prompts], set(range(len(prompts)))
    longest = max(lengths)
    tokens_BT = torch.tensor([[*prompt, *[PADDING] * (longest - len(prompt))] for prompt in prompts])
    started, prefilled = time.perf_counter(), 0.0
    for count in range(most):
        new = CachedPass(lengths, is_first=count == 0, device=model.device)
        logits_BV = model.part(tokens_BT.to(model.device), cached=new)[:, 0]
        chosen = _agreed(sampler.choose(logits_BV), model).tolist()
        for row in sorted(open_rows):
            if not add(row, chosen[row]):
                open_rows.discard(row)
        if count == 0:
            prefilled = time.perf_counter()
        if _all_ended(not open_rows, model):
            break
        tokens_BT = torch.tensor(chosen).unsqueeze(1)
        lengths = [length + 1 for length in lengths]
    return Timing(prefilled - started, time.perf_counter() - prefilled)


def _agreed(token_B: Tensor, model: InferenceModel) -> Tensor:
    """The choice of the first tensor-parallel rank, so that rounding cannot separate the ranks."""
    if model.mesh.size("tp") > 1:
        dist.broadcast(token_B, group=model.mesh.group("tp"), group_src=0)
    return token_B


def _all_ended(ended: bool, model: InferenceModel) -> bool:
    """Whether the sequences of all ranks have ended: data-parallel ranks make every pass together."""
    if model.job.parallelism.data_parallel == 1:
        return ended
    running = torch.tensor(int(not ended))
    dist.all_reduce(running, group=model.ranks.group)
    return running.item() == 0


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
class GeneratedTexts:
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
) -> GeneratedTexts:
    """Generate on this rank of a process group; return all texts in order, and the slowest rank's durations.

    Args:
        job: the resolved job; training.seq_len is the longest sequence.
        load: returns a job's model with its weights.
        show: whether to print a single prompt, and its text while it is generated.
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
) -> GeneratedTexts:
    """Generate the texts of all prompts on all ranks together; see ``generate``."""
    outcome, replicas = GeneratedTexts(), model.job.parallelism.data_parallel
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

    def run(self, model: InferenceModel, outcome: GeneratedTexts) -> None:
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


def _joined(outcomes: Sequence[GeneratedTexts]) -> GeneratedTexts:
    """One outcome of all ranks: all texts, the longest durations, and the tokens of each text once."""
    texts = sorted((text for each in outcomes for text in each.texts), key=lambda text: text.number)
    return GeneratedTexts(
        texts,
        **{name: max(getattr(each, name) for each in outcomes) for name in SECONDS},
        prefill_tokens=sum(text.prompt_tokens for text in texts),
        # The first new token of a text is chosen in the pass over its prompt.
        decode_tokens=sum(len(text.tokens) - 1 for text in texts),
    )
