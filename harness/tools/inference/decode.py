"""One rank of a generation: choose tokens on any layout, and decode them to text piece by piece."""

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from harness.config.job import Job
from harness.data.tokenizer import Tokenizer, build_tokenizer
from harness.model.cache import CachedPass
from harness.tools.inference.generate import SECONDS, GenerateConfig, GenerateJob, Prompt
from harness.tools.inference.model import InferenceModel
from harness.train.step import HostCopy

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

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._ids = list(prompt[-CONTEXT:])
        # Ids from ``_start`` on are decoded together; the text has the first ``_taken`` characters
        # of them.
        self._start = 0
        self._read = len(self._ids)
        self._taken = len(tokenizer.decode(self._ids))
        self.text = ""
        self._shown = 0
        self.is_stopped = False

    def add(self, token: int) -> str:
        """Add a token; return the text that can be shown since the last call."""
        self._ids.append(token)
        return self._advance(last=False)

    def finish(self) -> str:
        """Return the rest of the text."""
        return self._advance(last=True)

    def _advance(self, *, last: bool) -> str:
        """Decode what is complete; return what was not shown, and cannot begin a stop string."""
        if not self.is_stopped:
            self._decode(last=last)
        unshown = self.text[self._shown :]
        held = 0
        if not last and not self.is_stopped:
            for stop in self._stops:
                for count in range(held + 1, len(stop)):
                    if unshown.endswith(stop[:count]):
                        held = count
        self._shown = len(self.text) - held
        return unshown[: len(unshown) - held]

    def _decode(self, *, last: bool) -> None:
        full = self._tokenizer.decode(self._ids[self._start :])
        kept = full
        if not last:
            # Undecodable bytes at the end, which later tokens can complete.
            undecodable = len(full) - len(full.rstrip(UNFINISHED))
            kept = full[: len(full) - min(undecodable, LONGEST_CHARACTER - 1)]
        self.text += kept[self._taken :]
        self._taken = max(self._taken, len(kept))
        if kept == full:
            self._start = self._read
            self._read = len(self._ids)
            self._taken = len(self._tokenizer.decode(self._ids[self._start : self._read]))
        found = [place for stop in self._stops if (place := self.text.find(stop, self._shown)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.is_stopped = True


# B: sequences, T: tokens of a prompt, N: new tokens, V: vocabulary


class Sampler:
    """Greedy choice, or sampling with a temperature from the most probable tokens.

    A sequence has random numbers of its own, so that its text depends on the seed and its number
    only. They are drawn before, so that a choice needs nothing of the host.
    """

    def __init__(self, config: GenerateConfig) -> None:
        self.config = config
        self._drawn_NB = self._next_1 = torch.empty(0)

    def begin(self, numbers: Sequence[int], most: int, device: torch.device) -> None:
        """Begin sequences with these numbers, of at most so many tokens."""
        if self.config.temperature > 0:
            drawn_BN = []
            for number in numbers:
                generator = random.Random(f"{self.config.seed}.{number}")
                drawn_BN.append([generator.random() for _ in range(most)])
            self._drawn_NB = kept(self._drawn_NB, torch.tensor(drawn_BN).T.double().to(device))
            self._next_1 = kept(self._next_1, torch.zeros(1, dtype=torch.int64, device=device))

    def choose(self, logits_BV: Tensor) -> Tensor:
        """Return the chosen token of each sequence, int64 [B]."""
        config = self.config
        if config.temperature == 0:
            return logits_BV.argmax(-1)
        logits_BV, tokens_BV = logits_BV.float().sort(dim=-1, descending=True, stable=True)
        # Relative to the largest, so that no quotient by a small temperature is infinity.
        logits_BV = (logits_BV - logits_BV[:, :1]).double() / config.temperature
        if config.top_k is not None:
            logits_BV = logits_BV[:, : config.top_k]
            tokens_BV = tokens_BV[:, : config.top_k]
        chances_BV = logits_BV.softmax(-1)
        # A token is left out if those before it already have the probability.
        starts_BV = chances_BV.cumsum(-1) - chances_BV
        ends_BV = chances_BV.masked_fill(starts_BV >= config.top_p, 0.0).cumsum(-1)
        drawn_B1 = self._drawn_NB.index_select(0, self._next_1).T * ends_BV[:, -1:]
        self._next_1 += 1
        place_B1 = torch.searchsorted(ends_BV, drawn_B1, right=True).clamp(max=ends_BV.shape[1] - 1)
        return tokens_BV.gather(1, place_B1).squeeze(1)


def kept(held: Tensor, new: Tensor) -> Tensor:
    """New values, in the memory of those before if that fits: a captured pass reads there."""
    return held.copy_(new) if held.shape == new.shape else new


PADDING = 0


class Passes:
    """Passes over the tokens of batches. Lengths and new tokens stay on the device.

    A GPU repeats the pass of one token as a CUDA graph, captured once for each number of sequences.

    Args:
        model: the model, with ``use_cache`` called.
    """

    def __init__(self, model: InferenceModel, sampler: Sampler) -> None:
        self.model = model
        self.sampler = sampler
        self._tokens_B = self._lengths_B = torch.empty(0)
        self._graph: torch.cuda.CUDAGraph | None = None
        # The host starts FSDP's collectives, and multiplies experts one by one if they are not in
        # bfloat16.
        needs_host = model.job.model.moe.enabled and model.job.precision.param_dtype != "bfloat16"
        of_fsdp = isinstance(model.part, FSDPModule)
        self._captures = model.device.type == "cuda" and not (needs_host or of_fsdp)

    def begin(
        self, prompts: Sequence[Sequence[int]], numbers: Sequence[int], most: int
    ) -> HostCopy:
        """Run the pass over prompts; return the first new token of each, [B]."""
        device = self.model.device
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        if len(prompts) != len(self._lengths_B):
            self._graph = None
        tokens_BT = torch.tensor(
            [[*prompt, *[PADDING] * (longest - len(prompt))] for prompt in prompts]
        )
        self._tokens_B = kept(self._tokens_B, tokens_BT[:, 0].to(device))
        self._lengths_B = kept(self._lengths_B, torch.tensor(lengths, device=device))
        self.sampler.begin(numbers, most, device)
        with torch.compiler.set_stance("force_eager"):  # prompts have many lengths
            self._run(tokens_BT.to(device), longest)
        return HostCopy(self._tokens_B)

    def next(self) -> HostCopy:
        """Run the pass over the newest token of each sequence; return the ones after them, [B]."""
        if self._graph is None:
            self._run(self._tokens_B[:, None], None)
        else:
            self._graph.replay()
        new = HostCopy(self._tokens_B)
        if self._graph is None and self._captures:
            self._graph = torch.cuda.CUDAGraph()
            # Other threads may go on: NCCL's look at their events.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._run(self._tokens_B[:, None], None)
        return new

    def _run(self, tokens_BT: Tensor, prompts: int | None) -> None:
        logits_BV = self.model.part(tokens_BT, cached=CachedPass(self._lengths_B, prompts))[:, 0]
        self._tokens_B.copy_(self.sampler.choose(logits_BV))
        if self.model.mesh.size("tp") > 1:
            # The choice of the first rank, so that rounding cannot separate the ranks.
            dist.broadcast(self._tokens_B, group=self.model.mesh.group("tp"), group_src=0)
        self._lengths_B += 1


# Reasons why a text ended.
LENGTH = "length"
END = "end"
STOP = "stop"


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
    """Generated texts, and durations in seconds."""

    texts: list[Generated] = field(default_factory=list)
    load_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


def generate(
    job: GenerateJob,
    device: torch.device,
    load: Callable[[Job], InferenceModel],
    prompts: Sequence[Prompt],
    show: bool,
) -> GeneratedTexts:
    """Generate on this rank of a process group; return all texts in order, and the slowest rank's durations.

    With ``show``, a single prompt is printed, and its text while it is generated.
    """
    started = time.perf_counter()
    model = load(job)
    model.part.use_cache(job.training.seq_len)
    seconds = time.perf_counter() - started
    tokenizer = build_tokenizer(job.tokenizer)
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
    outcome = GeneratedTexts()
    replicas = model.job.parallelism.data_parallel
    is_first = model.mesh.rank("tp") == 0
    shows = show and is_first and model.mesh.data_rank == 0 and len(prompts) == 1
    passes = Passes(model, Sampler(config))
    numbered = list(enumerate(prompts))
    for start in range(0, len(prompts), config.batch_size * replicas):
        batch = numbered[start : start + config.batch_size * replicas]
        mine = batch[model.mesh.data_rank :: replicas]
        # Every rank takes part in every pass: one without a prompt of its own repeats the first.
        made = _generate_batch(passes, mine or batch[:1], tokenizer, outcome, show=shows)
        if mine and is_first:
            outcome.texts += made
    outcomes = model.ranks.gather(outcome)
    texts = chain.from_iterable(each.texts for each in outcomes)
    joined = GeneratedTexts(sorted(texts, key=attrgetter("number")))
    for name in SECONDS:
        setattr(joined, name, max(getattr(each, name) for each in outcomes))
    return joined


@torch.no_grad()
def _generate_batch(
    passes: Passes,
    numbered: Sequence[tuple[int, Prompt]],
    tokenizer: Tokenizer,
    outcome: GeneratedTexts,
    *,
    show: bool,
) -> list[Generated]:
    """Generate after these prompts until every text has ended, and add to the outcome's durations.

    All ranks call it together, those of one data-parallel position with the same prompts.
    """

    def say(text: str) -> None:
        if show:
            sys.stdout.write(text)
            sys.stdout.flush()

    model = passes.model
    config = passes.sampler.config
    most = config.max_new_tokens
    prompts = [prompt.ids for _, prompt in numbered]
    texts = [Generated(number, prompt.text, len(prompt.ids)) for number, prompt in numbered]
    streams = [TextStream(tokenizer, prompt, config.stop) for prompt in prompts]
    ends: set[int | None] = set()
    if config.stop_at_end:
        ends = {tokenizer.eos_id, *(prompt.end_of_turn for _, prompt in numbered)}
    say(texts[0].prompt)
    open_rows = list(range(len(texts)))
    started = prefilled = time.perf_counter()
    new = passes.begin(prompts, [number for number, _ in numbered], most)
    for left in reversed(range(most)):
        # A GPU computes the next pass, perhaps in vain, while the host looks at the tokens of
        # this one.
        ahead = passes.next() if left and model.device.type != "cpu" else None
        chosen = new.read().tolist()
        for row in list(open_rows):
            texts[row].tokens.append(chosen[row])
            if chosen[row] in ends:
                texts[row].ended_by = END
            else:
                say(streams[row].add(chosen[row]))
            if texts[row].ended_by == END or streams[row].is_stopped:
                open_rows.remove(row)
        if left == most - 1:
            prefilled = time.perf_counter()
        running = torch.tensor(len(open_rows))
        if left and model.job.parallelism.dp_shard > 1:
            # Ranks that share weights make every pass together.
            dist.all_reduce(running, group=model.ranks.group)
        if not left or not running:
            break
        new = ahead or passes.next()
    outcome.prefill_seconds += prefilled - started
    outcome.decode_seconds += time.perf_counter() - prefilled
    for text, stream in zip(texts, streams, strict=True):
        say(f"{stream.finish()}\n")
        text.text = stream.text
        if stream.is_stopped:  # perhaps by characters that were complete only now
            text.ended_by = STOP
    return texts
