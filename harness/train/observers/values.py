"""Observers that add columns: memory, the loss of validation, and the values of each rank."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from harness.data.kinds import holds_out
from harness.data.loader import Loader
from harness.metrics.columns import Metric
from harness.metrics.jsonl import MetricsFile
from harness.metrics.memory import MEMORY, allocator, peak_memory_gib
from harness.train.engine import Engine
from harness.train.objective import validation_loaders
from harness.train.observer import Observer, Periodic, Row, Run
from harness.train.setup import device_name
from harness.train.step import LossSum, add_up
from harness.util.hardware import node_name


class Memory(Observer):
    """Reads the memory after the steps that are logged."""

    metrics = MEMORY
    maxima = tuple(metric.name for metric in MEMORY)

    def end_step(self, step: int, sums: Sequence[float]) -> Row:
        if not self.run.is_logged(step):
            return {}
        device = self.run.engine.device.type
        return {"memory_gib": peak_memory_gib(device), **allocator(device)}


class Validation(Periodic):
    """Computes the loss of the first held-out batches."""

    metrics = (
        Metric(
            "validation_loss",
            "nats/token",
            "Loss on held-out samples; a row of its own with `step`.",
            "validation",
            line="validation_loss {:.4f}",
        ),
        Metric(
            "validation_loss.*",
            "nats/token",
            "The same for a source or a set.",
            "`data=mixture` or `validation.sets`, validation",
            line="validation_loss.{rest} {:.5g}",
        ),
    )

    def __init__(self, run: Run) -> None:
        super().__init__(run, run.job.validation.interval)
        job = run.job
        self._sets = validation_loaders(job, run.tokenizer, run.engine.rows)
        has_own = not self._sets or holds_out(job.data)
        self._own = run.validation_loader if has_own else None

    def start(self) -> None:
        if self._own is not None and self._own.note:
            self.run.message(self._own.note)
        for name, loader in self._sets.items():
            if loader.note:
                self.run.message(f"{name}: {loader.note}")

    def act(self, step: int) -> Row:
        progress = self.run.progress
        own: Row = {}
        parts: dict[str, float] = {}
        if self._own is not None:
            total, *by_source = self._sums(self._own)
            progress.note_validation(total.mean)
            own["validation_loss"] = total.mean
            names = self.run.engine.sources.names
            found = zip(names, by_source, strict=True)
            parts = {name: each.mean for name, each in found if each.tokens}
        for name, loader in self._sets.items():
            [total] = self._sums(loader)
            parts[name] = total.mean
        progress.source_validation = {f"validation_loss.{name}": parts[name] for name in parts}
        return {**own, **progress.source_validation}

    def _sums(self, loader: Loader) -> list[LossSum]:
        """Sums of the first batches of a loader, and of a mixture those of each source."""
        loader.reset()
        batches = (loader.next() for _ in range(self.run.job.validation.steps))
        return add_up([self.run.engine.evaluate(batch) for batch in batches])

    def close(self, error: BaseException | None) -> None:
        if self._own is not None:
            self._own.close()
        for loader in self._sets.values():
            loader.close()


FOLDER = "metrics"


def where_is(engine: Engine) -> dict[str, Any]:
    """Return rank, pipeline stage, host and device of this rank."""
    name = device_name(engine.device)
    index = engine.device.index
    return {
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "stage": engine.mesh.rank("pp"),
        "host": node_name(),
        "device": name if index is None else f"{name} {index}",
    }


class RankMetrics(Observer):
    """Writes the values of this rank when a step is logged."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._where = where_is(run.engine)
        self._file = MetricsFile(run.folder / FOLDER / f"rank{self._where['rank']}.jsonl")

    def start(self) -> None:
        # Later rows are written again.
        self._file.truncate_after(self.run.progress.step)

    def log(self, row: Mapping[str, Any], own: Row) -> None:
        self._file.write({"step": row["step"], **self._where, **own, "time": time.time()})

    def close(self, error: BaseException | None) -> None:
        self._file.close()
