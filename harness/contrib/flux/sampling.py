"""Sample latents of pictures: Euler steps from noise to data along the predicted velocity."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from harness.contrib.flux.config import PATCH, FlowConfig
from harness.contrib.flux.model import Flux, pack, unpack
from harness.contrib.flux.objective import generator_of, shift_of
from harness.contrib.flux.pictures.encoder_base import Embeddings
from harness.parallelism.fsdp import reshard
from harness.parallelism.mesh import Mesh


class Sampling(NamedTuple):
    """How latents are sampled.

    Attributes:
        steps: passes of the model.
        guidance: strength of guidance, given to a model with ``flux.guidance``.
        cfg: weight of classifier-free guidance: the velocity is ``empty + cfg * (caption - empty)``, with a
            second pass for the empty caption. 1: only one pass.
    """

    steps: int
    guidance: float = 3.5
    cfg: float = 1.0


def sampling_times(steps: int, shift: float) -> list[float]:
    """Times from 1 (noise) to 0, with more of them near noise for a positive shift.

    ``e^s t / (1 + (e^s - 1) t)`` of equally spaced t (src/flux/sampling.py, get_schedule); as in diffusers,
    in float32.
    """
    times = np.linspace(1, 0, steps + 1).astype(np.float32)
    factor = np.float32(math.exp(shift))
    return [float(time) for time in factor * times / (1 + (factor - 1) * times)]


def noise_of(seed: int, numbers: Sequence[int], shape: Sequence[int], device: torch.device) -> Tensor:
    """Normal noise [B, *shape], float32; each row is a function of the seed and its number."""
    rows = [
        torch.randn(*shape, generator=generator_of(seed, "sampled picture", number, device), device=device)
        for number in numbers
    ]
    return torch.stack(rows)


class Sampler:
    """Samples latents with a model part, on any layout without a pipeline.

    Args:
        part: the model.
        mesh: all ranks call ``sample`` together; tensor- and context-parallel ranks with the same pictures.
        flow: its shift of times is that of sampling, too.
    """

    def __init__(self, part: Flux, mesh: Mesh, flow: FlowConfig) -> None:
        self._part, self._mesh, self._flow = part, mesh, flow

    @torch.no_grad()
    def sample(
        self, noise_BCHW: Tensor, captions: Embeddings, empty: Embeddings | None, how: Sampling
    ) -> Tensor:
        """Return latents [B, C, H, W], float32.

        Args:
            noise_BCHW: float32, on the device of the part.
            captions: B embeddings.
            empty: those of the empty caption, one row; needed if ``how.cfg`` is not 1.
            how: number of steps, and guidance.
        """
        grid = noise_BCHW.shape[2] // PATCH, noise_BCHW.shape[3] // PATCH
        self._part.set_grid(*grid)
        tokens_BIP, device = pack(noise_BCHW), noise_BCHW.device
        captions = Embeddings(*(each.to(device) for each in captions))
        if how.cfg != 1:
            assert empty is not None, "classifier-free guidance needs the empty caption"
            rows = len(noise_BCHW)
            empty = Embeddings(*(each.to(device).expand(rows, *each.shape[1:]) for each in empty))
        times = sampling_times(how.steps, shift_of(self._flow, math.prod(grid)))
        for time, following in itertools.pairwise(times):
            velocity = self._velocity(tokens_BIP, captions, time, how)
            if empty is not None and how.cfg != 1:
                without = self._velocity(tokens_BIP, empty, time, how)
                velocity = without + how.cfg * (velocity - without)
            tokens_BIP = tokens_BIP + (following - time) * velocity
        # Without a backward pass FSDP leaves some modules gathered.
        reshard(self._part)
        return unpack(tokens_BIP, grid)

    def _velocity(self, tokens_BIP: Tensor, captions: Embeddings, time: float, how: Sampling) -> Tensor:
        """Predict noise - data for all tokens of the pictures, float32."""
        part, device = self._part, tokens_BIP.device
        text_BLD, own_BIP = part.own_tokens(captions.text_BLD, tokens_BIP)
        times_B = torch.full((len(tokens_BIP),), time, device=device)
        guidance_B = torch.full_like(times_B, how.guidance) if part.flux.guidance else None
        predicted = part(own_BIP, text_BLD, captions.pooled_BP, times_B, guidance_B).float()
        if self._mesh.size("cp") == 1:
            return predicted  # type: ignore[no-any-return]
        # Context-parallel ranks have different tokens: each adds its own to zeros.
        index = torch.arange(tokens_BIP.shape[1], device=device)[None, :, None]
        own = part.own_tokens(captions.text_BLD[:1], index)[1][0, :, 0]
        complete = torch.zeros_like(tokens_BIP).index_copy(1, own, predicted)
        dist.all_reduce(complete, group=self._mesh.group("cp"))
        return complete


def without_shift(flow: FlowConfig) -> FlowConfig:
    """The config of times that are not shifted."""
    return replace(flow, base_shift=0.0, max_shift=0.0)
