"""Times of the phases of a step on one rank: rows of ``phases/rank<r>.jsonl``, and slow ranks.

A mark is a point in time at which the phase changes: a CUDA event on the current stream, or the clock on a
CPU. The time of a phase is the time from its marks to the next ones. So times are exclusive, add up to the
step, and a collective counts only while computation waits for it.

The host never waits for an event. Times of a step are read when its last event is done. On a CPU a mark also
reads how long the kernel let this thread wait for a core.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DispatchKey, DispatchKeySet
from torch.distributed.fsdp import FSDPModule

from harness.metrics.columns import Metric
from harness.metrics.jsonl import MetricsFile
from harness.metrics.slow_ranks import FILE, KINDS, WINDOW, SlowRanks, own_seconds
from harness.metrics.window import EXCLUDED
from harness.model.part import ModelPart
from harness.parallelism.fsdp import parameter_groups
from harness.parallelism.mesh import EXPERT, EXPERT_TENSOR, Mesh
from harness.run.result import write_json_atomically
from harness.train.observer import Observer, Row, Run
from harness.train.observers.values import where_is
from harness.util.annotation import SUMS, set_phases

FOLDER = "phases"
WITH_SPANS = 5
"""Rows that also have the spans of their last step: the first ones of an attempt."""


class PhaseLog(Observer):
    """The phases of this rank, from the first step on."""

    metrics = (
        Metric("slow_ranks", "count", "Ranks that compute longer than others.", "`profiling.phases=true`"),
    )
    metrics_of_rank = (
        Metric("phase.*", "s", "Mean time of a phase in the steps done last.", "`profiling.phases=true`"),
    )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        engine = run.engine
        self.world = run.job.world_size
        self._where = where_is(engine)
        self.rank: int = self._where["rank"]
        everyone = [self._where] * self.world
        if self.world > 1:
            dist.all_gather_object(everyone, self._where)
        names = [(each["host"], each["device"]) for each in everyone]
        self.slow = SlowRanks([each["stage"] for each in everyone], names)
        self._phases = Phases(engine.device, self._where["stage"])
        self._marks = Marks(self._phases, engine.parts, engine.mesh, engine.device)
        self._file = MetricsFile(run.folder / FOLDER / f"rank{self.rank}.jsonl")
        self._last: dict[str, float] = {}
        """Mean seconds of each phase, of the newest row."""
        self._first = 0
        self._row: list[StepPhases] = []
        self._window: list[list[float]] = []
        self._rows = 0

    def start(self) -> None:
        # No row counts the steps of warm-up, as in throughput.
        self._first = self.run.progress.step + 1 + max(1, self.run.job.metrics.warmup_steps)
        self._phases.restart()

    def begin_step(self, step: int) -> Sequence[float]:
        """Return every WINDOW steps the values to sum over the world: this rank's in its slots."""
        if self.world == 1 or step <= self._first or (step - self._first) % WINDOW:
            return ()
        own = [median(kind) for kind in zip(*self._window, strict=True)] if self._window else []
        self._window = []
        slots = [0.0] * (self.world * len(KINDS))
        slots[self.rank * len(KINDS) : self.rank * len(KINDS) + len(own)] = own
        return slots

    def end_step(self, step: int, sums: Sequence[float]) -> Row:
        self._phases.end_step(step)
        self._take()
        if sums:
            self._observe(sums, step)
        return {"slow_ranks": len(self.slow.slow)}

    def log(self, row: Mapping[str, Any], own: Row) -> None:
        self._take()
        if self._row:
            self._write()
        own |= {f"phase.{name}": seconds for name, seconds in self._last.items()}

    def close(self, error: BaseException | None) -> None:
        self._marks.remove()
        self._phases.close()
        self._file.close()

    def _take(self) -> None:
        for each in self._phases.take():
            if each.step >= self._first:
                self._row.append(each)
                self._window.append(own_seconds(each.on_core))

    def _observe(self, sums: Sequence[float], step: int) -> None:
        seconds = [sums[at : at + len(KINDS)] for at in range(0, len(sums), len(KINDS))]
        before = self.slow.found
        found = self.slow.observe(seconds, step)
        if self.slow.found != before and self.rank == 0:
            found_so_far = {"slow": [asdict(each) for each in self.slow.found]}
            write_json_atomically(self.run.folder / FILE, found_so_far)
        for each in found:
            self.run.message(f"WARNING slow: {each}")

    def _write(self) -> None:
        steps, self._row = self._row, []
        self._last = phases = _mean(step.seconds for step in steps)
        last = steps[-1]
        # Mean seconds of a step in which a core was missing to compute.
        queued = sum(own_seconds(phases)) - sum(own_seconds(_mean(step.on_core for step in steps)))
        passes = [step.passes for step in steps]
        stages = {stage: _mean(each.get(stage, {}) for each in passes) for stage in sorted({*chain(*passes)})}
        self._rows += 1
        spans = [[s.start, s.end, s.phase, s.stage] for s in last.spans if s.phase not in EXCLUDED]
        shown = {"aligned_at": last.aligned_at, "spans": spans} if self._rows <= WITH_SPANS else {}
        self._file.write(
            {
                "step": last.step,
                "steps": len(steps),
                **self._where,
                "seconds": sum(phases[phase] for phase in phases if phase not in EXCLUDED),
                **({"queued": queued} if self._phases.sees_queue else {}),
                "phases": phases,
                **({"stages": stages} if len(self.run.engine.parts) > 1 else {}),
                **shown,
            }
        )


