"""The rank that did not come to a collective is found from the places that the others wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.cluster.absent import absent_ranks

ERROR = {"rank": 0, "time": 100.0}


def place(group: str, members: list[int], time: float = 90.0, **begun: int) -> dict[str, Any]:
    return {"group": group, "number": begun[group], "members": members, "begun": begun, "time": time}


PAIR = [0, 1]
CASES = {
    "one is behind": ({0: place("a", PAIR, a=7), 1: place("a", PAIR, a=6)}, [1]),
    "one is stopped, and wrote nothing": ({0: place("a", PAIR, a=7)}, [1]),
    "one was continued when the other had failed": (
        {0: place("a", PAIR, a=7), 1: place("a", PAIR, time=101.0, a=7)},
        [1],
    ),
    "one waits for the other, which waits for a third": (
        {0: place("a", PAIR, a=7), 1: place("b", [1, 2], a=6, b=3), 2: place("b", [1, 2], b=2)},
        [2],
    ),
    "all are there": ({0: place("a", PAIR, a=7), 1: place("a", PAIR, a=7)}, []),
    "two are missing": ({0: place("a", [0, 1, 2, 3], a=7), 2: place("a", [0, 1, 2, 3], a=7)}, [1, 3]),
    "nobody watched": ({}, []),
    "the place was written after the error": ({0: place("a", PAIR, time=100.1, a=7)}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_who_did_not_come(case: str, tmp_path: Path) -> None:
    places, absent = CASES[case]
    folder = tmp_path / "flight_recorder"
    folder.mkdir()
    for rank, content in places.items():
        (folder / f"place-rank{rank}.json").write_text(json.dumps({"rank": rank, **content}))
    assert absent_ranks(tmp_path, ERROR) == absent
