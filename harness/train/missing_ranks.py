"""Find the rank that a timed-out collective was waiting for. Imports no torch.

``FlightRecorder`` has each rank write its position to ``flight_recorder/place-rank<r>.json``: the last
collective that it began, and the number of collectives begun in each group. A rank waits for the members of
that group that have begun fewer. A rank that others wait for, and that waits for nobody, is the cause. A
stopped rank writes nothing.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from harness.train.process import FLIGHT_RECORDER

# Positions written up to this long after the first error still show what a rank did before it.
LATE_SECONDS = 0.5


def absent_ranks(run_dir: Path, error: dict[str, Any]) -> list[int]:
    """Return the ranks that did not reach a collective; empty if they are not known.

    Args:
        run_dir: the run folder.
        error: the error of the first rank whose collective timed out.
    """
    positions = _read_positions(run_dir)
    own = positions.get(error["rank"])
    if own is None or own.get("timed_out") or own["time"] > error["time"]:
        return []  # outside of a step positions are written only after the timeout
    last = error["time"] + LATE_SECONDS
    in_time = {rank: position for rank, position in positions.items() if position["time"] <= last}
    waits = {rank: _waits_for(position, in_time) for rank, position in in_time.items()}
    awaited = {rank for ranks in waits.values() for rank in ranks}
    return sorted(rank for rank in awaited if not waits.get(rank))


def _read_positions(run_dir: Path) -> dict[int, dict[str, Any]]:
    positions = {}
    for path in (run_dir / FLIGHT_RECORDER).glob("place-rank*.json"):
        # A file that was being written when its rank was killed counts as missing.
        with contextlib.suppress(ValueError):
            position = json.loads(path.read_text())
            positions[int(position["rank"])] = position
    return positions


def _waits_for(position: dict[str, Any], positions: dict[int, dict[str, Any]]) -> list[int]:
    """Return the members of a rank's last group that have not begun its last collective."""
    group, number = position["group"], position["number"]
    return [
        rank
        for rank in position["members"]
        if rank != position["rank"]
        and (rank not in positions or positions[rank]["begun"].get(group, 0) < number)
    ]
