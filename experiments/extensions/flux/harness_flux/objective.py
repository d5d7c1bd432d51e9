"""What a step trains: noise, times, and the loss of flow matching.

Every random value comes from a generator seeded with the run's seed, a purpose, and the number of
the sample. So it depends neither on the layout nor on where a run was resumed. It does depend on
the kind of device, as initial values do (``harness.parallelism.materialize``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.config.job import Job
from harness.model.spec import Init
from harness.parallelism.fsdp import sync_gradients
from harness.parallelism.loss import Loss
from harness.parallelism.materialize import draw
from harness.util.annotation import annotated
from harness.util.errors import DataError
from harness_flux.config import FlowConfig, flow_of
from harness_flux.model import Flux, pack

# B is the number of a rank's rows, L the tokens of a caption; C, H and W are those of latents.


class ImageBatch(NamedTuple):
    """A rank's rows of one global step of encoded pictures, in row order.

    A sample is a sequence of L text tokens and one token for each square of 2 x 2 latents.
    """

    mean_BCHW: Tensor
    """Mean of the autoencoder's posterior, shifted and scaled for the model, float32. C: channels
    of the autoencoder; H, W: height and width of the picture / 8."""
    std_BCHW: Tensor | None
    """Standard deviation of the same, scaled; None: the mean is used as it is."""
    text_BLD: Tensor
    """Embedding of the caption's tokens (T5). Rows of dropped captions have that of the empty
    caption."""
    pooled_BP: Tensor
    """Embedding of the caption (CLIP)."""
    numbers_B: Tensor
    """Number of each row's sample, ``step * global_batch_size + row``: noise and times are
    functions of the seed and this number. int64, always in host memory."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and tokens of each."""
        return len(self.mean_BCHW), self.text_BLD.shape[1] + self.image_tokens

    @property
    def sources_B(self) -> None:
        """Pictures come from one source."""
        return None

    @property
    def image_tokens(self) -> int:
        """Tokens of a picture."""
        return self.mean_BCHW.shape[2] * self.mean_BCHW.shape[3] // 4

    def count_valid(self) -> int:
        """Number of tokens that have a loss: those of the pictures."""
        return len(self.mean_BCHW) * self.image_tokens

    def each(self, function: Callable[[Tensor], Tensor]) -> ImageBatch:
        """Apply ``function`` to every tensor."""
        return ImageBatch(*(None if tensor is None else function(tensor) for tensor in self))  # type: ignore[arg-type]

    def to(self, device: torch.device) -> ImageBatch:
        """Copy to the device asynchronously, through pinned memory; the sample numbers stay."""
        if device.type == "cpu":
            return self

        def copied(tensor: Tensor) -> Tensor:
            if tensor.device.type != "cpu":
                return tensor
            return tensor.pin_memory().to(device, non_blocking=True)

        return self.each(copied)._replace(numbers_B=self.numbers_B)


class FlowExecutor:
    """The ``harness.parallelism.execute.Executor`` of Flux; every rank runs the full model."""

    def __init__(self, job: Job, part: Flux, loss: FlowLoss) -> None:
        self.part = part
        self.loss = loss
        self.layout = job.parallelism
        self.config = flow_of(job)
        self.seed = job.training.seed

    def forward_backward(self, batch: ImageBatch, *, last: bool) -> Tensor:
        sync_gradients(self.part, self.layout, last)
        self._check(batch)
        with annotated("forward.head"):
            loss = self._loss(batch, training_flow(batch, self.config, self.seed))
        with annotated("backward.head"):
            loss.backward()
        return loss.detach().unsqueeze(0)

    @torch.no_grad()
    def forward(self, batch: ImageBatch) -> Tensor:
        """Return the loss at fixed times (``validation_flow``)."""
        self._check(batch)
        return self._loss(batch, validation_flow(batch, self.seed))

    def score(self, batch: ImageBatch) -> Tensor:
        raise AssertionError("pictures have no probabilities: the job was not refused")

    def _check(self, batch: ImageBatch) -> None:
        flux = self.part.flux
        for name, own, found in (
            ("model.options.text_length", flux.text_length, batch.text_BLD.shape[1]),
            ("model.options.latent_channels", flux.latent_channels, batch.mean_BCHW.shape[1]),
            ("model.options.context_dim", flux.context_dim, batch.text_BLD.shape[2]),
            ("model.options.pooled_dim", flux.pooled_dim, batch.pooled_BP.shape[1]),
            ("training.seq_len", self.part.job_seq_len, batch.shape[1]),
        ):
            if own != found:
                rule = f"{name} is {own}, and the data has {found}"
                raise DataError(f"{rule}; would work: {name}={found}")

    def _loss(self, batch: ImageBatch, flow: Flow) -> Tensor:
        text_BLD, noisy_BIP, target_BIP = self.part.own_tokens(
            batch.text_BLD, flow.noisy_BIP, flow.target_BIP
        )
        guidance_B = torch.full_like(flow.times_B, self.config.guidance)
        predicted = self.part(noisy_BIP, text_BLD, batch.pooled_BP, flow.times_B, guidance_B)
        return self.loss(predicted, target_BIP)


