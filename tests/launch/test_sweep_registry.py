"""A sweep's registry is append-only, survives torn writes, and can be moved with its folder."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.launch.sweep.registry import FILE, Point, Registry, Skipped, folder_of, labels
from harness.util.errors import UserError


def point(folder: Path, name: str) -> Point:
    return Point(name, folder / name, [f"training.seed={name}"])


def test_points_are_added_once_and_kept_in_order(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registry.add([point(tmp_path, "b"), point(tmp_path, "a")], [Skipped(["x=1"], "cannot be")])
    registry.add([point(tmp_path, "a"), point(tmp_path, "c")], [Skipped(["x=1"], "cannot be")])
    assert [each.id for each in registry.points()] == ["b", "a", "c"]
    assert registry.skipped() == [Skipped(["x=1"], "cannot be")]


def test_a_torn_line_costs_no_other(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registry.add([point(tmp_path, "a"), point(tmp_path, "b")], [])
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-9])
    assert [each.id for each in registry.points()] == ["a"]
    registry.add([point(tmp_path, "b"), point(tmp_path, "c")], [])
    assert [each.id for each in registry.points()] == ["a", "b", "c"]


def test_a_reader_beside_a_writer_sees_whole_points(tmp_path: Path) -> None:
    registry = Registry(tmp_path)

    def write() -> None:
        for number in range(20):
            registry.add([point(tmp_path, str(number))], [])

    with ThreadPoolExecutor() as pool:
        done = pool.submit(write)
        while not done.done():
            seen = [each.id for each in Registry(tmp_path).points()]
            assert seen == [str(number) for number in range(len(seen))]
        done.result()
    assert len(registry.points()) == 20


def test_the_folder_can_be_moved(tmp_path: Path) -> None:
    old = tmp_path / "old" / "sweep"
    old.mkdir(parents=True)
    Registry(old).add([point(tmp_path / "old" / "other", "a")], [])
    (tmp_path / "old").rename(tmp_path / "new")
    [moved] = Registry(tmp_path / "new" / "sweep").points()
    assert moved.run_dir.resolve() == tmp_path / "new" / "other" / "a"


def test_one_controller_at_a_time(tmp_path: Path) -> None:
    with (
        Registry(tmp_path).controlled(),
        pytest.raises(UserError, match="another process"),
        Registry(tmp_path).controlled(),
    ):
        pass
    with Registry(tmp_path).controlled():
        pass


def test_a_sweep_is_named_as_its_jobs_are(tmp_path: Path) -> None:
    def job(name: str) -> Job:
        made: Job = compose_job([f"name={name}", f"runs_dir={tmp_path}"])
        return made

    assert folder_of([job("a"), job("a")]) == tmp_path / "a"
    assert folder_of([job("b"), job("a")]) == tmp_path / "a+b"
    many = folder_of([job(f"model_number_{n}") for n in range(40)])
    assert many.name.startswith("model_number_0+39-") and len(many.name) < 60


def test_labels_are_what_differs() -> None:
    points = [["a=1", "b=1", "c=1"], ["a=2", "b=1", "c=1"]]
    assert labels(points) == ["a=1", "a=2"]
    assert labels(points, [["a=1", "b=2", "c=1"]]) == ["a=1 b=1", "a=2 b=1"]
    assert labels([["a=1"]]) == ["the only point"]
    assert labels([]) == []


@pytest.mark.parametrize(
    "line",
    [
        "",
        "junk",
        "[]",
        "[" * 100_000,
        "9" * 5000,
        '{"of": "a later version"}',
        '{"point": "b", "run_dir": "b"}',
        '{"point": "b", "run_dir": "b", "overrides": [3]}',
        '{"point": "b", "run_dir": "b\\u0000", "overrides": []}',
        '{"point": 3, "run_dir": "b", "overrides": []}',
        '{"skipped": null, "overrides": []}',
    ],
    ids=lambda line: line[:60],
)
def test_a_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registry.add([point(tmp_path, "a")], [])
    with (tmp_path / FILE).open("a") as file:
        file.write(f"{line}\n")
    for read in (registry.points, registry.skipped, lambda: registry.add([point(tmp_path, "c")], [])):
        with pytest.raises(UserError, match=r"sweep\.jsonl: line 2 is damaged: .*; would work: ") as raised:
            read()
        assert "\n" not in str(raised.value)
