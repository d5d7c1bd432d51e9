"""Which rank a collective that timed out was waiting for. Imports no torch.

``StepWatch`` has each rank write its place to ``flight_recorder/place-rank<r>.json``: the last collective
that it began, and how many of each group. A rank waits for the members of that group that have begun fewer.
One that is waited for and waits for nobody is the cause. A rank that is stopped writes nothing.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from harness.loop.process import FLIGHT_RECORDER

# How long after the first error a place still tells what a rank did before it.
LATE_SECONDS = 0.5


def absent_ranks(run_dir: Path, error: dict[str, Any]) -> list[int]:
    """Return the ranks that did not come to a collective; empty if they are not known.

    Args:
        run_dir: the run folder.
        error: of the first rank whose collective timed out.
    """
    places = _read_places(run_dir)
    if places.get(error["rank"], {}).get("time", float("inf")) > error["time"]:
        return []  # outside of a step, where nobody watches before the time is out
    last = error["time"] + LATE_SECONDS
    in_time = {rank: place for rank, place in places.items() if place["time"] <= last}
    waits = {rank: _waits_for(place, in_time) for rank, place in in_time.items()}
    wanted = {rank for ranks in waits.values() for rank in ranks}
    return sorted(rank for rank in wanted if not waits.get(rank))


def _read_places(run_dir: Path) -> dict[int, dict[str, Any]]:
    places = {}
    for path in (run_dir / FLIGHT_RECORDER).glob("place-rank*.json"):
        # One that was being written when its rank was killed says as much as one that is missing.
        with contextlib.suppress(ValueError):
            place = json.loads(path.read_text())
            places[int(place["rank"])] = place
    return places


def _waits_for(place: dict[str, Any], places: dict[int, dict[str, Any]]) -> list[int]:
    """Return the members of a rank's last group that have not begun its last collective."""
    group, number = place["group"], place["number"]
    return [
        rank
        for rank in place["members"]
        if rank != place["rank"] and (rank not in places or places[rank]["begun"].get(group, 0) < number)
    ]
