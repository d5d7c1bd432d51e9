"""The rank that did not reach a collective is found from the positions that the others wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.train.finish import absent_ranks

ERROR = {"rank": 0, "time": 100.0}


def position(group: str, members: list[int], time: float = 90.0, **begun: int) -> dict[str, Any]:
    return {"group": group, "number": begun[group], "members": members, "begun": begun, "time": time}


PAIR = [0, 1]
CASES = {
    "one is behind": ({0: position("a", PAIR, a=7), 1: position("a", PAIR, a=6)}, [1]),
    "one is stopped and wrote nothing": ({0: position("a", PAIR, a=7)}, [1]),
    "one was continued when the other had failed": (
        {0: position("a", PAIR, a=7), 1: position("a", PAIR, time=101.0, a=7)},
        [1],
    ),
    "one waits for the other, which waits for a third": (
        {0: position("a", PAIR, a=7), 1: position("b", [1, 2], a=6, b=3), 2: position("b", [1, 2], b=2)},
        [2],
    ),
    "none is missing": ({0: position("a", PAIR, a=7), 1: position("a", PAIR, a=7)}, []),
    "two are missing": ({0: position("a", [0, 1, 2, 3], a=7), 2: position("a", [0, 1, 2, 3], a=7)}, [1, 3]),
    "no positions": ({}, []),
    "the position was written after the error": ({0: position("a", PAIR, time=100.1, a=7)}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_absent_ranks(case: str, tmp_path: Path) -> None:
    positions, absent = CASES[case]
    folder = tmp_path / "flight_recorder"
    folder.mkdir()
    for rank, content in positions.items():
        (folder / f"place-rank{rank}.json").write_text(json.dumps({"rank": rank, **content}))
    assert absent_ranks(tmp_path, ERROR) == absent
