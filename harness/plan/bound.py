"""The least time that a step can take, without running its pipeline's schedule: what a search asks first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from harness.job import Job
from harness.model.operations import block_kinds
from harness.parallelism.config import ParallelismConfig
from harness.parallelism.stages import num_stages, split_modules, stages_of_rank
from harness.plan.machine import Machine
from harness.plan.space import Point
from harness.plan.work import Pass, Worker


@dataclass(frozen=True)
class Bound:
    """The least seconds of a step, of its slowest rank, and what they go to."""

    compute: float
    """Computing, recomputing included."""
    waiting: float
    """Collectives inside of blocks that nothing hides."""
    bubble: float
    """Until the first microbatch comes to the rank, and until what it did last has gone back."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.compute + self.waiting + self.bubble


@dataclass(frozen=True)
class _Load:
    """Seconds of one microbatch in a part of the model."""

    forward: float = 0.0
    backward: float = 0.0
    """All of it, recomputing included."""
    waiting: float = 0.0
    """What of both is waiting for collectives."""

    @classmethod
    def of(cls, forward: Pass, *backward: Pass) -> _Load:
        waits = sum(each.seconds - each.compute for each in (forward, *backward))
        return cls(forward.seconds, sum(each.seconds for each in backward), waits)

    @property
    def both(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    @staticmethod
    def total(parts: Iterable[tuple[_Load, int]]) -> _Load:
        """Of several parts, each so many times."""
        forward = backward = waiting = 0.0
        for part, times in parts:
            forward += times * part.forward
            backward += times * part.backward
            waiting += times * part.waiting
        return _Load(forward, backward, waiting)


class Bounds:
    """Bounds of many points of one job.

    A rank computes its stages' passes once for every microbatch. Before its first, the microbatch has to pass
    the stages before; where backward is one pass, after its last the gradients have to go back through them.
    No schedule of the same passes takes less, and collectives of FSDP and the update come on top.
    """

    def __init__(self, base: Job, machine: Machine) -> None:
        self._base, self._machine = base, machine
        self._kinds = tuple(block_kinds(base.model))
        self._loads: dict[Any, dict[Any, _Load]] = {}
        self._parts: dict[tuple[int, int], list[list[tuple[Any, int]]]] = {}

    def of(self, point: Point) -> Bound:
        """The bound of a legal point."""
        layout = point.layout(self._base.parallelism)
        share = self._base.global_batch_size // layout.data_parallel
        times = share // (point.microbatch_size if layout.pp > 1 else point.local_batch_size)
        loads = self._loads_of(point, layout)
        if layout.pp == 1:
            load = _Load.total(
                (loads[part], count) for part, count in Counter([*self._kinds, "head"]).items()
            )
            return Bound(times * (load.both - load.waiting), times * load.waiting, 0.0)
        stages = [
            _Load.total((loads[part], count) for part, count in parts)
            for parts in self._parts_of_stages(layout)
        ]
        reached = [0.0, *accumulate(stage.forward for stage in stages)]
        left = [0.0, *accumulate(stage.backward for stage in stages)]
        bounds = []
        for rank in range(layout.pp):
            own = stages_of_rank(layout, self._base.model.n_layers, rank)
            load = _Load.total((stages[stage], times) for stage in own)
            bubble = reached[own[0]] + (0.0 if layout.splits_backward else left[own[0]])
            bounds.append(Bound(load.both - load.waiting, load.waiting, bubble))
        return max(bounds, key=lambda bound: bound.seconds)

    def _loads_of(self, point: Point, layout: ParallelismConfig) -> dict[Any, _Load]:
        """Of each kind of block and of the head; they depend on few of the fields that a search moves."""
        rows = point.microbatch_size if layout.pp > 1 else point.local_batch_size
        key = (layout.tp, layout.cp, layout.dp_shard if layout.ep > 1 else 0, layout.ep, rows, point.mode)
        key = (*key, layout.pp > 1)
        if key not in self._loads:
            base = self._base
            job = replace(
                base,
                parallelism=layout,
                training=replace(base.training, local_batch_size=point.local_batch_size),
                activation_checkpoint=replace(base.activation_checkpoint, mode=point.mode),
            )
            worker = Worker(job, self._machine)
            firsts = {kind: layer for layer, kind in reversed(list(enumerate(self._kinds)))}
            blocks = {kind: worker.block(layer) for kind, layer in firsts.items()}
            loads: dict[Any, _Load] = {
                kind: _Load.of(block.forward, block.recompute, block.inputs, block.weights)
                for kind, block in blocks.items()
            }
            self._loads[key] = loads | {"head": _Load.of(*worker.ends())}
        return self._loads[key]

    def _parts_of_stages(self, layout: ParallelismConfig) -> list[list[tuple[Any, int]]]:
        """Kinds of blocks, and the head, that every stage has, each with how many of them."""
        n_layers = self._base.model.n_layers
        key = (layout.pp, num_stages(layout, n_layers))
        if key not in self._parts:
            self._parts[key] = [
                list(Counter(part for name in names if (part := self._part(name)) is not None).items())
                for names in split_modules(layout, n_layers)
            ]
        return self._parts[key]

    def _part(self, name: str) -> Any:
        """The kind of a module; None for one that takes no time to speak of."""
        if name.startswith("layers."):
            return self._kinds[int(name.removeprefix("layers."))]
        return "head" if name == "output" else None
