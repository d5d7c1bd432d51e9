"""The model, its optimizer and one optimizer step, on one rank of any layout."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.config.fields import with_value
from harness.config.job import Job
from harness.config.training import Phase, rows_of_rank
from harness.data.batch import AnyBatch, Batch, count_tokens, count_valid, fill, place
from harness.model.part import ModelPart
from harness.model.spec import tensors
from harness.optimizer.base import drops_on_device, keep_settings, parts_of
from harness.optimizer.build import build_optimizer, build_schedule
from harness.optimizer.qk_clip import QKClip
from harness.optimizer.settings import exchanges
from harness.parallelism.balance import Balance
from harness.parallelism.clip import clip_gradients, local_squares, reduce_partial_gradients
from harness.parallelism.execute import DirectExecutor, Executor, computes_loss, set_length
from harness.parallelism.expert import THOUSANDTHS
from harness.parallelism.fsdp import reshard
from harness.parallelism.mesh import Mesh, build_mesh, stage_group
from harness.parallelism.parallelize import build_model_parts
from harness.precision.swap import precompute_scales
from harness.train.objective import objective_of
from harness.train.probe import Activations, Probe
from harness.train.step import HOST, LossSum, SourceLosses, StepOutcome
from harness.util.annotation import SUMS, annotated
from harness.util.errors import CapacityError, LostGradientError


class Engine:
    """Model parts, optimizer and schedule of this rank.

    All ranks construct it and call its methods together. The values it returns are sums over the
    world, so that every rank decides the same.

    Attributes:
        expecting: context manager for a pass beside those of training, which may compile graphs.
    """

    expecting: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(
        self, job: Job, device: torch.device, built: tuple[Mesh, list[ModelPart]] | None = None
    ) -> None:
        self.job = job
        self.device = device
        if built is None:
            mesh = build_mesh(job.parallelism, device, has_experts=job.model.moe.enabled)
            built = mesh, build_model_parts(job, mesh, device)
        self.mesh, self.parts = built
        self.objective = objective_of(job.model)
        self.loss = self.objective.build_loss(job, self.mesh, self.parts)
        self.sources = SourceLosses(job, self.loss)
        self.balance = Balance(job, self.parts, device)
        self.length = job.training.seq_len
        self.executor = self._build_executor(job)
        self._executors = {self.length: self.executor}
        self._parameters = [list(part.parameters()) for part in self.parts]
        self.parameters: list[Tensor] = list(chain.from_iterable(self._parameters))
        self.qk_clip: QKClip | None = None
        if job.optimizer.qk_clip is not None:
            self.qk_clip = QKClip(job.optimizer.qk_clip, job.model, self.named_parameters())
        self.optimizer = self._build_optimizer()
        self.schedule = build_schedule(
            job.schedule, self.optimizer, job.schedule.curve_steps(job.steps)
        )
        self.weights_changed = True
        self._gradients_checked = False
        self._leaves_rows_empty = job.empty_in_words is not None
        keep_settings(self.optimizer)

    def close(self) -> None:
        """Delete what must be gone before the process groups are: graphs."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters (or shards) that this rank holds, under their names in the full model.

        Call it between steps: while FSDP has gathered a module, its parameters are temporary copies
        in ``precision.param_dtype``.
        """
        for part, parameters in zip(self.parts, self._parameters, strict=True):
            for (name, found), parameter in zip(part.named_parameters(), parameters, strict=True):
                assert found is parameter, f"{name} is gathered"
                yield name, parameter

    @property
    def rows(self) -> range:
        """Rows of the global batch that this rank processes, beside empty ones."""
        ranks = self.job.parallelism.data_parallel
        return rows_of_rank(self.mesh.data_rank, ranks, self.job.global_batch_size)

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank counts the tokens of its rows: true on one rank per data-parallel group."""
        return self.has_loss and self.mesh.rank("cp") == 0

    @property
    def has_loss(self) -> bool:
        """Whether this rank contributes the loss of its positions to the global sum.

        With a pipeline it is the rank with the output projection, which is the first one in
        V-shaped schedules.
        """
        return computes_loss(self.mesh, self.parts)

    @property
    def lr(self) -> float:
        """Learning rate of the next update, before the factors of parameter groups."""
        return self.job.optimizer.lr * self.schedule.lr_lambdas[0](self.schedule.last_epoch)

    def set_schedule(self, steps: int) -> None:
        """Move the schedule to its state after ``steps`` updates, with the learning rates of this job."""
        self.schedule.last_epoch = steps
        factors = zip(self.schedule.base_lrs, self.schedule.lr_lambdas, strict=True)
        rates = [base * factor(steps) for base, factor in factors]
        self._set_rates(rates)
        self.schedule._last_lr = rates

    def _set_rates(self, rates: Iterable[float | Tensor]) -> None:
        """Give each group of parameters its learning rate."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def gradients(
        self, batch: AnyBatch, *, stop_requested: bool = False, beside: Sequence[float] = ()
    ) -> StepOutcome:
        """Compute the gradients of one global batch.

        Args:
            batch: this rank's rows of it, in host memory; their number and length follow the
                schedule.
            stop_requested: whether this rank was asked to stop; summed together with the token
                counts.
            beside: more values to sum over the world; their sums are the outcome's.
        """
        self._set_length(batch.shape[1])
        step = self.schedule.last_epoch + 1
        self.balance.set_step(step)
        batch = self._filled(batch, self.job.sizes.at(step))
        local_tokens = count_valid(batch)
        # Summed in host memory: on the device this would wait for the previous step.
        counted = [local_tokens, *count_tokens(batch), *self.sources.tokens(batch)]
        tokens = zeros_unless(self.counts_tokens, counted)
        summed = self.world_sum([float(stop_requested), *tokens, *beside], HOST)
        (stops, *counts), beside = summed[: 1 + len(tokens)], summed[1 + len(tokens) :]
        valid_tokens, all_tokens, rows, *source_tokens = counts
        # The loss of a batch without valid tokens is 0, not 0/0.
        denominator = max(1.0, valid_tokens)
        batch = place(batch, self.device)
        sums, loss, squares, needed = self._passes(denominator, max(1.0, rows), batch)
        reports_loss = self.counts_tokens and local_tokens > 0
        return StepOutcome(
            sums,
            loss,
            squares,
            needed,
            tokens=int(all_tokens),
            valid_tokens=int(valid_tokens),
            source_tokens=list(map(int, source_tokens)),
            local_weight=denominator / local_tokens if reports_loss else None,
            batch=batch,
            activations=self._measure(batch),
            stop_requested=stops > 0,
            beside=beside,
        )

    def _passes(
        self, denominator: float | Tensor, rows: float | Tensor, batch: AnyBatch
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run the passes of a batch on the device; return the first arguments of a ``StepOutcome``.

        Args:
            denominator: valid tokens of the global batch.
            rows: its rows that are not all padding.
        """
        self._scale_weights()
        self.loss.denominator = denominator
        self.balance.set_rows(rows)
        with annotated("forward_backward"):
            pieces = split_batch(batch, self.job.local_batch_size)
            losses = torch.zeros(1 + self.job.model.mtp.depth, device=self.device)
            with self.sources.recorded(batch) as row_losses:
                for i, piece in enumerate(pieces):
                    losses = losses + self.executor.forward_backward(
                        piece, last=i + 1 == len(pieces)
                    )
            # With multi-token prediction every other loss is that of the token after the next.
            all_losses = [*losses, *self.sources.losses(batch, row_losses[:: len(losses)])]
        if not self._gradients_checked:
            # After the first backward pass of the process: every parameter has a gradient.
            lost = [
                name
                for name, parameter in self.named_parameters()
                if parameter.requires_grad and parameter.grad is None
            ]
            if lost:
                raise LostGradientError(lost)
            self._gradients_checked = True
        with annotated("gradient_norm"):
            squares = self._squares()
            own = zeros_unless(self.has_loss, all_losses)
            needed = self.balance.take_needed()
            all_needed = [needed.sum()] if len(needed) else []
            sums = self.world_total([squares.sum(), *own, *all_needed])
        loss = losses[0]
        if self.job.parallelism.cp > 1 and self.has_loss:
            loss = loss.double()
            with annotated("cp.all_reduce"):
                dist.all_reduce(loss, group=self.mesh.group("cp"))
        return sums, loss, squares, needed

    def _filled(self, batch: AnyBatch, phase: Phase | None = None) -> AnyBatch:
        """Fill up a rank's rows to those of a phase, by default the last: all run the same passes."""
        if not self._leaves_rows_empty:
            return batch
        assert isinstance(batch, Batch)
        if batch.real_B is not None:
            return batch
        return fill(batch, self.job.rows_per_rank(phase or self.job.sizes.phases[-1]))

    def _measure(self, batch: AnyBatch) -> Activations | None:
        """Measure the logits that the QK-clip of a step needs; None: the step has none."""
        if self.qk_clip is None:
            return None
        self.qk_clip.largest_LH = None
        step = self.schedule.last_epoch + 1
        if step % self.job.optimizer.qk_clip_interval:
            return None
        with self.expecting():
            seen = Probe(self)(batch)
        self.qk_clip.largest_LH = seen.max_logits
        return seen

    def _build_optimizer(self) -> torch.optim.Optimizer:
        specs = tensors(self.job.model)
        group = stage_group(self.mesh) if exchanges(self.job.optimizer, specs.values()) else None
        return build_optimizer(
            self.job.optimizer, self.named_parameters(), specs, group, self.qk_clip
        )

    def _build_executor(self, job: Job) -> Executor:
        return self.objective.build_executor(job, self.mesh, self.parts, self.loss, self.device)

    def _set_length(self, length: int) -> None:
        if length == self.length:
            return
        self.length = length
        set_length(self.parts, self.job.parallelism, self.mesh, length)
        if length not in self._executors:
            # The executor for full length, which validation uses, stays; a pipeline's has buffers.
            longest = self.job.training.seq_len
            job = with_value(self.job, "training.seq_len", length)
            self._executors = {longest: self._executors[longest], length: self._build_executor(job)}
        self.executor = self._executors[length]

    @property
    def skips_on_device(self) -> bool:
        """Whether the device drops an update that is not finite, without the host."""
        if self.job.parallelism.cpu_offload:
            return False
        return drops_on_device(self.optimizer, self.device)

    @property
    def asks_for_norm(self) -> bool:
        """Whether the host needs the norm before the update, and so waits for it.

        Yes on a CPU (no wait there), with offloaded parameters (updated on the host), and with
        ``debug.non_finite=skip`` or ``debug.spikes=skip`` for optimizers that cannot drop an update on
        the device.
        """
        if self.skips_on_device:
            return False
        on_host = self.device.type == "cpu" or self.job.parallelism.cpu_offload
        debug = self.job.debug
        return on_host or "skip" in (debug.non_finite, debug.spikes)

    def update(self, norm: Tensor | float) -> None:
        """Clip, update the parameters and advance the schedule.

        If the norm is not finite, only the schedule advances, so that the learning rate follows the
        step. (A run that then stops may have updated nevertheless: see ``asks_for_norm``.)

        Args:
            norm: gradient norm; a tensor on the device avoids a wait.
        """
        self.weights_changed = True
        self._update(norm)
        self.schedule.step()
        self._free_gradients()

    def _free_gradients(self) -> None:
        self.optimizer.zero_grad()

    def _update(self, norm: Tensor | float) -> None:
        self.balance.update_biases(norm)
        if self.skips_on_device:
            norm = torch.full((), norm, device=self.device) if isinstance(norm, float) else norm
            found_inf = (~norm.isfinite()).float()
            for part in parts_of(self.optimizer):
                # Attribute of fused optimizers: if it is 1, the kernel changes nothing.
                part.found_inf = found_inf  # type: ignore[attr-defined]
        elif self.asks_for_norm:
            norm = float(norm)
            if not math.isfinite(norm):
                # torch warns if a scheduler steps before its optimizer; here that is intended.
                self.optimizer._opt_called = True  # type: ignore[attr-defined]
                return
        with annotated("optimizer"):
            clip_gradients(self.parameters, norm, self.job.training.max_norm)
            self.optimizer.step()

    def evaluate(self, batch: AnyBatch) -> list[LossSum]:
        """Return the loss of one global batch, and of a mixture that of each source; no gradients."""
        batch = place(self._filled(batch), self.device)
        with self.sources.recorded(batch) as row_losses:
            loss = self.forward(batch)
        losses = zeros_unless(self.has_loss, [loss, *self.sources.losses(batch, row_losses)])
        tokens = [count_valid(batch), *self.sources.tokens(batch)]
        self.require_room(self.balance.take_needed(), "a validation")
        total = self.world_sum([*losses, *zeros_unless(self.counts_tokens, tokens)])
        sums = zip(total[: len(tokens)], total[len(tokens) :], strict=True)
        return [LossSum(*pair) for pair in sums]

    def forward(self, batch: AnyBatch, *, further: bool = False) -> Tensor:
        """Return this rank's share of the loss of one global batch, without gradients; those there are stay.

        Args:
            further: also run multi-token prediction, whose loss is no part of it.
        """
        self.loss.denominator = 1.0
        # A pipeline deletes them when it changes to passes without them (torch 2.13, with FSDP).
        gradients = [parameter.grad for parameter in self.parameters]
        loss = torch.zeros((), device=self.device)
        with self._passes_alone(batch.shape[1]):
            run = self.executor.forward
            if further and self.job.model.mtp.depth:
                assert isinstance(self.executor, DirectExecutor), "a stage has no such prediction"
                run = partial(self.executor.forward, further=True)
            batch = place(self._filled(batch), self.device)
            for piece in split_batch(batch, self.job.local_batch_size):
                loss = loss + run(piece)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        return loss

    def score(self, batch: Batch) -> Tensor:
        """Score each row of a batch of ``local_batch_size`` rows in host memory, as ``Executor.score``."""
        with self._passes_alone(self.job.training.seq_len):
            return self.executor.score(place(batch, self.device))

    @contextmanager
    def _passes_alone(self, length: int) -> Iterator[None]:
        """Context manager for forward passes that no backward pass follows."""
        self._scale_weights()
        self._set_length(length)
        self.balance.set_step(self.schedule.last_epoch + 1)
        yield
        for part in self.parts:
            reshard(part)  # without a backward pass FSDP leaves some modules gathered

    def require_room(self, needed: Tensor, where: str) -> None:
        """Raise on all ranks if rows of experts had no room in messages of ``parallelism.ep_capacity``.

        Args:
            needed: ``Balance.take_needed`` of this rank's passes.
            where: what computed them, and will be without effect.
        """
        if not len(needed):
            return
        most = self.world_max(needed.tolist())
        largest = max(most)
        if not largest:
            return
        layer = list(self.balance.rows)[most.index(largest)]
        value = largest / THOUSANDTHS
        rule = f"{where} needs {value:g}, in layer {layer}; it changed no weight"
        works = f"at least {value:g}, or null"
        raise CapacityError(
            "parallelism.ep_capacity", self.job.parallelism.ep_capacity, rule, works
        )

    def world_sum(
        self, values: Sequence[Tensor | float], device: torch.device | None = None
    ) -> list[float]:
        """Sum each value over all ranks, in float64, on ``device`` (default: the compute device)."""
        return self.world_total(values, device).tolist()

    def world_total(
        self, values: Sequence[Tensor | float], device: torch.device | None = None
    ) -> Tensor:
        """Like ``world_sum``, but leave the result on the device, so that the host does not wait."""
        return self._reduce(values, dist.ReduceOp.SUM, device or self.device)

    def world_max(self, values: Sequence[Tensor | float]) -> list[float]:
        """Maximum of each value over all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX, HOST).tolist()

    def _reduce(
        self,
        values: Sequence[Tensor | float],
        operation: dist.ReduceOp.RedOpType,
        device: torch.device,
    ) -> Tensor:
        with annotated(SUMS):
            packed = torch.stack([_scalar(value, device) for value in values])
            if self.job.world_size > 1:
                dist.all_reduce(packed, op=operation)
        return packed

    def _squares(self) -> Tensor:
        """This rank's share of each gradient's squared norm; tests plant a wrong one here."""
        reduce_partial_gradients(self.parameters)
        return local_squares(self.parameters, self.mesh, self.device)

    def _scale_weights(self) -> None:
        """Compute the scales of weights that are gathered in float8, once after each change.

        Otherwise FSDP takes the maximum over its shards at every gather. With tensor parallel these
        cover only part of the weight, and each part would get a scale of its own.
        """
        precision = self.job.precision
        wanted = precision.precompute_float8_dynamic_scale_for_fsdp or self.job.parallelism.tp > 1
        if precision.enable_fsdp_float8_all_gather and wanted and self.weights_changed:
            precompute_scales(self.parts)
        self.weights_changed = False


def zeros_unless(counts: bool, values: Sequence[Tensor | float]) -> Sequence[Tensor | float]:
    """Return what this rank adds to sums over the world: the values, or zeros if another rank has them."""
    return values if counts else [0.0] * len(values)


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device, torch.float64)
    # Filled on the device: copying a number there makes the host wait.
    return torch.full((), value, dtype=torch.float64, device=device)


def split_batch(batch: AnyBatch, rows: int) -> list[Any]:
    """Split a batch into pieces of ``rows`` rows."""
    return [batch.each(itemgetter(slice(i, i + rows))) for i in range(0, batch.shape[0], rows)]
