"""metrics.jsonl: valid JSON and complete rows, also after crashes and resumes."""

import json
import math
from contextlib import closing

import pytest

from harness.metrics.jsonl import MetricsFile, read_metrics, read_rows
from harness.util.errors import UserError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def write(path, *steps):
    with closing(MetricsFile(path)) as file:
        for step in steps:
            file.write({"step": step, "loss": step / 2})


def steps(path):
    return [row["step"] for row in read_metrics(path)]


def test_rows_are_there_as_soon_as_they_are_written_or_not_at_all(path):
    file = MetricsFile(path)
    file.write({"step": 1, "loss": 5.5, "mfu": None})
    with pytest.raises(TypeError):
        file.write({"step": 2, "loss": object()})
    assert read_metrics(path) == [{"step": 1, "loss": 5.5, "mfu": None}]
    file.close()


def test_non_finite_floats_are_valid_json_and_come_back(path):
    with closing(MetricsFile(path)) as file:
        file.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "norms": [-math.inf, 1.0]})
    written = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert written == {"step": 1, "loss": "nan", "grad_norm": "inf", "norms": ["-inf", 1.0]}
    [row] = read_metrics(path)
    assert math.isnan(row["loss"])
    assert (row["grad_norm"], row["norms"]) == (math.inf, [-math.inf, 1.0])


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        (b"", []),
        (b'{"st', []),
        (b'{"step": 1}\n', [1]),
        (b'{"step": 1}', [1]),
        *(
            (b'{"step": 1}\n' + tail, [1])
            for tail in (
                b'{"step": 3, "lo',
                b"{",
                b'{"step": 3}\xff',
                b"\x00\x00\n",
                b'{"text": "\xc3',
            )
        ),
    ],
)
def test_a_row_broken_by_a_crash_is_cut(path, found, kept):
    path.parent.mkdir()
    path.write_bytes(found)
    assert steps(path) == kept  # also before it is repaired
    write(path, 3)
    assert steps(path) == [*kept, 3]


def test_damage_in_the_middle_is_reported(path):
    write(path, 1)
    path.write_bytes(path.read_bytes() + b'garbage\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2 is not a JSON object"):
        read_metrics(path)
    assert [row["step"] for row in read_rows(path)[0]] == [1, 2]
    found, copy = path.read_bytes(), path.with_name("metrics.damaged.jsonl")
    copy.write_bytes(b"of an earlier start\n")
    with closing(MetricsFile(path)) as file:
        file.truncate_after(2)
        [note] = file.notes
    assert "the curve has a gap at line 2; metrics.damaged.jsonl has the file as it was" in note
    assert steps(path) == [1, 2], "the file can be read again"
    assert copy.read_bytes() == b"of an earlier start\n" + found


def test_damage_done_while_the_run_writes_is_reported_at_the_end(path):
    file = MetricsFile(path)
    for step in (1, 2, 3):
        file.write({"step": step})
    path.write_bytes(path.read_bytes().replace(b"2", b"\xff"))
    file.close()
    assert file.notes == [f"WARNING {path}: damaged, the curve has a gap at line 2"]
    path.unlink()
    (file := MetricsFile(path)).write({"step": 4})
    path.unlink()
    file.close()
    assert file.notes == [f"WARNING {path} was deleted while the run wrote it"]


def test_truncate_after_a_step(path):
    write(path, 1, 2, 3, 4)
    with closing(MetricsFile(path)) as file:
        file.truncate_after(2)
        file.write({"step": 3, "loss": 9.0})
        file.truncate_after(3)
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [
        (1, 0.5),
        (2, 1.0),
        (3, 9.0),
    ]
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.jsonl"]