VALIDATION_TIMES = 8
"""Validation samples have the times 1/16, 3/16, ..., 15/16 in turn, by their number."""
SHIFT_TOKENS = 256, 4096
"""Tokens of the pictures that base_shift and max_shift are for."""


class Flow(NamedTuple):
    """Noisy pictures and their times, and what should be predicted of them."""

    noisy_BIP: Tensor
    times_B: Tensor
    target_BIP: Tensor


def training_flow(batch: ImageBatch, config: FlowConfig, seed: int) -> Flow:
    """Sample latents, times and noise of a batch on its device."""
    latents = batch.mean_BCHW

    def drawn(purpose: str, shape: Sequence[int]) -> Tensor:
        return normals(purpose, seed, batch.numbers_B.tolist(), shape, latents.device)

    if batch.std_BCHW is not None:
        latents = latents + batch.std_BCHW * drawn("latents", latents.shape[1:])
    times_B = drawn("time", ())
    times_B = (config.time_mean + config.time_std * times_B).sigmoid()
    factor = math.exp(shift_of(config, batch.image_tokens))
    times_B = factor * times_B / (1 + (factor - 1) * times_B)
    return _mixed(latents, times_B, drawn("noise", latents.shape[1:]))


def validation_flow(batch: ImageBatch, seed: int) -> Flow:
    """Noise the means of a batch's latents at fixed times."""
    latents = batch.mean_BCHW
    numbers = batch.numbers_B
    times_B = (numbers % VALIDATION_TIMES + 0.5).float() / VALIDATION_TIMES
    shape = latents.shape[1:]
    noise = normals("validation noise", seed, numbers.tolist(), shape, latents.device)
    return _mixed(latents, times_B.to(latents.device, non_blocking=True), noise)


def shift_of(config: FlowConfig, image_tokens: int) -> float:
    """The shift s of times for pictures of this many tokens (src/flux/sampling.py, get_lin_function)."""
    few, many = SHIFT_TOKENS
    slope = (config.max_shift - config.base_shift) / (many - few)
    return config.base_shift + slope * (image_tokens - few)


def _mixed(latents: Tensor, times_B: Tensor, noise: Tensor) -> Flow:
    share = times_B[:, None, None, None]
    noisy = (1 - share) * latents + share * noise
    return Flow(pack(noisy), times_B, pack(noise - latents))


def normals(
    purpose: str, seed: int, numbers: Sequence[int], shape: Sequence[int], device: torch.device
) -> Tensor:
    """Standard normal values [B, *shape], float32; each row by the seed and the number of its sample."""
    names = [f"{purpose}/{number}" for number in numbers]
    return torch.stack([draw(name, tuple(shape), Init(1.0), seed, device) for name in names])


class FlowLoss(Loss):
    """Squared error of the prediction, mean over a token's values, summed over the pictures' tokens
    and divided by ``denominator``, their number in the optimizer step."""

    def __call__(self, predicted_BIP: Tensor, target_BIP: Tensor) -> Tensor:
        """Map predictions and targets [B, I, P] to a float32 scalar."""
        errors = F.mse_loss(predicted_BIP.float(), target_BIP.float(), reduction="sum")
        return errors / (predicted_BIP.shape[-1] * self.denominator)
