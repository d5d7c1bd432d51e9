"""Which points of a search are legal: the rules of every job, each asked as seldom as it can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.errors import ConfigError
from harness.job import Job
from harness.plan.space import Point
from harness.precision.linears import check_layout, sort_linears


class Legality:
    """Asks the rules of a job for many points.

    A job's ``resolve`` takes a millisecond and more, most of it for what all points share. So the rules of
    layout and recomputation are asked for each point, those of formats once for each length that is
    multiplied, and all others once for each layout and mode. What is chosen in the end is resolved whole.
    """

    def __init__(self, base: Job) -> None:
        self.base = base
        # Which linears there are takes longest, and no layout changes it.
        self._plain = replace(base, precision=replace(base.precision, linear="none"))
        linear = base.precision.linear
        self._linears = None if linear == "none" else sort_linears(base.model, base.precision)
        self._told: dict[tuple[Any, ...], ConfigError | None] = {}

    def broken(self, point: Point) -> ConfigError | None:
        """The rule that a point breaks; None if it is legal."""
        layout = point.layout(self.base.parallelism)
        share, rest = divmod(self.base.global_batch_size, layout.data_parallel)
        if rest or not point.local_batch_size or share % point.local_batch_size:
            return self._ask(self._resolve, point)
        try:
            training, model = self.base.training, self.base.model
            layout.validate(model, training.seq_len, point.local_batch_size, share)
            recompute = replace(self.base.activation_checkpoint, mode=point.mode)
            recompute.validate(self.base.compile, splits_backward=layout.splits_backward)
        except ConfigError as error:
            return error
        accumulates = share > point.local_batch_size
        key: tuple[Any, ...] = (point.degrees, point.ep, point.mode, accumulates)
        if key not in self._told:
            self._told[key] = self._ask(self._resolve, point)
        return self._told[key] or self._broken_format(point)

    def _broken_format(self, point: Point) -> ConfigError | None:
        """The same for what the ranks multiply at once."""
        if self._linears is None:
            return None
        layout = point.layout(self.base.parallelism)
        rows = point.microbatch_size if layout.pp > 1 else point.local_batch_size
        key = ("format", layout.tp, rows, layout.cp)
        if key not in self._told:
            self._told[key] = self._ask(self._check_format, point)
        return self._told[key]

    @staticmethod
    def _ask(rule: Any, point: Point) -> ConfigError | None:
        try:
            rule(point)
        except ConfigError as error:
            return error
        return None

    def _resolve(self, point: Point) -> None:
        point.job(self._plain)

    def _check_format(self, point: Point) -> None:
        base, layout = self.base, point.layout(self.base.parallelism)
        assert self._linears is not None
        check_layout(
            self._linears,
            base.model,
            base.precision,
            layout.tp,
            point.microbatch_size if layout.pp > 1 else point.local_batch_size,
            base.training.seq_len // layout.cp,
            splits_experts=layout.splits_experts,
        )
