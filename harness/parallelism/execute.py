"""Forward and backward passes of an optimizer step, with and without a pipeline."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from harness.config.job import Job
from harness.config.parallelism import ParallelismConfig
from harness.data.batch import IGNORE_INDEX, Batch
from harness.model.part import ModelPart
from harness.parallelism.context import Share, fixed_positions, local_positions_of
from harness.parallelism.expert import routed_positions
from harness.parallelism.fsdp import sync_gradients
from harness.parallelism.loss import TokenLoss
from harness.parallelism.mesh import Mesh
from harness.parallelism.pipeline import build_schedule, forward_only
from harness.util.annotation import annotated


class Executor(Protocol):
    """Runs passes over one local batch [local_batch_size, T], of the kind that the model takes.

    The batch has full sequences; with context parallel the executor selects this rank's positions.
    """

    def forward_backward(self, batch: Any, *, last: bool) -> Tensor:
        """Accumulate the batch's gradients; return its losses [L], 0 on ranks that do not compute one.

        The first loss is that of the next token. With multi-token prediction the second is that of
        the token after it; its weight applies in backward only. ``last``: this is the step's last
        batch.
        """
        ...

    def forward(self, batch: Any) -> Tensor:
        """Return the batch's next-token loss, a scalar, without gradients; 0 on ranks without one."""
        ...

    def score(self, batch: Any) -> Tensor:
        """Score each row: the log-probability of its labels, and the number of those not chosen greedily.

        Returns:
            float64 [B, 2], without gradients: this rank's positions, 0 on ranks that compute no
            loss.
        """
        ...


def computes_loss(mesh: Mesh, parts: Sequence[ModelPart]) -> bool:
    """Whether the loss of this rank counts: it has the output projection and is the first of its tp ranks."""
    return mesh.rank("tp") == 0 and any(part.output is not None for part in parts)


def build_executor(
    job: Job, mesh: Mesh, parts: Sequence[ModelPart], loss: TokenLoss, device: torch.device
) -> Executor:
    """Return the executor for the job's layout."""
    layout = job.parallelism
    share = Share(layout, job.training.seq_len, mesh.rank("cp"), device)
    if layout.pp > 1:
        return PipelineExecutor(job, mesh, parts, loss, device, share)
    return DirectExecutor(job, parts[0], loss, share)


def set_length(
    parts: Sequence[ModelPart], layout: ParallelismConfig, mesh: Mesh, length: int
) -> None:
    """Make model parts compute sequences of ``length`` tokens; an executor for that length runs them."""
    for part in parts:
        part.set_length(length, fixed_positions(layout, length, mesh.rank("cp")))
        for moe in part.mixtures.values():
            if moe.router.positions_T is not None:
                ranks = mesh.rank("cp"), mesh.rank("tp")
                positions_T = routed_positions(layout, length, *ranks)
                moe.router.positions_T = positions_T.to(moe.router.positions_T.device)


def shift_by_one(batch: Batch) -> Batch:
    """The batch that multi-token prediction uses: each position has the next position's input and label.

    Labels are ignored where the batch ignores them, at the last position, and, if the batch has
    document numbers, where the next position is in another document.
    """
    inputs_BT = batch.inputs_BT.roll(-1, 1)
    labels_BT = batch.labels_BT.roll(-1, 1)
    labels_BT[:, -1] = IGNORE_INDEX
    if batch.documents_BT is not None:
        crosses_BT = batch.documents_BT.roll(-1, 1) != batch.documents_BT
        labels_BT = labels_BT.masked_fill(crosses_BT, IGNORE_INDEX)
    return Batch(inputs_BT, labels_BT)


def _keywords(batch: Batch, positions: Tensor | None) -> dict[str, Tensor]:
    """What every part of the model gets of a batch, and its positions, if rows have others."""
    names = ("documents_BT", "real_B")
    keywords = {name: found for name in names if (found := getattr(batch, name)) is not None}
    if positions is not None and positions.dim() == 2:
        keywords["positions_BT"] = positions
    return keywords


