"""Check which points of a search are legal: the rules of a job, each evaluated as rarely as possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness.compose.resolve import check_torch, resolve_layout
from harness.config.job import Job
from harness.config.parallelism import AXES
from harness.precision.linears import check_layout, sort_linears
from harness.tools.plan.space import Point, gpus_of
from harness.util.errors import ConfigError


class Legality:
    """Evaluate the rules of a job for many points.

    ``resolve`` takes a millisecond, and a search has a hundred thousand points. So a rule that depends on
    few of the searched fields is evaluated once per combination of these. Points that the search selects are
    resolved completely.
    """

    def __init__(self, base: Job) -> None:
        self.base = base
        base.precision.validate()
        # Sorting the linears is the slowest part, and no layout changes it.
        self._plain = replace(base, precision=base.precision.without_format())
        linear = base.precision.linear
        self._linears = None if linear == "none" else sort_linears(base.model, base.precision)
        self._known: dict[tuple[Any, ...], ConfigError | None] = {}
        self._passed = False
        self._batch = base.global_batch_size
        self._batches = [size for _, size in base.schedule.batch_sizes]

    def broken(self, point: Point) -> ConfigError | None:
        """The rule that a point breaks; None if it is legal."""
        degrees, ep, local, size, mode, schedule, layers = point
        pp, replicas, shards, cp, tp = degrees
        share, rest = divmod(self._batch, replicas * shards)
        rows = replicas * shards * local
        uneven = rest or not rows or share % local
        if uneven or any(size % rows for size in self._batches):
            return self._error_of(self._check_all, point)
        return (
            self._cached(self._check_axes, point, (degrees, ep))
            or self._cached(self._check_pipeline, point, (pp, schedule, layers, share, local, size))
            or self._cached(self._check_mode, point, (mode, schedule, tp))
            or self._cached(self._check_all, point, (pp, cp, tp, ep, mode, share > local))
            or self._cached(self._check_format, point, (tp, cp, point.rows))
        )

    def _cached(
        self, rule: Callable[[Point], None], point: Point, key: tuple[Any, ...]
    ) -> ConfigError | None:
        """Evaluate a rule once for each value of ``key``, the fields on which it depends."""
        key = (rule.__name__, *key)
        if key not in self._known:
            self._known[key] = self._error_of(rule, point)
        return self._known[key]

    @staticmethod
    def _error_of(rule: Callable[[Point], None], point: Point) -> ConfigError | None:
        try:
            rule(point)
        except ConfigError as error:
            return error
        return None

    def _check_axes(self, point: Point) -> None:
        """Check that the degrees divide the model and the sequence."""
        layout = replace(point.layout(self.base.parallelism), pp=1)
        layout.validate(self.base.model, self.base.training.seq_len, 1, 1)

    def _check_pipeline(self, point: Point) -> None:
        """Check that layers and microbatches fit the schedule."""
        alone = {axis: 1 for axis in (*AXES, "ep") if axis != "pp"}
        # The error's suggestion for the global batch depends on the data-parallel degree.
        alone["dp_replicate"] = point.data_parallel
        layout = replace(point.layout(self.base.parallelism), **alone)  # type: ignore[arg-type]
        share = self.base.global_batch_size // point.data_parallel
        layout.validate(self.base.model, self.base.training.seq_len, point.local_batch_size, share)

    def _check_mode(self, point: Point) -> None:
        recompute = replace(self.base.activation_checkpoint, mode=point.mode)
        layout = point.layout(self.base.parallelism)
        recompute.validate(self.base.compile, splits_backward=layout.splits_backward)
        check_torch(replace(self.base, parallelism=layout))

    def _check_all(self, point: Point) -> None:
        """Check all rules except those of formats; once those that no layout has an effect on."""
        if not self._passed:
            point.job(self._plain)
            self._passed = True
        resolve_layout(point.job_unchecked(self._plain), gpus=gpus_of(self.base))

    def _check_format(self, point: Point) -> None:
        """Check that the shapes a rank multiplies are legal in the format."""
        if self._linears is None:
            return
        if self.base.schedule.seq_len:
            point.job(self.base)  # the block of a format also limits the scheduled lengths
        base, layout = self.base, point.layout(self.base.parallelism)
        tokens = base.training.seq_len // layout.cp
        check_layout(
            self._linears,
            base.model,
            base.precision,
            layout.tp,
            point.rows,
            tokens,
            splits_experts=layout.splits_experts,
        )
