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

KNOWN = ("compute", "tp", "cp", "ep")
"""Parts of a step that blocks make by themselves."""
Parts = tuple[float, ...]
Key = tuple[Any, ...]
NOTHING: Parts = (0.0,) * len(KNOWN)


@dataclass(frozen=True)
class Bound:
    """The least time of a step."""

    seconds: float
    parts: dict[str, float]
    """Seconds of those of ``PARTS`` that are known, of the slowest rank."""


class _Load:
    """Seconds of one microbatch in a part of the model: forward, backward, and what both go to."""

    __slots__ = ("backward", "forward", "parts")

    def __init__(self, forward: float = 0.0, backward: float = 0.0, parts: Parts = NOTHING) -> None:
        self.forward, self.backward, self.parts = forward, backward, parts

    @classmethod
    def of(cls, forward: Pass, *backward: Pass) -> _Load:
        both = (forward, *backward)
        parts = dict.fromkeys(KNOWN, 0.0)
        for each in both:
            parts["compute"] += each.compute
            for moved in each.moved:
                parts[moved.axis] += moved.exposed
        return cls(forward.seconds, sum(each.seconds for each in backward), tuple(parts.values()))

    @staticmethod
    def total(held: Iterable[tuple[_Load, int]]) -> _Load:
        """Of several parts of the model, each so many times."""
        forward = backward = 0.0
        parts = NOTHING
        for load, times in held:
            forward += times * load.forward
            backward += times * load.backward
            parts = tuple(sum_ + times * own for sum_, own in zip(parts, load.parts, strict=True))
        return _Load(forward, backward, parts)


class Bounds:
    """Bounds of many points of one job.

    A rank computes its stages' passes once for every microbatch. Before its first, the microbatch has to pass
    the stages before; where backward is one pass, after its last the gradients have to go back through them.
    No schedule of the same passes takes less, and collectives of FSDP and the update come on top.
    """

    def __init__(self, base: Job, machine: Machine) -> None:
        self._base, self._machine = base, machine
        self._kinds = tuple(block_kinds(base.model))
        self._loads: dict[Key, dict[Any, _Load]] = {}
        self._of_ranks: dict[Key, list[tuple[_Load, float]]] = {}
        self._parts: dict[tuple[int, int], list[list[tuple[Any, int]]]] = {}

    def of(self, point: Point) -> Bound:
        """The bound of a legal point."""
        layout = point.layout(self._base.parallelism)
        share = self._base.global_batch_size // layout.data_parallel
        times = share // (point.microbatch_size if layout.pp > 1 else point.local_batch_size)
        key = self._load(point, layout)
        loads = self._loads[key]
        if layout.pp == 1:
            load = _Load.total(
                (loads[part], count) for part, count in Counter([*self._kinds, "head"]).items()
            )
            return self._bound(times, load, 0.0)
        bounds = (self._bound(times, load, bubble) for load, bubble in self._ranks(key, layout))
        return max(bounds, key=lambda bound: bound.seconds)

    def _ranks(self, key: Key, layout: ParallelismConfig) -> list[tuple[_Load, float]]:
        """The load of a microbatch on every pipeline rank, and how long the rank waits at both ends."""
        n_layers = self._base.model.n_layers
        key = (*key, layout.pp, num_stages(layout, n_layers), layout.pp_schedule)
        if key in self._of_ranks:
            return self._of_ranks[key]
        loads = self._loads[key[:-3]]
        stages = [
            _Load.total((loads[part], count) for part, count in parts)
            for parts in self._parts_of_stages(layout)
        ]
        reached = [0.0, *accumulate(stage.forward for stage in stages)]
        left = [0.0, *accumulate(stage.backward for stage in stages)]
        ranks = []
        for rank in range(layout.pp):
            own = stages_of_rank(layout, n_layers, rank)
            waits = reached[own[0]] + (0.0 if layout.splits_backward else left[own[0]])
            ranks.append((_Load.total((stages[stage], 1) for stage in own), waits))
        self._of_ranks[key] = ranks
        return ranks

    @staticmethod
    def _bound(times: int, load: _Load, bubble: float) -> Bound:
        parts = {name: times * seconds for name, seconds in zip(KNOWN, load.parts, strict=True)}
        return Bound(sum(parts.values()) + bubble, parts | {"bubble": bubble})

    def _load(self, point: Point, layout: ParallelismConfig) -> Key:
        """Notes the loads of each kind of block and of the head; few of the fields that move decide them."""
        rows = point.microbatch_size if layout.pp > 1 else point.local_batch_size
        sharing = (layout.dp_shard, layout.ep) if layout.ep > 1 else (0, 1)
        key: Key = (layout.tp, layout.cp, *sharing, rows, layout.pp > 1, point.mode)
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
        return key

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
