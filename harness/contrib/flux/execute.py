"""Forward and backward passes of Flux."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.config.job import Job
from harness.contrib.flux.batch import ImageBatch
from harness.contrib.flux.config import PATCH, flow_of, flux_of
from harness.contrib.flux.model import Flux
from harness.contrib.flux.objective import Flow, FlowLoss, training_flow, validation_flow
from harness.parallelism.fsdp import sync_gradients
from harness.util.annotation import annotated
from harness.util.errors import DataError


class FlowExecutor:
    """The ``harness.parallelism.execute.Executor`` of Flux; every rank runs the full model."""

    def __init__(self, job: Job, part: Flux, loss: FlowLoss) -> None:
        self.part, self.loss, self.layout = part, loss, job.parallelism
        self.config, self.seed = flow_of(job), job.training.seed
        self.guidance = self.config.guidance if flux_of(job.model).guidance else None

    def forward_backward(self, batch: ImageBatch, *, last: bool) -> Tensor:
        sync_gradients(self.part, self.layout, last)
        self._prepare(batch)
        with annotated("forward.head"):
            loss = self._loss(training_flow(batch, self.config, self.seed))
        with annotated("backward.head"):
            loss.backward()
        return loss.detach().unsqueeze(0)

    @torch.no_grad()
    def forward(self, batch: ImageBatch) -> Tensor:
        """Return the loss at fixed times (``validation_flow``)."""
        self._prepare(batch)
        return self._loss(validation_flow(batch, self.seed))

    def score(self, batch: ImageBatch) -> Tensor:
        raise AssertionError("pictures have no probabilities: the job was not refused")

    def _prepare(self, batch: ImageBatch) -> None:
        """Set the grid of the pictures.

        Raises:
            DataError: the batch has other shapes than the model.
        """
        flux = self.part.flux
        rows, columns = (size // PATCH for size in batch.mean_BCHW.shape[2:])
        text, width = batch.text_BLD.shape[1:]
        differing = [
            each
            for each in (
                ("training.seq_len", self.part.job_seq_len, text + rows * columns),
                ("model.options.text_length", flux.text_length, text),
                ("model.options.latent_channels", flux.latent_channels, batch.mean_BCHW.shape[1]),
                ("model.options.context_dim", flux.context_dim, width),
                ("model.options.pooled_dim", flux.pooled_dim, batch.pooled_BP.shape[1]),
            )
            if each[1] != each[2]
        ]
        if differing:
            rules = "; ".join(f"{name} is {own}, and the data has {found}" for name, own, found in differing)
            works = " ".join(f"{name}={found}" for name, _, found in differing)
            raise DataError(f"{rules}; would work: {works}")
        self.part.set_grid(rows, columns)

    def _loss(self, flow: Flow) -> Tensor:
        text_BLD, noisy_BIP = self.part.own_tokens(flow.text_BLD, flow.noisy_BIP)
        _, target_BIP = self.part.own_tokens(flow.text_BLD, flow.target_BIP)
        guidance_B = None if self.guidance is None else torch.full_like(flow.times_B, self.guidance)
        predicted = self.part(noisy_BIP, text_BLD, flow.pooled_BP, flow.times_B, guidance_B)
        return self.loss(predicted, target_BIP)
