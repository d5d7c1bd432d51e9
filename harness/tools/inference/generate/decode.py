"""Generate tokens for a batch of prompts with a model on any layout."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from harness.model.cache import CachedPass
from harness.tools.inference.generate.sampling import Sampler
from harness.tools.inference.model import InferenceModel

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
        sampler: chooses tokens.
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
