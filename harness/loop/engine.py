"""The model, its optimizer and one optimizer step, on one rank of any layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from harness.data.loader import IGNORE_INDEX, Batch
from harness.job import Job
from harness.optimizer.build import build_optimizer, build_schedule
from harness.parallelism.chunked_loss import ChunkedLoss
from harness.optimizer.in_backward import UpdateInBackward
from harness.parallelism.clip import clip_gradients, local_square_sum, settle_gradients
from harness.parallelism.execute import build_executor
from harness.parallelism.loss import TokenLoss
from harness.parallelism.mesh import build_mesh
from harness.parallelism.parallelize import build_model_parts
from harness.precision.swap import precompute_scales

HOST = torch.device("cpu")


@dataclass(frozen=True)
class StepOutcome:
    """What one step's passes gave; the same on every rank, except ``local_loss``."""

    loss: float
    """Mean loss per valid token of the global batch, nats."""
    grad_norm: float
    """Global 2-norm of the gradients before clipping."""
    valid_tokens: int
    """Tokens of the global batch that the loss counts."""
    local_loss: float | None
    """Mean loss per valid token of this rank's share; None on ranks that compute no loss."""
    stop_requested: bool
    """Whether any rank was asked to stop."""

    @property
    def is_finite(self) -> bool:
        """Whether both figures are numbers; one that is not shows up in them on every rank alike."""
        return abs(self.loss) < float("inf") and abs(self.grad_norm) < float("inf")


