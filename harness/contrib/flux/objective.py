"""What a step trains: noise, times, and the loss of flow matching.

Every random value comes from a generator seeded with the run's seed, a purpose, and the number of the sample.
So it depends neither on the layout nor on where a run was resumed. It does depend on the kind of device, as
initial values do (``harness.parallelism.materialize``).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.contrib.flux.batch import ImageBatch
from harness.contrib.flux.config import FlowConfig
from harness.contrib.flux.model import pack

VALIDATION_TIMES = 8
"""Validation samples have the times 1/16, 3/16, ..., 15/16 in turn, by their number."""
SHIFT_TOKENS = 256, 4096
"""Tokens of the pictures that base_shift and max_shift are for."""


class Flow(NamedTuple):
    """The inputs of a pass, and what it should predict."""

    noisy_BIP: Tensor
    text_BLD: Tensor
    pooled_BP: Tensor
    times_B: Tensor
    target_BIP: Tensor


def training_flow(batch: ImageBatch, config: FlowConfig, seed: int) -> Flow:
    """Sample latents, times and noise of a batch on its device."""
    latents, numbers = batch.mean_BCHW, numbers_of(batch)
    if batch.std_BCHW is not None:
        latents = latents + batch.std_BCHW * _normals("latents", numbers, latents, seed)
    times_B = _normals("time", numbers, latents.new_empty(len(numbers)), seed)
    times_B = (config.time_mean + config.time_std * times_B).sigmoid()
    factor = math.exp(shift_of(config, batch.image_tokens))
    times_B = factor * times_B / (1 + (factor - 1) * times_B)
    return _mixed(batch, latents, times_B, _normals("noise", numbers, latents, seed))


def validation_flow(batch: ImageBatch, seed: int) -> Flow:
    """Noise the means of a batch's latents at fixed times."""
    latents, numbers = batch.mean_BCHW, batch.numbers_B
    times_B = (numbers % VALIDATION_TIMES + 0.5).float() / VALIDATION_TIMES
    noise = _normals("validation noise", numbers_of(batch), latents, seed)
    return _mixed(batch, latents, times_B.to(latents.device, non_blocking=True), noise)


def numbers_of(batch: ImageBatch) -> list[int]:
    """The numbers of a batch's samples."""
    return batch.numbers_B.tolist()


def shift_of(config: FlowConfig, image_tokens: int) -> float:
    """The shift s of times for pictures of this many tokens (src/flux/sampling.py, get_lin_function)."""
    few, many = SHIFT_TOKENS
    slope = (config.max_shift - config.base_shift) / (many - few)
    return config.base_shift + slope * (image_tokens - few)


def _mixed(batch: ImageBatch, latents: Tensor, times_B: Tensor, noise: Tensor) -> Flow:
    share = times_B[:, None, None, None]
    noisy = (1 - share) * latents + share * noise
    return Flow(pack(noisy), batch.text_BLD, batch.pooled_BP, times_B, pack(noise - latents))


def _normals(purpose: str, numbers: list[int], like: Tensor, seed: int) -> Tensor:
    """Standard normal values with the shape of ``like``, float32; each row by the number of its sample."""
    rows = [
        torch.randn(
            like.shape[1:], generator=generator_of(seed, purpose, number, like.device), device=like.device
        )
        for number in numbers
    ]
    return torch.stack(rows)


def generator_of(seed: int, purpose: str, number: int, device: torch.device) -> torch.Generator:
    """The generator of one sample's values for one purpose."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{number}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class FlowLoss:
    """Squared error of the prediction, mean over a token's values, summed over the pictures' tokens and
    divided by ``denominator``, their number in the optimizer step."""

    def __init__(self) -> None:
        self.denominator = 1.0

    def context(self) -> nullcontext[None]:
        """Context manager that forward and backward of the loss must run in."""
        return nullcontext()

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Not used: pictures come from one source."""
        raise AssertionError("pictures have no sources")
        yield []

    def __call__(self, predicted_BIP: Tensor, target_BIP: Tensor) -> Tensor:
        """Map predictions and targets [B, I, P] to a float32 scalar."""
        errors = F.mse_loss(predicted_BIP.float(), target_BIP.float(), reduction="sum")
        return errors / (predicted_BIP.shape[-1] * self.denominator)
