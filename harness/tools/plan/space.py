"""The space of a search: every mesh, and for each every schedule, batch split and checkpointing mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from harness.compose.length import with_length
from harness.compose.override import parse
from harness.compose.resolve import resolve_layout, resolve_rest
from harness.config.cluster import count_gpus
from harness.config.job import Job
from harness.config.parallelism import AXES, ParallelismConfig
from harness.config.pipeline import SCHEDULES, fitting_layers_per_stage, num_stages
from harness.config.texts import validate_texts
from harness.model.architecture import context_methods, resolve_model
from harness.util.errors import ConfigError, divisors

MODES = ("none", "selective_op", "full")
"""Activation checkpointing modes of a search; the other modes are between these."""
SCHEDULES_TRIED = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Without GPipe and LoopedBFS: they save all microbatches and idle as long as 1F1B and
Interleaved1F1B."""

Key = tuple[Any, ...]


class LayoutPoint(NamedTuple):
    """One candidate of a search; a tuple, because a search makes a million. First the degrees of ``AXES``."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    local_batch_size: int
    """Sequences per data-parallel rank and pass."""
    microbatch_size: int
    """Sequences per microbatch; 1 without a pipeline."""
    mode: str
    """Activation checkpointing mode."""
    schedule: str | None
    """Pipeline schedule; None without a pipeline."""
    layers_per_stage: int | None
    """None: the number of stages that the schedule needs."""
    method: str | None = None
    """How attention gets the keys of other ranks; None without context parallel, or the job's default."""

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees of ``AXES``, in their order."""
        return self[:5]

    @property
    def complexity(self) -> tuple[int, bool, int]:
        """Smaller for a simpler point: axes that split, a pipeline, and options apart from the default."""
        own_stages = self.layers_per_stage is not None
        options = (
            self.mode != MODES[0],
            self.schedule not in (None, SCHEDULES_TRIED[0]),
            own_stages,
        )
        return sum(degree > 1 for degree in self[:6]), self.pp > 1, sum(options)

    @property
    def data_parallelism(self) -> str | None:
        """``FSDP`` or ``HSDP`` if no other axis splits."""
        pp, replicas, shards, cp, tp, ep = self[:6]
        if shards == 1 or max(pp, cp, tp, ep) > 1:
            return None
        return "HSDP" if replicas > 1 else "FSDP"

    @property
    def data_parallel(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def rows(self) -> int:
        """Sequences per forward pass."""
        return self.local_batch_size if self.schedule is None else self.microbatch_size

    @property
    def placement(self) -> Key:
        """The point up to the size of microbatches and recomputation."""
        return self.degrees, self.ep, self.schedule, self.layers_per_stage, self.method

    @property
    def family(self) -> Key:
        """Points of which larger microbatches and less recomputation never take less memory.

        Between the halves of a split backward pass, recomputation keeps more than it saved.
        """
        splits = self.schedule in SCHEDULES and SCHEDULES[self.schedule].splits_backward
        return *self.placement, self.mode if splits else None

    @property
    def saved(self) -> int:
        """Larger with less recomputation."""
        return -MODES.index(self.mode) if self.mode in MODES else 0

    def layout(self, base: ParallelismConfig) -> ParallelismConfig:
        """Return ``base`` with this point's layout."""
        degrees: dict[str, Any] = dict(zip(AXES, self.degrees, strict=True))
        return replace(
            base,
            ep=self.ep,
            cp_method=self.method or base.cp_method,
            pp_schedule=self.schedule or base.pp_schedule,
            pp_layers_per_stage=self.layers_per_stage,
            pp_microbatch_size=self.microbatch_size,
            async_tp=base.async_tp and self.tp > 1,  # it needs tensor parallel
            **degrees,
        )

    def job(self, base: Job) -> Job:
        """Return a space's ``base`` with this layout and execution, resolved; ConfigError if not legal."""
        return resolve_layout(self.job_unchecked(base), gpus=gpus_of(base))

    def job_unchecked(self, base: Job) -> Job:
        """Like ``job``, for a legal point: no rule is checked."""
        return replace(
            base,
            parallelism=self.layout(base.parallelism),
            training=replace(base.training, local_batch_size=self.local_batch_size),
            activation_checkpoint=replace(base.activation_checkpoint, mode=self.mode),
        )

    def overrides(self, base: ParallelismConfig) -> list[str]:
        """Return the overrides that turn ``base`` into this point."""
        typed = [
            f"parallelism.{axis}={degree}" for axis, degree in zip(AXES, self.degrees, strict=True)
        ]
        if self.ep > 1 or base.ep > 1:
            typed.append(f"parallelism.ep={self.ep}")
        if self.method is not None:
            typed.append(f"parallelism.cp_method={self.method}")
        if base.async_tp:
            typed.append(f"parallelism.async_tp={str(self.tp > 1).lower()}")
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
    """The job; only fields that do not depend on the layout are resolved, and only their rules checked."""
    world: int
    """Number of ranks."""
    typed: frozenset[str]
    """Fields that the command line fixes."""

    @classmethod
    def of(cls, base: Job, overrides: Sequence[str], world: int | None = None) -> Space:
        """Make the space of a job, for ``world`` ranks or those that its fields determine.

        Fields on the command line are fixed (except for dp_shard=-1 and null). A layout on the
        command line, parallelism=fsdp_tp, fixes the axes that it does not use to 1. Values from
        files are searched.

        Raises:
            ConfigError: a field that all points share is not legal, or the number of ranks or the
                global batch size is unknown.
        """
        validate_texts(base)
        base.precision.validate()
        optimizer = base.optimizer.resolve(base.precision.master_dtype, base.precision.param_dtype)
        base = replace(base, model=resolve_model(base.model), optimizer=optimizer)
        if base.training.global_batch_size is None:
            rule = "a search compares layouts at one batch, and null gives every layout its own"
            raise ConfigError("training.global_batch_size", None, rule, "a number of sequences")
        typed = frozenset(_typed(base, overrides))
        if "parallelism.cp_method" not in typed:
            base = replace(base, parallelism=replace(base.parallelism, cp_method=None))
        base = with_length(resolve_rest(base))
        if world is not None:
            return cls(base, world, typed)
        used = prod(max(degree, 1) for degree in base.parallelism.degrees.values())
        cluster = base.cluster
        searched = used if used > 1 else None
        world = cluster.world_size or searched or cluster.default_world_size or gpus_of(base)
        if not world or world == 1:
            rule = "a search needs the number of ranks"
            works = "8, or cluster=slurm_h100 cluster.nodes=4"
            raise ConfigError("cluster.ranks", cluster.ranks, rule, works)
        return cls(base, world, typed)

    def layouts(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield all meshes: degrees of ``AXES``, and ep; tp stays within a node or its linked neighbours."""
        linked = self.base.cluster.linked_ranks(self.world)
        free = divisors(self.world)
        for degrees in _products(
            self.world, [self._choices(f"parallelism.{axis}", free) for axis in AXES]
        ):
            of = dict(zip(AXES, degrees, strict=True))
            if "parallelism.tp" in self.typed or linked % of["tp"] == 0:
                yield from ((degrees, ep) for ep in self._expert_degrees(of))

    def groups(self, degrees: tuple[int, ...], ep: int) -> Iterator[list[LayoutPoint]]:
        """Yield the points of each schedule of a mesh, those with the least memory first."""
        pp, replicas, shards, cp, tp = degrees
        mesh = pp, replicas, shards, cp, tp, ep
        share = -(-self.base.global_batch_size // (replicas * shards))
        if self.base.global_batch_size < replicas * shards:
            # One point of this mesh, so that the error is reported once.
            yield [LayoutPoint(*mesh, 1, 1, "full", None if pp == 1 else "1F1B", None)]
            return
        pipelined = pp > 1
        modes = self._choices("activation_checkpoint.mode", reversed(MODES))
        splits = []
        for local in self._choices(
            "training.local_batch_size", [share] if pipelined else divisors(share)
        ):
            sizes = [1]
            if pipelined:
                sizes = self._choices("parallelism.pp_microbatch_size", divisors(local))
            for size in sizes:
                splits += [(local, size, mode) for mode in modes]
        for schedule, layers in self._schedules(pp) if pipelined else [(None, None)]:
            yield [LayoutPoint(*mesh, *split, schedule, layers) for split in splits]

    def methods(self, point: LayoutPoint) -> list[str]:
        """Methods of context parallel that support a legal point, its default first."""
        supported = context_methods(point.job_unchecked(self.base))
        return self._choices("parallelism.cp_method", supported)

    def _choices(self, field: str, free: Iterable[Any]) -> list[Any]:
        part, name = field.split(".")
        return [getattr(getattr(self.base, part), name)] if field in self.typed else list(free)

    def _expert_degrees(self, of: dict[str, int]) -> list[int]:
        moe = self.base.model.moe
        if not moe.enabled:
            return self._choices("parallelism.ep", [1])
        splits = of["tp"] > 1 and self.base.parallelism.expert_tensor_parallel
        ranks = of["dp_shard"] * of["cp"] * (1 if splits else of["tp"])
        return self._choices("parallelism.ep", divisors(moe.num_experts, ranks))

    def _schedules(self, pp: int) -> list[tuple[str, int | None]]:
        """Schedules with layers per stage; those with a free number of stages once for every number."""
        found: list[tuple[str, int | None]] = []
        for name in self._choices("parallelism.pp_schedule", SCHEDULES_TRIED):
            if "parallelism.pp_layers_per_stage" in self.typed:
                found.append((name, self.base.parallelism.pp_layers_per_stage))
                continue
            found.append((name, None))
            if name in SCHEDULES and SCHEDULES[name].stages_per_rank == "many":
                found += [(name, layers) for layers in self._more_stages(pp, name)]
        return found

    def _more_stages(self, pp: int, name: str) -> list[int]:
        """Layers per stage that give at least three stages per rank; one value per number of stages."""
        layout = replace(self.base.parallelism, pp=pp, pp_schedule=name, pp_layers_per_stage=None)
        n_layers = self.base.model.n_layers
        by_stages = {
            num_stages(replace(layout, pp_layers_per_stage=layers), n_layers): layers
            for layers in fitting_layers_per_stage(layout, n_layers)
        }
        return [layers for stages, layers in by_stages.items() if stages > 2 * pp]


def _typed(base: Job, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the fields that the command line fixes, directly or by a group."""
    layout = base.parallelism
    for override in map(parse, overrides):
        is_rest = override.key == "parallelism.dp_shard" and override.value == "-1"
        if override.value in (None, "null") or is_rest:
            continue
        yield override.key
        if override.key == "activation_checkpoint":
            yield "activation_checkpoint.mode"
        if override.key == "parallelism":
            yield from (
                f"parallelism.{axis}" for axis in (*AXES, "ep") if getattr(layout, axis) == 1
            )
    if layout.pp_schedule_csv is not None or layout.pp_modules_per_stage:
        # These options determine the pipeline.
        yield from (f"parallelism.{name}" for name in ("pp", "pp_schedule", "pp_layers_per_stage"))


def _products(number: int, choices: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Yield all tuples with the given product, each element from its own choices."""
    if not choices:
        yield from [()] if number == 1 else []
        return
    for factor in choices[0]:
        if number % factor == 0:
            yield from ((factor, *others) for others in _products(number // factor, choices[1:]))


def gpus_of(base: Job) -> int:
    """GPUs that the ranks of a job find on this machine."""
    return count_gpus() if base.cluster.is_here and base.cluster.device != "cpu" else 0