def _mean(steps: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each phase over steps; a step without it counts as zero."""
    steps = list(steps)
    total = _total(pair for phases in steps for pair in phases.items())
    return {phase: seconds / len(steps) for phase, seconds in total.items()}


def _total(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for phase, seconds in times:
        total[phase] += seconds
    return dict(total)


HOST = "host"
"""Time in no other phase: launching, reading values, writing metrics."""
_SCHEDSTAT = "/proc/thread-self/schedstat"
"""Nanoseconds on a core, nanoseconds waiting for one, and turns, of the thread that opens it (Linux,
Documentation/scheduler/sched-stats.rst)."""


class PhaseSpan(NamedTuple):
    """A time in one phase without interruption, in seconds from the start of the step."""

    start: float
    end: float
    phase: str
    stage: int
    queued: float = 0.0
    """Seconds of it in which the thread could run and had no core; 0.0 where the system does not say."""


@dataclass(frozen=True)
class StepPhases:
    """Phases of one step on one rank."""

    step: int
    spans: list[PhaseSpan]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase."""
        return _total((span.phase, span.end - span.start) for span in self.spans)

    @property
    def passes(self) -> dict[int, dict[str, float]]:
        """Seconds of the forward and backward phases of each pipeline stage."""
        of_stage: dict[int, list[PhaseSpan]] = defaultdict(list)
        for span in self.spans:
            if span.phase.startswith(("forward.", "backward.")):
                of_stage[span.stage].append(span)
        return {stage: StepPhases(self.step, of_stage[stage]).seconds for stage in sorted(of_stage)}

    @property
    def on_core(self) -> dict[str, float]:
        """Seconds of each phase, without those in which the thread waited for a core."""
        # A thread that loses its core between both readings of a mark has waited in the next span.
        return _total((span.phase, max(0.0, span.end - span.start - span.queued)) for span in self.spans)

    @property
    def aligned_at(self) -> float:
        """End of the last sum over the world, which is the same moment on all ranks; 0.0 without one."""
        return max((span.end for span in self.spans if span.phase == SUMS), default=0.0)


class Phases:
    """Record the phases of every step.

    Args:
        device: whose time counts: events on a GPU, else the clock.
        stage: pipeline stage of phases that name none.
    """

    def __init__(self, device: torch.device, stage: int = 0) -> None:
        self._stamps: Any = _Events() if device.type == "cuda" else _Clock()
        self._open = [(HOST, stage)]
        self._marks: list[tuple[Any, str, int]] = []
        self._ended: deque[tuple[int, list[tuple[Any, str, int]], Any]] = deque()
        self._mark()

    def enter(self, phase: str, stage: int | None = None) -> None:
        """Begin a phase, which interrupts the one before until ``leave``.

        Passes and collectives of validation and saving are a part of these.
        """
        around, of = self._open[-1]
        self._open.append((around if around in EXCLUDED else phase, of if stage is None else stage))
        self._mark()

    def leave(self) -> None:
        """End the phase that began last, and continue the one before."""
        self._open.pop()
        self._mark()

    def change(self, phase: str) -> None:
        """Begin a phase in place of the one that began last, until ``leave``."""
        self._open[-1] = (phase, self._open[-1][1])
        self._mark()

    def inside(self, phase: str, stage: int | None = None) -> _Inside:
        """Count the ``with`` block, or each call of a decorated function, as a phase."""
        return _Inside(self, phase, stage)

    @property
    def sees_queue(self) -> bool:
        """Whether spans have the time in which the thread waited for a core."""
        return self._stamps.sees_queue  # type: ignore[no-any-return]

    def close(self) -> None:
        """Release what reads the time; no mark may follow."""
        self._stamps.close()

    def restart(self) -> None:
        """Discard the marks of an incomplete step."""
        self._stamps.free([stamp for stamp, _, _ in self._marks])
        self._marks = []
        self._mark()

    def end_step(self, step: int) -> None:
        """End a step; the next one begins."""
        marks, self._marks = self._marks, []
        self._mark()
        self._ended.append((step, marks, self._marks[0][0]))

    def take(self) -> Iterator[StepPhases]:
        """Remove and yield the ended steps that the device has finished, oldest first."""
        while self._ended and self._stamps.is_done(self._ended[0][2]):
            step, marks, end = self._ended.popleft()
            yield StepPhases(step, self._spans(marks, end))
            self._stamps.free([stamp for stamp, _, _ in marks])

    def _mark(self) -> None:
        self._marks.append((self._stamps.now(), *self._open[-1]))

    def _spans(self, marks: list[tuple[Any, str, int]], end: Any) -> list[PhaseSpan]:
        spans: list[PhaseSpan] = []
        since = 0.0
        lengths = self._stamps.lengths([stamp for stamp, _, _ in marks] + [end])
        for (_, phase, stage), (seconds, queued) in zip(marks, lengths, strict=True):
            until = since + seconds
            if spans and spans[-1].phase == phase and spans[-1].stage == stage:
                last = spans[-1]
                spans[-1] = PhaseSpan(last.start, until, phase, stage, last.queued + queued)
            elif until > since:
                spans.append(PhaseSpan(since, until, phase, stage, queued))
            since = until
        return spans


class _Inside(AbstractContextManager[None], contextlib.ContextDecorator):
    """The ``with`` block of a phase; a generator would take longer than the mark."""

    def __init__(self, phases: Phases, phase: str, stage: int | None) -> None:
        self._phases, self._phase, self._stage = phases, phase, stage

    def __enter__(self) -> None:
        self._phases.enter(self._phase, self._stage)

    def __exit__(self, *_: object) -> None:
        self._phases.leave()


class _Clock:
    """The host's clock, and the time that this thread has waited for a core."""

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):  # not Linux, or a kernel without CONFIG_SCHED_INFO
            self._file = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def sees_queue(self) -> bool:
        return self._file is not None

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def now(self) -> tuple[float, bytes]:
        return time.perf_counter(), b"" if self._file is None else os.pread(self._file, 64, 0)

    def is_done(self, _stamp: tuple[float, bytes]) -> bool:
        return True

    def lengths(self, stamps: list[tuple[float, bytes]]) -> list[tuple[float, float]]:
        read = [(at, int(found.split()[1]) / 1e9 if found else 0.0) for at, found in stamps]
        return [(end[0] - start[0], end[1] - start[1]) for start, end in pairwise(read)]

    def free(self, stamps: list[tuple[float, bytes]]) -> None: ...


