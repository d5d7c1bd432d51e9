"""metrics.jsonl: valid JSON, whole rows, right after crashes and resumes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.metrics.jsonl import MetricsFile, read_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def write(path: Path, *steps: int) -> None:
    with MetricsFile(path) as file:
        for step in steps:
            file.write({"step": step, "loss": step / 2})


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_metrics(path)]


def test_rows_are_there_as_soon_as_they_are_written(path: Path) -> None:
    file = MetricsFile(path)
    file.write({"step": 1, "loss": 5.5, "mfu": None})
    assert read_metrics(path) == [{"step": 1, "loss": 5.5, "mfu": None}]
    file.close()


def test_reopening_appends(path: Path) -> None:
    write(path, 1, 2)
    write(path, 3)
    assert steps(path) == [1, 2, 3]


def test_non_finite_floats_are_valid_json_and_come_back(path: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    with MetricsFile(path) as file:
        file.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "norms": [-math.inf, 1.0]})
    written = json.loads(path.read_text(), parse_constant=refuse)
    assert written == {"step": 1, "loss": "nan", "grad_norm": "inf", "norms": ["-inf", 1.0]}
    (row,) = read_metrics(path)
    assert math.isnan(row["loss"])
    assert (row["grad_norm"], row["norms"]) == (math.inf, [-math.inf, 1.0])


def test_a_value_without_json_form_writes_nothing(path: Path) -> None:
    with MetricsFile(path) as file:
        with pytest.raises(TypeError):
            file.write({"step": 1, "loss": object()})
        file.write({"step": 2})
    assert steps(path) == [2]


@pytest.mark.parametrize(
    "tail", [b'{"step": 3, "lo', b"{", b'{"step": 3}\xff', b"\x00\x00\n", b'{"text": "\xc3']
)
def test_a_row_broken_by_a_crash_is_cut(path: Path, tail: bytes) -> None:
    write(path, 1, 2)
    with path.open("ab") as file:
        file.write(tail)
    assert steps(path) == [1, 2]  # also while nobody has repaired it
    write(path, 3)
    assert steps(path) == [1, 2, 3]


def test_a_whole_row_without_newline_is_kept(path: Path) -> None:
    write(path, 1, 2)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    write(path, 3)
    assert steps(path) == [1, 2, 3]


def test_only_a_broken_row(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b'{"st')
    write(path, 1)
    assert steps(path) == [1]


def test_damage_in_the_middle_is_said(path: Path) -> None:
    write(path, 1)
    with path.open("ab") as file:
        file.write(b"garbage\n")
    path.write_bytes(path.read_bytes() + b'{"step": 2}\n')
    with pytest.raises(UserError, match="line 2 is not a JSON object"):
        read_metrics(path)


def test_truncate_after_a_step(path: Path) -> None:
    write(path, 1, 2, 3, 4)
    with MetricsFile(path) as file:
        assert file.truncate_after(2) == 2
        file.write({"step": 3, "loss": 9.0})
        assert file.truncate_after(3) == 0
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [(1, 0.5), (2, 1.0), (3, 9.0)]
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.jsonl"]
