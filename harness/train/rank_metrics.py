"""Rows of this rank's own values, in ``metrics/rank<r>.jsonl`` (``metrics.all_ranks``)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.config.cluster import node_name
from harness.metrics.jsonl import MetricsFile
from harness.train.engine import Engine
from harness.train.progress import device_name

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


class RankMetrics:
    """The file of one rank; it does nothing without ``metrics.all_ranks``.

    Args:
        run_dir: the run folder.
        engine: model and layout of this rank.
    """

    def __init__(self, run_dir: Path, engine: Engine) -> None:
        self._where = where_is(engine)
        self._path = run_dir / FOLDER / f"rank{self._where['rank']}.jsonl"
        self._enabled = engine.job.metrics.all_ranks
        self._file: MetricsFile | None = None

    def begin(self, start_step: int) -> None:
        """Open the file, and drop the rows after ``start_step``, which will be written again.

        Raises:
            OSError: the file cannot be written.
        """
        if self._enabled:
            self._file = MetricsFile(self._path)
            self._file.truncate_after(start_step)

    def log(self, row: Mapping[str, Any]) -> None:
        """Write a row, which has ``step``.

        Raises:
            OSError: the file cannot be written.
        """
        if self._file is not None:
            self._file.write({"step": row["step"], **self._where, **row, "time": time.time()})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
