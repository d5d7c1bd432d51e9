"""The space of a search: every mesh, and for each every batch split, checkpointing mode and schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

from harness.compose.length import with_length
from harness.compose.override import parse
from harness.compose.resolve import resolve, resolve_layout
from harness.config.cluster import count_gpus
from harness.config.job import Job
from harness.config.parallelism import AXES, ParallelismConfig
from harness.config.pipeline import SCHEDULES, fitting_layers_per_stage, num_stages
from harness.model.architecture import resolve_model
from harness.precision.linears import check_layout, sort_linears
from harness.tools.plan.parameters import Memo
from harness.util.errors import ConfigError, divisors

MODES = ("none", "selective_op", "full")
"""Activation checkpointing modes of a search; the other modes are between these."""
SCHEDULES_TRIED = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Without GPipe and LoopedBFS: they save all microbatches and idle as long as 1F1B and Interleaved1F1B."""

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

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees of ``AXES``, in their order."""
        return self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp

    @property
    def complexity(self) -> tuple[int, bool, int]:
        """Smaller for a simpler point: axes that split, a pipeline, and options apart from the default."""
        own_stages = self.layers_per_stage is not None
        options = (self.mode != MODES[0], self.schedule not in (None, SCHEDULES_TRIED[0]), own_stages)
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
        return self.degrees, self.ep, self.schedule, self.layers_per_stage

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
        """Return ``base`` with this point's layout and execution, resolved; ConfigError if not legal."""
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
        base = with_length(base)
        used = prod(max(degree, 1) for degree in base.parallelism.degrees.values())
        cluster, searched = base.cluster, used if used > 1 else None
        world = cluster.world_size or searched or cluster.default_world_size or gpus_of(base)
        if not world or world == 1:
            rule = "a search needs the number of ranks"
            works = "8, or cluster=slurm_h100 cluster.nodes=4"
            raise ConfigError("cluster.ranks", cluster.ranks, rule, works)
        return cls(base, world, frozenset(_typed(base, overrides)))

    def layouts(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield all meshes: degrees of ``AXES``, and ep; tp stays within a node or its linked neighbours."""
        linked = self.base.cluster.linked_ranks(self.world)
        free = divisors(self.world)
        for degrees in _products(self.world, [self._choices(f"parallelism.{axis}", free) for axis in AXES]):
            of = dict(zip(AXES, degrees, strict=True))
            if "parallelism.tp" in self.typed or linked % of["tp"] == 0:
                yield from ((degrees, ep) for ep in self._expert_degrees(of))

    def points(self, degrees: tuple[int, ...], ep: int) -> Iterator[LayoutPoint]:
        """Yield all points of a mesh, those with the least memory first."""
        pp, replicas, shards, cp, tp = degrees
        share, rest = divmod(self.base.global_batch_size, replicas * shards)
        if rest:
            # One point of this mesh, so that the error is reported once.
            schedule = None if pp == 1 else "1F1B"
            yield LayoutPoint(pp, replicas, shards, cp, tp, ep, 1, 1, "full", schedule, None)
            return
        for local in self._choices("training.local_batch_size", [share] if pp > 1 else divisors(share)):
            sizes = divisors(local) if pp > 1 and local else [1]
            for size in self._choices("parallelism.pp_microbatch_size", sizes) if pp > 1 else [1]:
                for schedule, layers in self._schedules(pp) if pp > 1 else [(None, None)]:
                    for mode in self._choices("activation_checkpoint.mode", reversed(MODES)):
                        mesh = pp, replicas, shards, cp, tp, ep
                        yield LayoutPoint(*mesh, local, size, mode, schedule, layers)

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
            yield from (f"parallelism.{axis}" for axis in (*AXES, "ep") if getattr(layout, axis) == 1)
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


class Legality(Memo):
    """Evaluate the rules of a job for many points.

    ``resolve`` takes a millisecond, and a search has a hundred thousand points. So a rule that depends on
    few of the searched fields is evaluated once per combination of these. Points that the search selects are
    resolved completely.
    """

    def __init__(self, base: Job) -> None:
        super().__init__()
        self.base = base
        base.precision.validate()
        # Sorting the linears is the slowest part, and no layout changes it.
        self._plain = replace(base, precision=base.precision.without_format())
        linear = base.precision.linear
        self._linears = None if linear == "none" else sort_linears(base.model, base.precision)
        self._passed = False
        self._batch = base.global_batch_size
        self._batches = [size for _, size in base.schedule.batch_sizes]

    def broken(self, point: LayoutPoint) -> ConfigError | None:
        """The rule that a point breaks; None if it is legal."""
        pp, replicas, shards, cp, tp, ep, local, size, mode, schedule, layers = point
        share, rest = divmod(self._batch, replicas * shards)
        rows = replicas * shards * local
        uneven = rest or not rows or share % local
        if uneven or any(size % rows for size in self._batches):
            return self._error_of(self._check_all, point)
        rules: tuple[tuple[Callable[[LayoutPoint], None], Key], ...] = (
            (self._check_axes, (*point.degrees, ep)),
            (self._check_pipeline, (pp, schedule, layers, share, local, size)),
            (self._check_mode, (mode, schedule, tp)),
            (self._check_all, (pp, cp, tp, ep, mode, share > local)),
            (self._check_format, (tp, cp, point.rows)),
        )
        for rule, key in rules:
            error = self.once((rule.__name__, *key), partial(self._error_of, rule, point))
            if error is not None:
                return error
        return None

    @staticmethod
    def _error_of(rule: Callable[[LayoutPoint], None], point: LayoutPoint) -> ConfigError | None:
        try:
            rule(point)
        except ConfigError as error:
            return error
        return None

    def _check_axes(self, point: LayoutPoint) -> None:
        layout = replace(point.layout(self.base.parallelism), pp=1)
        layout.validate(self.base.model, self.base.training.seq_len, 1, 1)

    def _check_pipeline(self, point: LayoutPoint) -> None:
        alone = {axis: 1 for axis in (*AXES, "ep") if axis != "pp"}
        # The error's suggestion for the global batch depends on the data-parallel degree.
        alone["dp_replicate"] = point.data_parallel
        layout = replace(point.layout(self.base.parallelism), **alone)  # type: ignore[arg-type]
        share = self.base.global_batch_size // point.data_parallel
        layout.validate(self.base.model, self.base.training.seq_len, point.local_batch_size, share)

    def _check_mode(self, point: LayoutPoint) -> None:
        recompute = replace(self.base.activation_checkpoint, mode=point.mode)
        recompute.validate(self.base.compile)

    def _check_all(self, point: LayoutPoint) -> None:
        """Check all rules except those of formats; once those that no layout has an effect on."""
        if not self._passed:
            point.job(self._plain)
            self._passed = True
        resolve_layout(point.job_unchecked(self._plain), gpus=gpus_of(self.base))

    def _check_format(self, point: LayoutPoint) -> None:
        if self._linears is None:
            return
        base, layout = self.base, point.layout(self.base.parallelism)
        if base.schedule.seq_len:
            point.job(base)  # the block of a format also limits the scheduled lengths
        tokens, splits = base.training.seq_len // layout.cp, layout.splits_experts
        own = (self._linears, base.model, base.precision)
        check_layout(*own, layout.tp, point.rows, tokens, splits_experts=splits)