class DirectExecutor:
    """Executor without a pipeline: every rank (or tensor-parallel group) runs the full model."""

    def __init__(self, job: Job, part: ModelPart, loss: TokenLoss, share: Share) -> None:
        self.layout = job.parallelism
        self.part = part
        self.loss = loss
        self.in_head = job.training.loss_in_head
        self.share = share
        self.mtp = job.model.mtp

    def forward_backward(self, batch: Batch, *, last: bool) -> Tensor:
        sync_gradients(self.part, self.layout, last)
        given = self._split(batch, self.mtp.depth > 0)
        with self.loss.context():
            # Modules have phases of their own in these two; the rest is the loss.
            with annotated("forward.head"):
                losses = total = self._losses(*given)
                if self.mtp.depth:
                    total = losses[0] + self.mtp.loss_weight * losses[1]
            with annotated("backward.head"):
                total.backward()
        return losses.detach().view(-1)

    @torch.no_grad()
    def forward(self, batch: Batch, *, further: bool = False) -> Tensor:
        """As in ``Executor``; with ``further``, multi-token prediction is computed too."""
        further = further and self.mtp.depth > 0
        given = self._split(batch, further)
        with self.loss.context():
            losses = self._losses(*given)
        return losses[0] if further else losses

    def score(self, batch: Batch) -> Tensor:
        with self.loss.scoring():
            return self.forward(batch)

    def _split(self, batch: Batch, further: bool) -> tuple[Batch, Batch | None, dict[str, Tensor]]:
        """This rank's share of a batch, with ``further`` one position later too, and keywords."""
        batch, positions = self.share.positions(batch)
        # Shifted before the sequence is split: the next position may be another rank's.
        later = local_positions_of(shift_by_one(batch), positions) if further else None
        batch = local_positions_of(batch, positions)
        return batch, later, _keywords(batch, positions)

    def _losses(self, batch: Batch, later: Batch | None, keywords: dict[str, Tensor]) -> Tensor:
        """The loss, a scalar; with ``later`` both losses of multi-token prediction, [2]."""
        inputs_BT, labels_BT = batch[:2]
        if self.in_head:
            keywords["labels_BT"] = labels_BT
            if later is not None:
                keywords |= {"later_BT": later.inputs_BT, "later_labels_BT": later.labels_BT}
            return self.part(inputs_BT, **keywords)  # type: ignore[no-any-return]
        if later is None:
            # No variable holds the logits, so that they are freed before backward allocates their
            # gradient: with a large vocabulary they are the largest tensor.
            return self.loss(self.part(inputs_BT, **keywords), labels_BT)
        logits = self.part(inputs_BT, **keywords, later_BT=later.inputs_BT).chunk(2)
        return torch.stack([self.loss(logits[0], labels_BT), self.loss(logits[1], later.labels_BT)])


class PipelineExecutor:
    """Executor with a pipeline: torch's schedule runs microbatches through this rank's stages."""

    def __init__(
        self,
        job: Job,
        mesh: Mesh,
        parts: Sequence[ModelPart],
        loss: TokenLoss,
        device: torch.device,
        share: Share,
    ) -> None:
        self.loss = loss
        self.device = device
        self.share = share
        self.schedule = build_schedule(job, mesh, parts, loss, device)
        self.holds_first = any(part.tok_embeddings is not None for part in parts)
        self.holds_last = any(part.output is not None for part in parts)
        self.in_head = job.training.loss_in_head

    def forward_backward(self, batch: Batch, *, last: bool) -> Tensor:
        return self._sum(self._run(self.schedule.step, batch)).view(1)

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        with forward_only(self.schedule):
            return self._sum(self._run(self.schedule.eval, batch))

    @torch.no_grad()
    def score(self, batch: Batch) -> Tensor:
        with self.loss.scoring(), forward_only(self.schedule):
            scores = self._run(self.schedule.eval, batch)
        if scores:
            return torch.cat(scores)
        return torch.zeros(len(batch.inputs_BT), 2, device=self.device, dtype=torch.float64)

    def _sum(self, losses: list[Tensor]) -> Tensor:
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)

    def _run(self, run, batch: Batch) -> list[Tensor]:  # type: ignore[no-untyped-def]
        batch, positions = self.share.positions(batch)
        batch = local_positions_of(batch, positions)
        inputs = (batch.inputs_BT,) if self.holds_first else ()
        target = batch.labels_BT if self.holds_last else None
        losses: list[Tensor] | None = [] if self.holds_last else None
        # Keywords are passed to every stage of this rank, split into microbatches; only the head
        # uses labels.
        keywords = _keywords(batch, positions)
        if self.in_head and self.holds_last:
            keywords["labels_BT"] = batch.labels_BT
        with self.loss.context(), annotated("pp.wait"):
            # Returned outputs would keep every microbatch's logits alive.
            run(*inputs, target=target, losses=losses, return_outputs=False, **keywords)
        return [loss.detach() for loss in losses or []]
