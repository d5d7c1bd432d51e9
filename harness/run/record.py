"""How an attempt ended: the one writer of ``result.json``, and of the status that ends a run."""

import os
import platform
import socket
import sys
import time
from typing import Any

from harness.config.failures import ERROR_FIELDS_IN_ROW
from harness.config.job import Job
from harness.run.folder import RunFolder
from harness.run.result import write_result
from harness.util.errors import EXIT_OK, STOPPED

COMPLETED = "completed"
INTERRUPTED = "interrupted"
FAILED = "failed"
# Columns that layout.json has.
OF_LOSSES = ("losses", "lost_steps")


def reason_of(exit_code: int) -> str:
    """Return the exit reason that belongs to an exit code."""
    if exit_code == EXIT_OK:
        return COMPLETED
    return INTERRUPTED if exit_code in STOPPED else FAILED


class RunRecord:
    """The row of a run: what it was, what it reached, how it ended and why.

    Rank 0 ends it with its results. The process that outlives the ranks ends it again, with what
    only it knows: that rank 0 died before it wrote a row, or that it wrote one knowing only that a
    peer was lost.
    """

    def __init__(self, job: Job, folder: RunFolder) -> None:
        self.job = job
        self.folder = folder

    def end(self, reason: str, code: int, facts: dict[str, Any] | None = None) -> None:
        """Write the row and the final status; if that fails, print how the run ended in one line.

        Args:
            reason: ``completed``, ``interrupted`` or ``failed``.
            code: exit code of the command.
            facts: results of the run; None: those of the row that is there, or else the last row of
                metrics.
        """
        error = (self.folder.errors.first() if reason == FAILED else None) or {}
        if reason == INTERRUPTED and self.folder.is_cancelled:
            error = {"kind": "cancelled"}
        cause = {f"error.{name}": error[name] for name in ERROR_FIELDS_IN_ROW if name in error}
        ending = {"exit_reason": reason, "exit_code": code, **cause}
        row = self.folder.row if facts is None else {}
        if row and all(row.get(name) == value for name, value in ending.items()):
            return
        if row:
            kept = {name: row[name] for name in row if not name.startswith("error.")}
            row = {**kept, **ending}
        else:
            if facts is None:
                last = {"step": 0, "tokens": 0, "loss": None, **self.folder.last_metrics}
                facts = {name: last[name] for name in ("step", "tokens", "loss")}
            job = self.job
            layout = self.folder.layout
            row = {
                "id": self.folder.id_of(job),
                "numerics_id": job.numerics_id,
                "name": job.name,
                **ending,
                "world_size": job.world_size,
                **{name: layout[name] for name in OF_LOSSES if name in layout},
                "wall_seconds": self.folder.seconds(time.time()),
                **facts,
                "job": job.to_dict(),
                "code": self.folder.code,
                "host": {
                    "name": socket.gethostname(),
                    "system": platform.platform(),
                    "cores": os.cpu_count(),
                },
            }
        trained = row.get("train_seconds")
        wall = row.get("wall_seconds")
        row["goodput"] = trained / wall if trained is not None and wall else None
        path = self.folder.path
        try:
            write_result(path, row)
            self.folder.set_status(reason, exit_code=code)
        except OSError as error:
            sys.stderr.write(
                f"WARNING {path}: how the run ended ({reason}, exit code {code}) cannot be "
                f"written: {error.strerror}\n"
            )