class _Events:
    """CUDA events, used again: making one takes longer than recording it."""

    sees_queue = False

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def now(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_done(self, event: torch.cuda.Event) -> bool:
        return event.query()

    def lengths(self, events: list[torch.cuda.Event]) -> list[tuple[float, float]]:
        return [(start.elapsed_time(end) / 1000, 0.0) for start, end in pairwise(events)]

    def free(self, events: list[torch.cuda.Event]) -> None:
        self._free += events

    def close(self) -> None: ...


_FUNCTIONAL = "_c10d_functional"
_COLLECTIVES = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_to_all_single": "all_to_all",
}
_KEYS = {"cpu": "CPU", "cuda": "CUDA"}
# A key without a kernel of its own: it reaches torch's kernel, which is the same for all devices.
_ORIGINAL = DispatchKeySet(DispatchKey.XPU)
# Methods of FSDP's parameter groups, and the phase that they are.
_SHARDING = {
    "unshard": "dp.all_gather",
    "wait_for_unshard": "dp.all_gather",
    "post_backward": "dp.reduce",
    "finalize_backward": "dp.reduce",
}


_NO_AXIS = "other.collective"
"""Functional collectives of a group that is no axis."""


class Marks:
    """Hooks that tell ``Phases`` where a model part computes, and where it waits for other ranks.

    Marks are outside of compiled regions. Collectives inside of them are found too, because their operators
    are called by name. Recomputation is a part of backward.
    """

    def __init__(self, phases: Phases, parts: Sequence[ModelPart], mesh: Mesh, device: torch.device) -> None:
        self._phases = phases
        self._undo: list[Callable[[], None]] = []
        for part in parts:
            for group, module in _layer_groups(part):
                self._mark_module(module, group)
            # Modules that are sharded together share a group.
            sharded = [module for module in part.modules() if isinstance(module, FSDPModule)]
            for each in {
                id(group): group for module in sharded for group in parameter_groups(module)
            }.values():
                self._mark_sharding(each)
        axes = _axes(mesh)
        if axes:
            self._mark_collectives(axes, _KEYS[device.type])
        set_phases(phases.inside)

    def remove(self) -> None:
        """Remove all hooks."""
        set_phases(None)
        while self._undo:
            self._undo.pop()()

    def _mark_module(self, module: nn.Module, group: str) -> None:
        def begin(_module: nn.Module, _inputs: Any) -> None:
            self._phases.enter(f"forward.{group}")

        def end(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._phases.leave()
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.requires_grad:
                first.register_hook(reached)

        def reached(_gradient: Tensor) -> None:
            self._phases.change(f"backward.{group}")

        # Before and after FSDP's own hooks, so that their collectives interrupt the phase.
        self._undo.append(module.register_forward_pre_hook(begin, prepend=True).remove)
        self._undo.append(module.register_forward_hook(end).remove)

    def _mark_sharding(self, group: Any) -> None:
        for name, phase in _SHARDING.items():
            setattr(group, name, self._phases.inside(phase)(getattr(group, name)))
            self._undo.append(lambda name=name: delattr(group, name))  # type: ignore[misc]

    def _mark_collectives(self, axes: dict[str, str], key: str) -> None:
        library = torch.library.Library(_FUNCTIONAL, "IMPL")
        self._undo.append(library._destroy)
        pending: dict[int, str] = {}

        def collective(operator: Any, kind: str) -> Callable[..., Any]:
            index = [each.name for each in operator._schema.arguments].index("group_name")

            def call(*arguments: Any, **options: Any) -> Any:
                axis = axes.get(arguments[index])
                phase = _NO_AXIS if axis is None else f"{axis}.{kind}"
                with self._phases.inside(phase):
                    result = operator.redispatch(_ORIGINAL, *arguments, **options)
                pending[result.data_ptr()] = phase
                return result

            return call

        def wait(tensor: Tensor) -> Any:
            phase = pending.pop(tensor.data_ptr(), None)  # None: waited for before
            with nullcontext() if phase is None else self._phases.inside(phase):
                return wait_tensor.redispatch(_ORIGINAL, tensor)

        operators = getattr(torch.ops, _FUNCTIONAL)
        wait_tensor = operators.wait_tensor.default
        library.impl("wait_tensor", wait, key)
        for name, kind in _COLLECTIVES.items():
            library.impl(name, collective(getattr(operators, name).default, kind), key)


def _layer_groups(part: ModelPart) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = [("embedding", module) for module in part.entries]
    found += [("blocks", block) for block in part.blocks.values()]
    return found + ([] if part.output is None else [("head", part.output)])


def _axes(mesh: Mesh) -> dict[str, str]:
    """Return the axis of each process group by the group's name."""
    names = {axis: axis for axis in ("pp", "tp") if mesh.size(axis) > 1}
    found: dict[str, str] = {mesh.group(axis).group_name: axis for axis in names}
    if mesh.context is not None:
        found[mesh.context.group_name] = "cp"
    if mesh.experts is not None:
        own = mesh.experts.mesh_dim_names or ()
        for axis, name in ((EXPERT, "ep"), (EXPERT_TENSOR, "tp")):
            if axis in own:
                found.setdefault(mesh.experts.get_group(axis).group_name, name)
    return found
