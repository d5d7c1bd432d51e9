"""A rank of a rehearsal: ``python -m harness.tools.rehearse.rank``, with the stand-in library loaded."""

import dataclasses
import functools
import itertools
import json
import os
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.failures import chain_of
from harness.config.fields import with_value
from harness.config.job import Job
from harness.run.folder import RunFolder
from harness.tools.rehearse.figures import (
    OUT_OF_MEMORY,
    CollectiveCount,
    Copy,
    Product,
    RankFigures,
    RehearsalFailure,
    Wait,
)
from harness.tools.rehearse.gpu import VirtualGpu, place_in_harness, virtual_device
from harness.train.process import set_environment
from harness.util.lifeline import end_with_parent

CONTROLLER = "HARNESS_REHEARSAL"
"""Environment variable with the parent's process id; ranks end when the parent does."""


def main(result: Path) -> None:
    """Rehearse the rank of the request on standard input; write its figures into ``result``."""
    end_with_parent(int(os.environ[CONTROLLER]))
    request = json.load(sys.stdin)
    job = Job.from_json(request.pop("job"))
    set_environment(job, result.parent)  # torch reads some of it when it is imported
    import harness.tools.rehearse.substitutes  # noqa: F401

    figures = rehearse(job, **request)
    result.write_text(json.dumps(dataclasses.asdict(figures)))
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the destructors of communicators.
    os._exit(0)


