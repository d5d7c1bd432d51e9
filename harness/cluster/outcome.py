"""What became of a job's ranks, told once: the cause, the exit code, and the run's row."""

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
    """A rank ended without a word of ours: killed from outside, by the kernel, or by a library.

    Its kind is what its last output speaks of, or else ``unknown``.

    Args:
        rank: which.
        how: how it ended, e.g. ``signal 9 (SIGKILL)``.
        logs: folder of what the ranks printed.
        hint: what is known besides.
        kind: its class, if that is known.
    """

    def __init__(self, rank: int, how: str, logs: Path, *, hint: str = "", kind: str | None = None) -> None:
        said = last_words(logs / f"rank{rank}.err")
        self.kind = kind or kind_of_text(said) or "unknown"
        super().__init__(f"rank {rank} ended with {how}{hint}{said}")

    @classmethod
    def by_code(cls, rank: int, exit_code: int, memory_kills: int | None, logs: Path) -> RankDied:
        """A rank of this machine that ended with an exit code, negative for a signal.

        Args:
            rank: which.
            exit_code: its exit code.
            memory_kills: processes the kernel killed for want of memory meanwhile; None if unknown.
            logs: folder of what the ranks printed.
        """
        if exit_code >= 0:
            return cls(rank, f"exit code {exit_code}", logs)
        how, hint, kind = f"signal {-exit_code} ({signal.Signals(-exit_code).name})", "", None
        if exit_code == -signal.SIGKILL:
            hint = ": killed from outside, or by the kernel for want of memory"
            if memory_kills:
                kind = "out_of_memory"
                hint = f": the kernel killed {memory_kills} process(es) for want of memory meanwhile"
        elif exit_code == -signal.SIGTERM:
            hint = ": ended from outside"
        return cls(rank, how, logs, hint=hint, kind=kind)


def last_words(log: Path) -> str:
    """The end of a log, as it is added to a message; empty when there is none."""
    try:
        tail = log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    except OSError:
        return ""
    return "".join(f"\n  {line}" for line in ["its last words:", *tail]) if tail else ""


@contextmanager
def memory_kills() -> Iterator[Any]:
    """Yields a function that counts the kernel's out-of-memory kills on this machine since then."""
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


def settle(job: Job, folder: RunFolder, code: int, *, quiet: bool = False) -> int:
    """Shows the cause unless quiet, completes the run's row where no rank could, decides the exit code."""
    error = folder.first_error() if code != EXIT_OK else None
    if code in STOPPED and error is not None and error["kind"] in VICTIMS:
        # Ranks that stop or are killed at different moments make errors of each other; nothing went wrong.
        error = None
    if error is not None and error["kind"] == "collective_timeout":
        error = _name_absent(folder, error)
    if error is not None:
        code = error["exit_code"]
        if not quiet:
            sys.stderr.write(account_of(error, job.world_size, folder))
            sys.stderr.flush()
    if code == EXIT_INTERRUPTED and can_resume(job, folder.path):
        code = EXIT_RESUMABLE  # not from where it was stopped, but from a checkpoint before
    reason = "completed" if code == EXIT_OK else "interrupted" if code in STOPPED else "failed"
    try:
        folder.settle(job, reason, code)
    except Exception:
        # The cause is told; that it could not be written down comes second.
        traceback.print_exc()
    return code


def _name_absent(folder: RunFolder, error: dict[str, Any]) -> dict[str, Any]:
    """Add the ranks that were waited for to the error of the rank that waited."""
    absent = absent_ranks(folder.path, error)
    if not absent or "absent_ranks" in error:
        return error
    who = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"
    message = f"{who} did not come to the collective that rank {error['rank']} waited in: {error['message']}"
    error = {**error, "message": message, "absent_ranks": absent}
    folder.rewrite_error(error)
    return error


def account_of(error: dict[str, Any], world_size: int, folder: RunFolder) -> str:
    """What the user reads of a failure.

    A mistake of theirs and numbers gone wrong are one line; a bug comes with its traceback; a fault of the
    machine with the rank, the step and the operation.
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
        text += f"  which collective it was, and where every rank stood: {stacks}\n"
    return f"{text}  errors and logs of all ranks lie in {folder.path}\n"