class Engine:
    """Everything that is trained, and how.

    All ranks construct it and call its methods together. The figures it returns are sums over the world,
    so that every rank takes the same decision from them.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job, self.device = job, device
        self.mesh = build_mesh(job.parallelism, device)
        self.parts = build_model_parts(job, self.mesh, device)
        split_logits = job.parallelism.tp > 1 and job.parallelism.loss_parallel
        compiled = job.compile.backend if job.compile.loss else None
        vocabulary = self.mesh.axis("tp") if split_logits else None
        self.loss = TokenLoss(job.model.vocab_size, vocabulary, compiled)
        for part in self.parts:
            if part.output is not None and job.training.loss_chunks > 1:
                part.output.loss = ChunkedLoss(self.loss, job.training.loss_chunks, vocabulary, compiled)
        self.executor = build_executor(job, self.mesh, self.parts, self.loss, device)
        self.parameters = [parameter for _, parameter in self.named_parameters()]
        self.optimizer = build_optimizer(job.optimizer, self.named_parameters())
        in_backward = job.optimizer.in_backward
        self.updater = UpdateInBackward(self.optimizer, self.mesh, device) if in_backward else None
        self.schedule = build_schedule(job.schedule, self.optimizer, job.training.steps)
        self.weights_changed = True

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters this rank holds (or shards of them), under their names in the whole model."""
        for part in self.parts:
            yield from part.named_parameters()

    @property
    def rows(self) -> range:
        """Rows of the global batch that this rank works on."""
        share = self.job.global_batch_size // self.job.parallelism.data_parallel
        return range(self.mesh.data_rank * share, (self.mesh.data_rank + 1) * share)

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank speaks for its rows: of those that work on the same ones, the one with the loss.

        Under a pipeline that is the rank with the output projection, which a V-shaped schedule puts first.
        """
        return self.mesh.rank("tp") == 0 and any(part.output is not None for part in self.parts)

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return self.optimizer.param_groups[0]["lr"]

    def set_schedule(self, steps: int) -> None:
        """Moves the schedule to where it is after so many updates; rates are the job's, not those of then."""
        self.schedule.last_epoch = steps
        factors = zip(self.schedule.base_lrs, self.schedule.lr_lambdas, strict=True)
        rates = [base * factor(steps) for base, factor in factors]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.schedule._last_lr = rates

    def gradients(self, batch: Batch, *, stop_requested: bool = False) -> StepOutcome:
        """Computes the gradients of one global batch; with optimizer.in_backward, uses them too.

        Args:
            batch: this rank's rows of it, in host memory.
            stop_requested: whether this rank was asked to stop; travels with the sums that are taken anyway.
        """
        self._scale_weights()
        local_tokens = count_valid(batch)
        # In host memory: on the device this would wait for the step before.
        valid_tokens = int(self.world_sum([local_tokens if self.counts_tokens else 0], HOST)[0])
        # A batch without a single valid token has a loss of 0, not of 0/0.
        self.loss.denominator = float(max(1, valid_tokens))
        pieces = split_batch(self._to_device(batch), self.job.local_batch_size)
        loss = torch.zeros((), device=self.device)
        for i, piece in enumerate(pieces):
            loss = loss + self.executor.forward_backward(piece, last=i + 1 == len(pieces))
        if self.updater is None:
            settle_gradients(self.parameters)
            squares = local_square_sum(self.parameters, self.mesh, self.device)
        else:
            squares = self.updater.take_square_sum()
        square_sum, loss_sum, stops = self.world_sum(
            [squares, loss if self.counts_tokens else 0.0, float(stop_requested)]
        )
        return StepOutcome(
            loss=loss_sum,
            grad_norm=square_sum**0.5,
            valid_tokens=valid_tokens,
            local_loss=self._local(loss, local_tokens),
            stop_requested=stops > 0,
        )

    def update(self, grad_norm: float) -> None:
        """Clips, updates the parameters (unless backward has) and moves the schedule on."""
        if self.updater is None:
            clip_gradients(self.parameters, grad_norm, self.job.training.max_norm)
            self.optimizer.step()
        self.weights_changed = True
        self.schedule.step()
        self.optimizer.zero_grad()

    def skip_update(self) -> None:
        """Drops the gradients; the schedule moves on, so that step and learning rate stay together."""
        self.optimizer.zero_grad()
        # Stepping a scheduler before its optimizer makes torch warn of a mistake; here it is meant.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self.schedule.step()

    def evaluate(self, batch: Batch) -> tuple[float, int]:
        """Sum of token losses and number of valid tokens of one global batch, without gradients."""
        self._scale_weights()
        self.loss.denominator = 1.0
        loss = torch.zeros((), device=self.device)
        for piece in split_batch(self._to_device(batch), self.job.local_batch_size):
            loss = loss + self.executor.forward(piece)
        owns = self.counts_tokens
        total = self.world_sum([loss if owns else 0.0, count_valid(batch) if owns else 0])
        return float(total[0]), int(total[1])

    def world_sum(self, values: Sequence[Tensor | float], device: torch.device | None = None) -> list[float]:
        """Sums each value over all ranks, in float64; on the compute device unless another is given."""
        return self._reduce(values, dist.ReduceOp.SUM, device)

    def world_max(self, values: Sequence[Tensor | float]) -> list[float]:
        """Maximum of each value over all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX, HOST)

    def _reduce(
        self,
        values: Sequence[Tensor | float],
        operation: dist.ReduceOp.RedOpType,
        device: torch.device | None,
    ) -> list[float]:
        device = device or self.device
        packed = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in values])
        if self.job.world_size > 1:
            dist.all_reduce(packed, op=operation)
        return packed.tolist()

    def _scale_weights(self) -> None:
        """Computes the scales of weights that are gathered in float8, once after they have changed.

        Where nothing is computed here, FSDP takes the largest magnitude over its shards at every gather.
        Under tensor parallel these are a part of the weight, and every part would be rounded in its own way.
        """
        precision = self.job.precision
        wanted = precision.precompute_float8_dynamic_scale_for_fsdp or self.job.parallelism.tp > 1
        if precision.enable_fsdp_float8_all_gather and wanted and self.weights_changed:
            precompute_scales(self.parts)
        self.weights_changed = False

    def _to_device(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        return Batch(*(tensor.pin_memory().to(self.device, non_blocking=True) for tensor in batch))

    def _local(self, loss: Tensor, local_tokens: int) -> float | None:
        if not self.counts_tokens or not local_tokens:
            return None
        return float(loss) * self.loss.denominator / local_tokens


def count_valid(batch: Batch) -> int:
    """Number of labels that the loss counts."""
    return int((batch.labels_BT != IGNORE_INDEX).sum())


def split_batch(batch: Batch, rows: int) -> list[Batch]:
    """Cuts a batch into pieces of ``rows`` rows."""
    return [
        Batch(i, t) for i, t in zip(batch.inputs_BT.split(rows), batch.labels_BT.split(rows), strict=True)
    ]
