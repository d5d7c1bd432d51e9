"""How a run ended: find the cause of a failure, choose the exit code, and complete the row."""

import contextlib
import json
import sys
import traceback
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from harness.checkpoint.resume import can_resume
from harness.config.failures import VICTIMS
from harness.config.job import Job
from harness.run.folder import RunFolder
from harness.run.record import RunRecord, reason_of
from harness.train.process import FLIGHT_RECORDER
from harness.util.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_RESUMABLE, STOPPED


def finish_run(
    job: Job, folder: RunFolder, code: int, *, quiet: bool = False, row_seconds: float = 0.0
) -> int:
    """Find and show the cause of a failure, complete the run's row, and return the exit code.

    Args:
        row_seconds: how long to wait for the row of rank 0, which has more fields.
    """
    error = find_cause(folder) if code != EXIT_OK else None
    if code in STOPPED and error is not None and error["kind"] in VICTIMS:
        # Ranks that stop or are killed at different moments cause errors in each other, not
        # failures.
        error = None
    if error is not None:
        code = error["exit_code"]
        if not quiet:
            sys.stderr.write(format_failure(error, job.world_size, folder))
            sys.stderr.flush()
    if code in STOPPED and folder.is_cancelled:
        code = EXIT_INTERRUPTED
    elif code == EXIT_INTERRUPTED and can_resume(job, folder.path):
        code = EXIT_RESUMABLE  # from an earlier checkpoint, not from where it was stopped
    folder.wait_for_result(row_seconds)
    try:
        RunRecord(job, folder).end(reason_of(code), code)
    except Exception:
        # The cause has been shown; failing to write it is secondary.
        traceback.print_exc()
    return code


def find_cause(folder: RunFolder) -> dict[str, Any] | None:
    """Return the first error of the attempt, and in it the ranks that a collective waited for."""
    error = folder.errors.first()
    if error is not None and error["kind"] == "collective_timeout" and "absent_ranks" not in error:
        absent = absent_ranks(folder.path, error)
        if absent:
            who = ranks_in_words(absent)
            message = f"{who} did not reach the collective that rank {error['rank']} waited in"
            message = f"{message}: {error['message']}"
            error = {**error, "message": message, "absent_ranks": absent}
            folder.errors.replace(error)
    return error


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Name ranks: ``rank 2``, ``ranks 1, 2``."""
    return f"rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks))}"


def format_failure(error: dict[str, Any], world_size: int, folder: RunFolder) -> str:
    """Format a failure for the user.

    A user error and non-finite numbers take one line. A bug includes its traceback, a machine
    failure the rank, the step and the operation.
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


def absent_ranks(run_dir: Path, error: dict[str, Any]) -> list[int]:
    """Return the ranks that did not reach a collective; empty if they are not known.

    ``FlightRecorder`` has each rank write its position to ``flight_recorder/place-rank<r>.json``:
    the last collective that it began, and the number of collectives begun in each group. A rank
    waits for the members of that group that have begun fewer. A rank that others wait for, and that
    waits for nobody, is the cause. A stopped rank writes nothing, or says that it wrote late: after
    its own timeout.

    Args:
        error: the error of the first rank whose collective timed out.
    """
    positions = {}
    for path in (run_dir / FLIGHT_RECORDER).glob("place-rank*.json"):
        # A file that was being written when its rank was killed counts as missing.
        with contextlib.suppress(ValueError):
            position = json.loads(path.read_text())
            positions[int(position["rank"])] = position
    own = positions.get(error["rank"])
    if own is None or own.get("timed_out") or own.get("late"):
        return []  # outside of a step positions are written only after the timeout
    in_time = {rank: position for rank, position in positions.items() if not position.get("late")}
    waits = {}
    for rank, position in in_time.items():
        group = position["group"]
        begun = {other: each["begun"].get(group, 0) for other, each in in_time.items()}
        # Members of its last group that have not begun its last collective.
        waits[rank] = [
            other
            for other in position["members"]
            if other != rank and begun.get(other, -1) < position["number"]
        ]
    awaited = set(chain.from_iterable(waits.values()))
    return sorted(rank for rank in awaited if not waits.get(rank))
