"""One optimizer step's forward and backward passes, with a pipeline and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from harness.data.loader import IGNORE_INDEX, Batch
from harness.job import Job
from harness.model.decoder import Decoder
from harness.parallelism.context import local_positions, take_share
from harness.parallelism.fsdp import sync_gradients
from harness.parallelism.loss import TokenLoss
from harness.parallelism.mesh import Mesh
from harness.parallelism.pipeline import build_schedule, forward_only


class Executor(Protocol):
    """Carries out passes over one local batch [local_batch_size, T].

    The batch comes with whole sequences; where ranks share them, an executor takes this rank's positions.
    """

    def forward_backward(self, batch: Batch, *, last: bool) -> Tensor:
        """Adds the batch's gradients; returns its losses [L], 0 on ranks that do not compute one.

        The first is that of the next token; with multi-token prediction there is that of the one after it,
        which its weight multiplies in backward only. ``last`` says that no further batch of this optimizer
        step follows.
        """
        ...

    def forward(self, batch: Batch) -> Tensor:
        """Returns the batch's loss of the next token, a scalar, without gradients; 0 as above."""
        ...


def build_executor(
    job: Job, mesh: Mesh, parts: Sequence[Decoder], loss: TokenLoss, device: torch.device
) -> Executor:
    """The executor that a layout needs."""
    layout, positions = job.parallelism, None
    if layout.cp > 1:
        positions = local_positions(layout, job.training.seq_len, mesh.rank("cp")).to(device)
    if layout.pp > 1:
        return PipelineExecutor(job, mesh, parts, loss, device, positions)
    return DirectExecutor(job, parts[0], loss, positions)


def one_later(batch: Batch) -> Batch:
    """What multi-token prediction sees: each position has the next one's input and label.

    The last position has none, and its label is ignored; so are those of positions whose next one is in
    another document, where documents are told apart. Otherwise a label is ignored where the batch ignores it.
    """
    inputs_BT, labels_BT = batch.inputs_BT.roll(-1, 1), batch.labels_BT.roll(-1, 1)
    labels_BT[:, -1] = IGNORE_INDEX
    if batch.documents_BT is not None:
        crosses_BT = batch.documents_BT.roll(-1, 1) != batch.documents_BT
        labels_BT = labels_BT.masked_fill(crosses_BT, IGNORE_INDEX)
    return Batch(inputs_BT, labels_BT)


class DirectExecutor:
    """The whole model lies on this rank (or on its tensor-parallel group)."""

    def __init__(self, job: Job, part: Decoder, loss: TokenLoss, positions: Tensor | None) -> None:
        self.layout, self.part, self.loss = job.parallelism, part, loss
        self.in_head = job.training.loss_chunks > 1
        self.positions, self.mtp = positions, job.model.mtp

    def forward_backward(self, batch: Batch, *, last: bool) -> Tensor:
        sync_gradients(self.part, self.layout, last)
        # Before ranks share the sequence: what follows a position may be another rank's.
        later = take_share(one_later(batch), self.positions) if self.mtp.depth else None
        batch = take_share(batch, self.positions)
        with self.loss.context():
            if later is None:
                loss = self._loss(batch)
                loss.backward()
                return loss.detach().unsqueeze(0)
            losses = self._losses(batch, later)
            (losses[0] + self.mtp.loss_weight * losses[1]).backward()
        return losses.detach()

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        batch = take_share(batch, self.positions)
        with self.loss.context():
            return self._loss(batch)

    def _loss(self, batch: Batch) -> Tensor:
        documents = batch.documents_BT
        if self.in_head:
            return self.part(batch.inputs_BT, batch.labels_BT, documents)  # type: ignore[no-any-return]
        # Nothing holds the logits, so that they are gone before backward makes its own: those of a large
        # vocabulary are the largest tensor.
        return self.loss(self.part(batch.inputs_BT, documents_BT=documents), batch.labels_BT)

    def _losses(self, batch: Batch, later: Batch) -> Tensor:
        inputs_BT, labels_BT, documents = batch
        if self.in_head:
            return self.part(inputs_BT, labels_BT, documents, later.inputs_BT, later.labels_BT)  # type: ignore[no-any-return]
        logits = self.part(inputs_BT, documents_BT=documents, later_BT=later.inputs_BT).chunk(2)
        return torch.stack([self.loss(logits[0], labels_BT), self.loss(logits[1], later.labels_BT)])


class PipelineExecutor:
    """This rank holds some stages; torch's schedule runs microbatches through them."""

    def __init__(
        self,
        job: Job,
        mesh: Mesh,
        parts: Sequence[Decoder],
        loss: TokenLoss,
        device: torch.device,
        positions: Tensor | None,
    ) -> None:
        self.loss, self.device, self.positions = loss, device, positions
        self.layout, self.parts = job.parallelism, parts
        self.schedule = build_schedule(job, mesh, parts, loss, device)
        self.holds_first = any(part.tok_embeddings is not None for part in parts)
        self.holds_last = any(part.output is not None for part in parts)
        self.in_head = job.training.loss_chunks > 1

    def forward_backward(self, batch: Batch, *, last: bool) -> Tensor:
        return self._run(self.schedule.step, batch).unsqueeze(0)

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        with forward_only(self.schedule):
            return self._run(self.schedule.eval, batch)

    def _run(self, run, batch: Batch) -> Tensor:  # type: ignore[no-untyped-def]
        batch = take_share(batch, self.positions)
        inputs = (batch.inputs_BT,) if self.holds_first else ()
        target = batch.labels_BT if self.holds_last else None
        losses: list[Tensor] | None = [] if self.holds_last else None
        # Keywords reach every stage of this rank, cut into microbatches; only the head looks at labels.
        said = {} if batch.documents_BT is None else {"documents_BT": batch.documents_BT}
        if self.in_head and self.holds_last:
            said["labels_BT"] = batch.labels_BT
        with self.loss.context():
            # Returned outputs would keep every microbatch's logits alive.
            run(*inputs, target=target, losses=losses, return_outputs=False, **said)
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum()
