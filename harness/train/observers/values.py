"""Observers that add columns: memory, the loss of validation, and the values of each rank."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from harness.data.kinds import holds_out
from harness.metrics.columns import Metric
from harness.metrics.jsonl import MetricsFile
from harness.metrics.memory import MEMORY, allocator, peak_memory_gib
from harness.train.engine import Engine
from harness.train.objective import validation_loaders
from harness.train.observer import Observer, Periodic, Row, Run
from harness.train.setup import device_name
from harness.train.step import add_up
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


LOSS = "validation_loss"


class Validation(Periodic):
    """Computes the loss of the first held-out batches, and of the first batches of each validation set."""

    metrics = (
        Metric(
            LOSS,
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
        sets = validation_loaders(run.job, run.tokenizer, run.engine.rows)
        # By column.
        self._loaders = {f"{LOSS}.{name}": loader for name, loader in sets.items()}
        if not sets or holds_out(run.job.data):
            self._loaders = {LOSS: run.validation_loader, **self._loaders}

    def start(self) -> None:
        for column, loader in self._loaders.items():
            if loader.note:
                self.run.message(f"{column}: {loader.note}")

    def act(self, step: int) -> Row:
        engine = self.run.engine
        losses: dict[str, float] = {}
        for column, loader in self._loaders.items():
            loader.reset()
            batches = (loader.next() for _ in range(self.run.job.validation.steps))
            total, *by_source = add_up([engine.evaluate(batch) for batch in batches])
            losses[column] = total.mean
            # A set has no sources.
            for name, found in zip(engine.sources.names, by_source, strict=False):
                if found.tokens:
                    losses[f"{column}.{name}"] = found.mean
        of_parts = dict(losses)
        self.run.progress.note_validation(of_parts.pop(LOSS, None), of_parts)
        return losses

    def close(self, error: BaseException | None) -> None:
        for loader in self._loaders.values():
            loader.close()


FOLDER = "metrics"


def where_is(engine: Engine) -> dict[str, Any]:
    """Return rank, pipeline stage, host and device of this rank."""
    name = device_name(engine.device)
    index = engine.device.index
    return {
        "rank": dist.get_rank(),
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
