"""Find the cause of a failure, choose the exit code, and complete the run's row in ``result.json``."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.checkpoint.resume import can_resume
from harness.cluster.absent import absent_ranks
from harness.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_RESUMABLE, STOPPED, MachineError
from harness.failures import VICTIMS, kind_of_text
from harness.job import Job
from harness.loop.process import FLIGHT_RECORDER
from harness.run_folder import RunFolder

LOG_LINES_SHOWN = 8


class RankDied(MachineError):
    """A rank ended without recording an error: killed from outside, by the kernel, or by a library.

    Without ``kind``, the kind is inferred from the end of its log, or else ``unknown``.

    Args:
        rank: the rank.
        how: how it ended, e.g. ``signal 9 (SIGKILL)``.
        logs: folder of the ranks' logs.
        hint: further text for the message.
        kind: the failure class, if known.
    """

    def __init__(self, rank: int, how: str, logs: Path, *, hint: str = "", kind: str | None = None) -> None:
        tail = last_lines(logs / f"rank{rank}.err")
        self.kind = kind or kind_of_text(tail) or "unknown"
        super().__init__(f"rank {rank} ended with {how}{hint}{tail}")

    @classmethod
    def by_code(cls, rank: int, exit_code: int, memory_kills: int | None, logs: Path) -> RankDied:
        """Describe a rank of this machine by its exit code.

        Args:
            rank: the rank.
            exit_code: its exit code, negative for a signal.
            memory_kills: number of processes that the kernel's OOM killer killed meanwhile; None if unknown.
            logs: folder of the ranks' logs.
        """
        if exit_code >= 0:
            return cls(rank, f"exit code {exit_code}", logs)
        how, hint, kind = f"signal {-exit_code} ({signal.Signals(-exit_code).name})", "", None
        if exit_code == -signal.SIGKILL:
            hint = ": killed from outside, or by the kernel's OOM killer"
            if memory_kills:
                kind = "out_of_memory"
                hint = f": the kernel's OOM killer killed {memory_kills} process(es) meanwhile"
        elif exit_code == -signal.SIGTERM:
            hint = ": ended from outside"
        return cls(rank, how, logs, hint=hint, kind=kind)


def last_lines(log: Path) -> str:
    """Return the end of a log, formatted to follow a message; empty if there is no log."""
    try:
        tail = log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    except OSError:
        return ""
    return "".join(f"\n  {line}" for line in ["last lines of its log:", *tail]) if tail else ""


@contextmanager
def memory_kills() -> Iterator[Any]:
    """Yield a function that counts the kernel's out-of-memory kills on this machine since entry."""
    before = _count_memory_kills()

    def since() -> int | None:
        after = _count_memory_kills()
        return None if before is None or after is None else after - before

    yield since


def _count_memory_kills() -> int | None:
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def finish_run(job: Job, folder: RunFolder, code: int, *, quiet: bool = False) -> int:
    """Show the cause unless quiet, complete the run's row where no rank could, and return the exit code."""
    error = folder.first_error() if code != EXIT_OK else None
    if code in STOPPED and error is not None and error["kind"] in VICTIMS:
        # Ranks that stop or are killed at different moments cause errors in each other, not failures.
        error = None
    if error is not None and error["kind"] == "collective_timeout":
        error = _name_absent(folder, error)
    if error is not None:
        code = error["exit_code"]
        if not quiet:
            sys.stderr.write(format_failure(error, job.world_size, folder))
            sys.stderr.flush()
    if code == EXIT_INTERRUPTED and can_resume(job, folder.path):
        code = EXIT_RESUMABLE  # from an earlier checkpoint, not from where it was stopped
    reason = "completed" if code == EXIT_OK else "interrupted" if code in STOPPED else "failed"
    try:
        folder.ensure_result(job, reason, code)
    except Exception:
        # The cause has been shown; failing to write it is secondary.
        traceback.print_exc()
    return code


def _name_absent(folder: RunFolder, error: dict[str, Any]) -> dict[str, Any]:
    """Add the ranks that did not reach the collective to the error of the rank that waited for them."""
    absent = absent_ranks(folder.path, error)
    if not absent or "absent_ranks" in error:
        return error
    who = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"
    message = f"{who} did not reach the collective that rank {error['rank']} waited in: {error['message']}"
    error = {**error, "message": message, "absent_ranks": absent}
    folder.rewrite_error(error)
    return error


def format_failure(error: dict[str, Any], world_size: int, folder: RunFolder) -> str:
    """Format a failure for the user.

    A user error and non-finite numbers take one line. A bug includes its traceback, a machine failure the
    rank, the step and the operation.
    """
    if error["kind"] in ("user", "non_finite"):
        return f"error: {error['message']}\n"
    rank = error["rank"]
    who = "the controller" if rank is None else f"rank {rank} of {world_size}"
    step = f" after step {error['step']}" if error.get("step") else ""
    text = f"error: {who}{step}: {error['type']} ({error['kind']}): {error['message']}\n"
    if error["kind"] == "bug":
        text = error["traceback"] + text
    elif error.get("where"):
        text += f"  in {error['where']}\n"
    stacks = folder.path / FLIGHT_RECORDER
    if error["kind"] == "collective_timeout" and stacks.is_dir():
        text += f"  the collective and each rank's position: {stacks}\n"
    return f"{text}  errors and logs of all ranks: {folder.path}\n"