def rehearse(job: Job, rank: int, steps: int, skew: float) -> RankFigures:
    """Build a rank of the job and run its steps in this process."""
    device = virtual_device(job)
    gpu = VirtualGpu(device)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_RANK=str(rank % device.count),
        LOCAL_WORLD_SIZE=str(device.count),
    )
    figures = RankFigures(rank, rank // (job.world_size // job.parallelism.pp), device.name)
    rehearsal = Rehearsal(job, gpu, figures, steps)
    try:
        rehearsal.run(skew)
    except Exception as error:
        traceback.print_exc()
        figures.failure = _failure(error, rehearsal.step)
    return figures


@dataclass
class Rehearsal:
    """Runs one rank's steps and fills in its figures."""

    job: Job
    gpu: VirtualGpu
    figures: RankFigures
    steps: int
    step: int | None = None
    """The step that runs, from 0; None before the first one."""
    began: float = 0.0
    """When it began, without the time of measurements since."""
    began_processor: float = 0.0
    """The same in processor time."""

    def run(self, skew: float) -> None:
        """Set up, build and train as ``harness.train.rank`` does."""
        import torch

        from harness.parallelism.compile import CompileWatch
        from harness.tools.rehearse.substitutes import LoneStore, route, substitutes
        from harness.train.graphed import EAGER_CALLS, build_engine
        from harness.train.setup import pick_device, process_group, set_up_process

        job = self.job
        figures = self.figures
        if job.compile.cuda_graphs:
            # The last one only replays what was captured.
            self.steps = max(self.steps, EAGER_CALLS + 2)
        store = None if job.world_size == 1 else LoneStore()
        device = pick_device(job)
        set_up_process(job)
        with substitutes(job, self.gpu, skew), process_group(job, device, store):
            try:
                began = time.perf_counter()
                watch = CompileWatch()
                engine = build_engine(job, device)
                if job.debug.routing is not None:
                    route(job, engine)
                figures.build_seconds = time.perf_counter() - began
                self._train(engine, watch, store)
            finally:
                statistics = torch.cuda.memory_stats()
                figures.memory["allocated"] = statistics["allocated_bytes.all.peak"]
                figures.memory["reserved"] = statistics["reserved_bytes.all.peak"]
                figures.allocation_retries = statistics["num_alloc_retries"]

    def _train(self, engine: Any, watch: Any, store: Any) -> None:
        from harness.tools.rehearse.substitutes import StepEnds
        from harness.train.observers import observers_of
        from harness.train.trainer import Trainer

        figures = self.figures
        memory = figures.memory
        weights: list[Any] = []
        for part in engine.parts:
            weights += [*part.parameters(), *part.buffers()]
        memory["parameters"] = _bytes_on_device(weights)
        update = engine.update

        def measure_and_update(norm: Any) -> None:
            began = time.perf_counter()
            processor = time.process_time()
            memory["gradients"] = _bytes_on_device(
                p.grad for p in engine.parameters if p.grad is not None
            )
            self.began += time.perf_counter() - began
            self.began_processor += time.process_time() - processor
            update(norm)

        def begin(number: int) -> None:
            self._end_step(number - 1, engine, watch, store)
            if number > self.steps:
                raise _AllRehearsed
            self.step = number - 1
            self.gpu.clear()
            self.began = time.perf_counter()
            self.began_processor = time.process_time()

        engine.update = measure_and_update
        with tempfile.TemporaryDirectory() as folder:
            job = _only_training(self.job, self.steps + 1)
            observers: list[Any] = [*observers_of(job), functools.partial(StepEnds, begin=begin)]
            trainer = Trainer(
                job, RunFolder(Path(folder)), engine, None, time.monotonic(), observers
            )
            with suppress(_AllRehearsed):
                trainer.train()
        states = [state.values() for state in engine.optimizer.state.values()]
        memory["optimizer"] = _bytes_on_device(itertools.chain(*states))
        figures.graphs = watch.graphs
        figures.compile_seconds = watch.seconds
        figures.recompilations = watch.unexpected

    def _end_step(self, step: int, engine: Any, watch: Any, store: Any) -> None:
        if step == 0:
            return
        figures = self.figures
        figures.host_seconds = time.perf_counter() - self.began
        figures.cpu_seconds = time.process_time() - self.began_processor
        if step == 1:
            figures.first_step_seconds = figures.host_seconds
            watch.mark_expected()
        if step == self.steps:
            self._count(self.gpu.calls(), engine, store)
        figures.steps = step

    def _count(self, calls: Any, engine: Any, store: Any) -> None:
        figures = self.figures
        groups = _Groups(engine.mesh, store)
        figures.kernels = dict(calls.kernels.most_common())
        for (left, right, *shape), (count, flops) in calls.products.items():
            formats = left if left == right else f"{left} x {right}"
            batch, rows, inner, columns = map(int, shape)
            figures.products.append(Product(count, batch, rows, inner, columns, formats, flops))
        figures.products.sort(key=lambda product: -product.flops)
        found = [*calls.collectives.items(), *calls.sends.items()]
        for (kind, communicator), (count, size) in found:
            axis, ranks = groups.of(communicator)
            # A group of sends is an exchange; in a pipeline each send counts by itself.
            not_counted = "exchange" if axis == "pp" else "send"
            if kind in ("receive", not_counted):
                continue
            if kind in ("exchange", "all_to_all") and axis not in ("pp", "tp", "cp", "ep"):
                # Experts' group may be FSDP's, and the optimizer's that of FSDP or of the world.
                axis = "ep" if axis == "dp" and engine.job.parallelism.ep > 1 else "optimizer"
            figures.collectives.append(
                CollectiveCount(axis, kind, ranks, count, size * sent_by(kind, ranks))
            )
        figures.collectives.sort(key=lambda each: (each.axis, each.kind))
        figures.communicators = [
            " of ".join(map(str, groups.of(name))) for name in calls.communicators
        ]
        for (what, where), count in calls.waits.most_common():
            figures.waits.append(Wait(where, what, count))
        figures.copies = [Copy(how, *found) for how, found in sorted(calls.copies.items())]
        figures.replays = calls.replays[0]
        figures.replayed = int(calls.replays[1])
        figures.unknown = calls.unknown


class _AllRehearsed(Exception):
    """The last step to rehearse has ended; one more would begin."""


def _only_training(job: Job, steps: int) -> Job:
    """Return the job with so many steps, all of one size, that writes nothing and does not validate."""
    changed = {
        "training.steps": steps,
        "schedule.batch_size": [],
        "schedule.seq_len": [],
        "validation.interval": 0,
        "evaluation.interval": 0,
        "checkpoint.enable": False,
        "profiling.enable": False,
        "profiling.phases": False,
        "metrics.all_ranks": False,
        "debug.flight_recorder": 0,
    }
    for name, value in changed.items():
        job = with_value(job, name, value)
    return job


class _Groups:
    """Maps NCCL communicators to axes of the mesh."""

    def __init__(self, mesh: Any, store: Any) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _process_group_color

        self._store = store
        self._ranks = dict[str, int]()
        self._axes = _axes_of_groups(mesh)
        self._colours: dict[int, str] = {}
        for group in list(dist.distributed_c10d._world.pg_map):
            ranks = dist.get_process_group_ranks(group)
            self._ranks[group.group_name] = len(ranks)
            # Several groups may have the same ranks; prefer one that is an axis.
            colour = _process_group_color(ranks)
            if colour not in self._colours or group.group_name in self._axes:
                self._colours[colour] = group.group_name

    def of(self, communicator: str) -> tuple[str, int]:
        """Return the axis of a communicator (else the name of its group) and the number of its ranks."""
        kind, _, colour = communicator.partition(" ")
        if kind == "split":
            name = self._colours.get(int(colour))
            if name is None:
                return communicator, 0
            return self._axes.get(name, name), self._ranks[name]
        # Each group has a store inside of its parent's, under its name: 0//11//cuda//0; ids of
        # pairs are 2:3.
        *stores, which = self._store.group_of(communicator).split("/")
        for name in reversed(stores):
            if name in self._ranks:
                return self._axes.get(name, name), 2 if ":" in which else self._ranks[name]
        return communicator, 0


def _axes_of_groups(mesh: Any) -> dict[str, str]:
    """The axis of every process group of a ``Mesh``, by its name; one of all ranks may use the world's."""
    import torch.distributed as dist

    from harness.parallelism.mesh import EXPERT, EXPERT_SHARD, EXPERT_TENSOR, SHARD

    axis_of = {
        SHARD: "dp",
        "dp_replicate": "dp",
        EXPERT_SHARD: "dp",
        EXPERT: "ep",
        EXPERT_TENSOR: "tp",
    }
    axes = {dist.group.WORLD.group_name: "world"}  # type: ignore[union-attr]
    if mesh.context is not None:
        axes[mesh.context.group_name] = "cp"
    for device_mesh in filter(None, (mesh.experts, mesh.device_mesh)):
        for name in device_mesh.mesh_dim_names or ():
            axes[device_mesh.get_group(name).group_name] = axis_of.get(name, name)
    return axes


def sent_by(kind: str, ranks: int) -> float:
    """Return the bytes that a rank sends per input byte, in a ring of so many ranks, as the plan assumes.

    In all-gather and reduce-scatter a rank sends one part per other rank (Thakur, Rabenseifner,
    Gropp: Optimization of Collective Communication Operations in MPICH, 2005, section 4); an
    all-reduce is a reduce-scatter, then an all-gather.
    """
    if ranks == 0:
        return 1.0
    shares = {"all_gather": ranks - 1.0, "all_reduce": 2 * (ranks - 1) / ranks}
    shares |= dict.fromkeys(("reduce_scatter", "all_to_all"), (ranks - 1) / ranks)
    return shares.get(kind, 1.0)


def _bytes_on_device(tensors: Any) -> float:
    """Return the bytes of the storages that are on the device; a shared storage counts once."""
    from torch import Tensor

    from harness.precision.swap import plain

    storages = {}
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        values = plain(tensor)
        local = getattr(values, "_local_tensor", values)
        if local.is_cuda:
            storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return float(sum(storages.values()))


def _failure(error: BaseException, step: int | None) -> RehearsalFailure:
    import torch

    # torch's pipelines raise their own error from the original one.
    chain = chain_of(error, suppressed=True)
    error = next((each for each in chain if isinstance(each, torch.OutOfMemoryError)), error)
    # Tracebacks of the chained errors lead down to the place of the first one.
    where = "torch"
    for each in chain:
        for frame in traceback.extract_tb(each.__traceback__):
            where = place_in_harness(frame.filename, frame.lineno) or where
    kind = OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else type(error).__name__
    return RehearsalFailure(kind, str(error), where, step)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
