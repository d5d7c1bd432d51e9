"""The limit of a sweep holds for all shapes of its points, and counts points already in SLURM's queue."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.compose.composer import compose_points
from harness.config.fields import with_value
from harness.config.job import Job
from harness.launch.state import RunState, SlurmJobRecord
from harness.launch.sweep import run
from harness.launch.sweep.registry import Point, Registry
from harness.launch.sweep.run import Array, arrays_of
from harness.run.folder import RunFolder

SHAPES = "parallelism.dp_shard=1,2,4,8"


def points(folder: Path, *typed: str) -> list[tuple[Point, Job]]:
    common = ["cluster=slurm", "training.global_batch_size=8", f"runs_dir={folder}"]
    jobs = [(each.job, each.overrides) for each in compose_points([*common, *typed])]
    return [(Point(job.id, job.run_dir, overrides), job) for job, overrides in jobs]


def most_at_once(arrays: list[Array]) -> int:
    """Return the maximum number of points that run at once, given SLURM's limits and dependencies."""
    chains: dict[int, int] = {}
    first: dict[int, int] = {}
    for index, array in enumerate(arrays):
        first[index] = index if array.after is None else first[array.after]
        running = min(array.at_once, len(array.points))
        chains[first[index]] = max(chains.get(first[index], 0), running)
    return sum(chains.values())


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 7, 12, 100])
def test_the_limit_holds_over_all_shapes(limit: int, tmp_path: Path) -> None:
    own = points(tmp_path, SHAPES, "training.seed=1,2,3")
    arrays = arrays_of(own, limit)
    assert [len(array.points) for array in arrays] == [3] * 4
    assert most_at_once(arrays) == min(limit, len(own))
    # Arrays wait for earlier ones only, and no two wait for the same one.
    before = [array.after for array in arrays if array.after is not None]
    assert len(set(before)) == len(before)
    assert all(array.after is None or array.after < index for index, array in enumerate(arrays))


def test_a_longer_array_gets_the_larger_share(tmp_path: Path) -> None:
    long = points(tmp_path, "training.seed=1,2,3,4,5,6")
    short = points(tmp_path, "parallelism.dp_shard=2", "training.seed=1,2")
    assert [array.at_once for array in arrays_of([*long, *short], 4)] == [3, 1]


def test_the_scripts_have_limits_and_dependencies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = [SHAPES, "training.seed=1,2,3", "name=n", f"runs_dir={tmp_path}", "cluster=slurm"]
    typed += ["training.global_batch_size=8", "cluster.dry_run=true"]
    assert run.sweep(compose_points([*typed, "cluster.max_running=6"])) == 0
    assert sorted(re.findall("--array=(.*)", capsys.readouterr().out)) == ["0-2%1"] * 2 + ["0-2%2"] * 2
    own = "cluster.sbatch={dependency: 'afterok:7'}"
    assert run.sweep(compose_points([*typed, "cluster.max_running=3", own])) == 0
    scripts = capsys.readouterr().out
    assert re.findall("--array=(.*)", scripts) == ["0-2%1"] * 4
    dependencies = re.findall("--dependency=(.*)", scripts)
    assert dependencies == ["afterok:7"] * 3 + ["afterok:7,afterany:ID_OF_ARRAY_1"]


def test_points_that_slurm_has_already_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of a limit of four are in use; then all four, and new points wait for their end."""
    own = [
        (point, with_value(job, "cluster.max_running", 4))
        for point, job in points(tmp_path, "training.seed=1,2,3,4,5,6,7,8")
    ]
    for point, job in own:
        RunFolder(point.run_dir).plan(job, point.overrides)
    job_records = [SlurmJobRecord("before", index, f"77_{index}") for index in range(4)]
    waiting = [
        RunState(point.run_dir, "pending", job_record=job_record, job_id=job_record.job_id)
        for (point, _), job_record in zip(own[:4], job_records, strict=True)
    ]
    asked = []

    def submit(submission: run.Submission, folders: list[RunFolder], overrides: list[list[str]]) -> list[str]:
        asked.append((submission.at_once, list(submission.after), len(folders)))
        return [f"88_{index}" for index in range(len(folders))]

    monkeypatch.setattr(run, "submit", submit)
    for busy in (2, 4):
        tasks = [*own[:busy], *own[4:]]
        planned = [RunState(point.run_dir, "planned") for point, _ in own[4:]]
        run.Selection.of(Registry(tmp_path), tasks, [*waiting[:busy], *planned]).submit()
    assert asked == [(2, [], 4), (4, ["77"], 4)]


def test_points_of_another_command_for_the_same_sweep_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = points(tmp_path, "name=n", "training.seed=1,2")
    Registry(tmp_path / "n").path.mkdir()
    Registry(tmp_path / "n").add([point for point, _ in before], [])
    taken = {str(point.run_dir): f"77_{index}" for index, (point, _) in enumerate(before)}

    def read_state(run_dir: Path) -> RunState:
        ident = taken.get(str(run_dir))
        if ident is None:
            return RunState(run_dir, "planned")
        return RunState(run_dir, "running", job_record=SlurmJobRecord("n"), job_id=ident)

    monkeypatch.setattr(run, "read_states", lambda asked: [read_state(path) for path in asked])
    typed = ["cluster=slurm", "training.global_batch_size=8", f"runs_dir={tmp_path}", "name=n"]
    typed += ["training.seed=3,4,5", "cluster.max_running=3", "cluster.dry_run=true"]
    assert run.sweep(compose_points(typed)) == 0
    assert "--array=0-2%1\n" in capsys.readouterr().out
