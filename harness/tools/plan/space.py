"""The space of a search: every mesh, and for each every batch split, checkpointing mode and schedule."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from harness.compose.resolve import resolve
from harness.config.cluster import count_gpus
from harness.config.job import Job
from harness.config.parallelism import AXES, ParallelismConfig
from harness.config.pipeline import SCHEDULES, fitting_layers_per_stage, num_stages
from harness.model.architecture import resolve_model
from harness.util.errors import ConfigError, divisors

MODES = ("none", "selective_op", "full")
"""Activation checkpointing modes of a search; the other modes are between these."""
SCHEDULES_TRIED = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Without GPipe and LoopedBFS: they save all microbatches and idle as long as 1F1B and Interleaved1F1B."""

_PP, _REPLICATE, _SHARD, _CP, _TP = (
    AXES.index(axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")
)
_KEY = re.compile(r"^(?:\+\+|\+)?(?P<key>[\w.]+)=(?P<value>.*)$", re.DOTALL)


class Point(NamedTuple):
    """One candidate of a search; a tuple, because a search makes a million."""

    degrees: tuple[int, ...]
    """Degrees of ``AXES``, in their order."""
    ep: int
    """Expert-parallel degree."""
    local_batch_size: int
    """Sequences per data-parallel rank and pass."""
    microbatch_size: int
    """Sequences per microbatch; 1 without a pipeline."""
    mode: str
    """Activation checkpointing mode."""
    schedule: str | None
    """Pipeline schedule; None without a pipeline."""
    layers_per_stage: int | None
    """Layers per pipeline stage; None: the number of stages that the schedule needs."""

    @property
    def pp(self) -> int:
        """Pipeline degree."""
        return self.degrees[_PP]

    @property
    def cp(self) -> int:
        """Context-parallel degree."""
        return self.degrees[_CP]

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return self.degrees[_TP]

    @property
    def axes(self) -> int:
        """Number of mesh axes with a degree above 1."""
        return sum(degree > 1 for degree in self.degrees)

    @property
    def data_parallel(self) -> int:
        """Data-parallel degree."""
        return self.degrees[_REPLICATE] * self.degrees[_SHARD]

    @property
    def rows(self) -> int:
        """Sequences per forward pass."""
        return self.local_batch_size if self.schedule is None else self.microbatch_size

    def layout(self, base: ParallelismConfig) -> ParallelismConfig:
        """Return ``base`` with this point's layout."""
        moved: dict[str, Any] = dict(zip(AXES, self.degrees, strict=True))
        moved |= {"ep": self.ep, "pp_microbatch_size": self.microbatch_size}
        moved["pp_layers_per_stage"] = self.layers_per_stage
        if self.schedule is not None:
            moved["pp_schedule"] = self.schedule
        # async_tp needs tensor parallel.
        moved["async_tp"] = base.async_tp and self.tp > 1
        return replace(base, **moved)

    def job(self, base: Job) -> Job:
        """Return ``base`` with this point's layout and execution, resolved.

        Raises:
            ConfigError: the job is not legal.
        """
        return resolve(self.job_unchecked(base), gpus=gpus_of(base))

    def job_unchecked(self, base: Job) -> Job:
        """Like ``job``, for a legal point: its rules are not checked again."""
        return replace(
            base,
            parallelism=self.layout(base.parallelism),
            training=replace(base.training, local_batch_size=self.local_batch_size),
            activation_checkpoint=replace(base.activation_checkpoint, mode=self.mode),
        )

    def overrides(self, base: ParallelismConfig) -> list[str]:
        """Return the overrides that turn ``base`` into this point."""
        typed = [f"parallelism.{axis}={degree}" for axis, degree in zip(AXES, self.degrees, strict=True)]
        typed += [f"parallelism.ep={self.ep}"] if self.ep > 1 or base.ep > 1 else []
        typed += [f"parallelism.async_tp={str(self.tp > 1).lower()}"] if base.async_tp else []
        typed.append(f"training.local_batch_size={self.local_batch_size}")
        if self.schedule is not None:
            layers = "null" if self.layers_per_stage is None else self.layers_per_stage
            typed += [
                f"parallelism.pp_schedule={self.schedule}",
                f"parallelism.pp_layers_per_stage={layers}",
                f"parallelism.pp_microbatch_size={self.microbatch_size}",
            ]
        return [*typed, f"activation_checkpoint.mode={self.mode}"]


@dataclass(frozen=True)
class Space:
    """All candidates of a search for a job."""

    base: Job
    """The job; only fields that do not depend on the layout are resolved."""
    world: int
    """Number of ranks."""
    typed: frozenset[str]
    """Fields that the command line fixes."""

    @classmethod
    def of(cls, base: Job, overrides: Sequence[str]) -> Space:
        """Make the space of a job.

        Fields on the command line are fixed (except for dp_shard=-1 and null). A layout on the command line,
        parallelism=fsdp_tp, fixes the axes that it does not use to 1. Values from files are searched.

        Raises:
            ConfigError: a field that all points share is not legal, or the number of ranks or the global
                batch size is unknown.
        """
        base.cluster.validate()
        optimizer = base.optimizer.resolve(base.precision.master_dtype, base.precision.param_dtype)
        base = replace(base, model=resolve_model(base.model), optimizer=optimizer)
        if base.training.global_batch_size is None:
            rule = "a search compares layouts at one batch, and null gives every layout its own"
            raise ConfigError("training.global_batch_size", None, rule, "a number of sequences")
        base.schedule.validate_phases()
        base = replace(base, training=base.training.with_length(base.sizes))
        return cls(base, _world_of(base), frozenset(_typed(base, overrides)))

    @property
    def per_node(self) -> int:
        """Ranks of a node, or of the nodes that the accelerators' links join."""
        return self.base.cluster.linked_ranks(self.world)

    def layouts(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield all meshes: degrees of ``AXES``, and ep; tp stays within a node or its linked neighbours."""
        for degrees in _products(self.world, [self._degrees(axis) for axis in AXES]):
            of = dict(zip(AXES, degrees, strict=True))
            if "parallelism.tp" in self.typed or self.per_node % of["tp"] == 0:
                yield from ((degrees, ep) for ep in self._expert_degrees(of))

    def points(self, degrees: tuple[int, ...], ep: int) -> Iterator[Point]:
        """Yield all points of a mesh, those with the least memory first."""
        of = dict(zip(AXES, degrees, strict=True))
        share, rest = divmod(self.base.global_batch_size, of["dp_replicate"] * of["dp_shard"])
        if rest:
            # One point of this mesh, so that the error is reported once.
            yield Point(degrees, ep, 1, 1, "full", None if of["pp"] == 1 else "1F1B", None)
            return
        pipelined = of["pp"] > 1
        for local in self._choices("training.local_batch_size", [share] if pipelined else divisors(share)):
            sizes = divisors(local) if pipelined and local else [1]
            for size in self._choices("parallelism.pp_microbatch_size", sizes) if pipelined else [1]:
                for schedule, layers in self._schedules(degrees) if pipelined else [(None, None)]:
                    for mode in self._choices("activation_checkpoint.mode", reversed(MODES)):
                        yield Point(degrees, ep, local, size, mode, schedule, layers)

    def _choices(self, field: str, free: Iterable[Any]) -> list[Any]:
        """Values of a field: the fixed one, or all of ``free``."""
        return [_value(self.base, field)] if field in self.typed else list(free)

    def _degrees(self, axis: str) -> list[int]:
        return self._choices(f"parallelism.{axis}", divisors(self.world))

    def _expert_degrees(self, of: dict[str, int]) -> list[int]:
        moe = self.base.model.moe
        if not moe.enabled:
            return self._choices("parallelism.ep", [1])
        splits = of["tp"] > 1 and self.base.parallelism.expert_tensor_parallel
        ranks = of["dp_shard"] * of["cp"] * (1 if splits else of["tp"])
        return self._choices("parallelism.ep", divisors(moe.num_experts, ranks))

    def _schedules(self, degrees: tuple[int, ...]) -> list[tuple[str, int | None]]:
        """Schedules; those with a free number of stages once for every possible number."""
        found: list[tuple[str, int | None]] = []
        for name in self._choices("parallelism.pp_schedule", SCHEDULES_TRIED):
            if "parallelism.pp_layers_per_stage" in self.typed:
                found.append((name, self.base.parallelism.pp_layers_per_stage))
                continue
            found.append((name, None))
            if name in SCHEDULES and SCHEDULES[name].stages_per_rank == "many":
                found += [(name, layers) for layers in self._more_stages(degrees, name)]
        return found

    def _more_stages(self, degrees: tuple[int, ...], name: str) -> list[int]:
        """Layers per stage that give at least three stages per rank; one value per number of stages."""
        degree = degrees[AXES.index("pp")]
        layout = replace(self.base.parallelism, pp=degree, pp_schedule=name, pp_layers_per_stage=None)
        n_layers = self.base.model.n_layers
        by_stages = {
            num_stages(replace(layout, pp_layers_per_stage=layers), n_layers): layers
            for layers in fitting_layers_per_stage(layout, n_layers)
        }
        return [layers for stages, layers in by_stages.items() if stages > 2 * degree]


def _world_of(base: Job) -> int:
    """Number of ranks to search layouts for."""
    layout, cluster = base.parallelism, base.cluster
    used = prod(max(degree, 1) for degree in layout.degrees.values())
    world = cluster.world_size or (used if used > 1 else None) or cluster.default_world_size or gpus_of(base)
    if not world or world == 1:
        rule = "a search needs the number of ranks"
        raise ConfigError("cluster.ranks", cluster.ranks, rule, "8, or cluster=slurm_h100 cluster.nodes=4")
    return world


def _typed(base: Job, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the fields that the command line fixes, directly or by a group."""
    layout = base.parallelism
    for override in overrides:
        match = _KEY.match(override)
        if match is None or match["value"] == "null" or override.endswith("parallelism.dp_shard=-1"):
            continue
        yield match["key"]
        if match["key"] == "activation_checkpoint":
            yield "activation_checkpoint.mode"
        if match["key"] == "parallelism":
            yield from (f"parallelism.{axis}" for axis in (*AXES, "ep") if getattr(layout, axis) == 1)
    if layout.pp_schedule_csv is not None or layout.pp_modules_per_stage:
        # These options determine the pipeline.
        yield from (f"parallelism.{name}" for name in ("pp", "pp_schedule", "pp_layers_per_stage"))


def _value(base: Job, field: str) -> Any:
    part, name = field.split(".")
    return getattr(getattr(base, part), name)


def _products(number: int, choices: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Yield all tuples with the given product, each element from its own choices."""
    first, *rest = choices
    for factor in first:
        if number % factor:
            continue
        if not rest:
            if factor == number:
                yield (factor,)
            continue
        yield from ((factor, *others) for others in _products(number // factor, rest))


def gpus_of(base: Job) -> int:
    """GPUs that the ranks of a job find on this machine."""
    return count_gpus() if base.cluster.is_here and base.cluster.device != "cpu" else 0
