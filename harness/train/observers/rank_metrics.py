"""Rows of this rank's own values, in ``metrics/rank<r>.jsonl`` (``metrics.all_ranks``)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from harness.metrics.jsonl import MetricsFile
from harness.train.engine import Engine
from harness.train.observer import Observer, Row, Run
from harness.train.progress import device_name
from harness.util.hardware import node_name

FOLDER = "metrics"


def where_is(engine: Engine) -> dict[str, Any]:
    """Return rank, pipeline stage, host and device of this rank."""
    name, index = device_name(engine.device), engine.device.index
    return {
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "stage": engine.mesh.rank("pp"),
        "host": node_name(),
        "device": name if index is None else f"{name} {index}",
    }


class RankMetrics(Observer):
    """Writes the values of this rank when a step is logged.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._where = where_is(run.engine)
        self._file: MetricsFile | None = None

    def start(self) -> None:
        self._file = MetricsFile(self.run.folder / FOLDER / f"rank{self._where['rank']}.jsonl")
        # Later rows are written again.
        self._file.truncate_after(self.run.progress.step)

    def log(self, row: Mapping[str, Any], own: Row) -> None:
        assert self._file is not None
        self._file.write({"step": row["step"], **self._where, **own, "time": time.time()})

    def close(self, error: BaseException | None) -> None:
        if self._file is not None:
            self._file.close()
