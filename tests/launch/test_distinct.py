"""Duplicate points run once, and each value of a swept label has a run folder of its own."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from harness.compose.composer import compose_job, compose_points
from harness.config.job import Job
from harness.launch import submit as submit_module
from harness.launch.queue import Queued
from harness.launch.rows import names_of, of_sweep
from harness.launch.state import SlurmJobRecord
from harness.launch.sweep import run
from harness.launch.sweep.registry import (
    OF_THE_COMMAND,
    Point,
    Registry,
    Skipped,
    labels,
    run_dir_of,
    typed_overrides,
    unique_points,
)
from harness.run.folder import RunFolder
from harness.util.errors import UserError

COMMON = ["name=n", "model=llama3_tiny", "data=synthetic", "tokenizer=none", "cluster.device=cpu"]


@pytest.mark.parametrize(
    ("axis", "field"),
    [
        ("cluster.env.NCCL_ALGO=Ring,Tree", "cluster.env.NCCL_ALGO"),
        ("cluster.threads_per_rank=1,2", "cluster.threads_per_rank"),
        ("cluster.partition=a,b", "cluster.partition"),
        ("metrics.wandb_tags=[x],[y]", "metrics.wandb_tags"),
        ("metrics.wandb_group=x,y", "metrics.wandb_group"),
        ("data.cache_dir=x,y", "data.cache_dir"),
    ],
)
def test_each_value_of_a_label_is_a_point(axis: str, field: str, tmp_path: Path) -> None:
    typed = [*COMMON, f"runs_dir={tmp_path}", "training.seed=1,2", axis]
    composed = compose_points(typed)
    found = unique_points(composed)
    assert len({point.run_dir for point, _ in found}) == 4
    assert len({point.id for point, _ in found}) == 2
    assert {point.run_dir.parent for point, _ in found} == {tmp_path / "n"}
    for point, job in found:
        assert point.run_dir.name.partition("-")[0] == point.id == job.id
    registry = Registry(tmp_path / "n")
    registry.path.mkdir()
    registry.add([point for point, _ in found], [])
    names = labels([point.overrides for point in registry.points()])
    assert len(set(names)) == 4 and all(field in name for name in names)
    # The same command, and one with more values, find these folders.
    again = unique_points(compose_points([*typed[:-1], f"{axis},{'[z]' if axis.endswith(']') else 3}"]))
    assert {point.run_dir for point, _ in found} < {point.run_dir for point, _ in again}


def test_names_of_points_have_no_sign_that_nobody_typed() -> None:
    points = [[f"++cluster.env.A={value}", "training.steps=1"] for value in "ab"]
    assert labels(points) == ["cluster.env.A=a", "cluster.env.A=b"]


def test_no_folder_changes_without_a_sweep_over_labels(tmp_path: Path) -> None:
    """Labels that vary with the id, or with the name, are no reason for another folder."""
    for axes in (["training.seed=1,2", "cluster.partition=a"], ["name=a,b"]):
        for point, job in unique_points(compose_points([*COMMON, f"runs_dir={tmp_path}", *axes])):
            assert point.run_dir == job.run_dir


def test_a_run_before_the_sweep_keeps_its_folder(tmp_path: Path) -> None:
    common = [*COMMON, f"runs_dir={tmp_path}"]
    earlier = compose_job([*common, "cluster.threads_per_rank=2"])
    RunFolder(earlier.run_dir).plan(earlier, [])
    swept = [*common, "cluster.threads_per_rank=1,2"]
    first, second = (point.run_dir for point, _ in unique_points(compose_points(swept)))
    assert first != second == earlier.run_dir
    # A point that has a folder of its own keeps that one.
    own = run_dir_of(earlier, ["cluster.threads_per_rank", "cluster.time"])
    assert own == earlier.run_dir
    digest = hashlib.sha256(json.dumps([["cluster.threads_per_rank", 2]]).encode()).hexdigest()[:8]
    (tmp_path / "n" / f"{earlier.id}-{digest}").mkdir()
    _, second = (point.run_dir for point, _ in unique_points(compose_points(swept)))
    assert second.name == f"{earlier.id}-{digest}"


@pytest.mark.parametrize("field", OF_THE_COMMAND)
def test_labels_of_the_command_are_no_axes(field: str) -> None:
    values = "1,2" if field in ("cluster.max_running", "cluster.confirm_gpu_hours") else "true,false"
    with pytest.raises(
        UserError, match=f"^{field}: configures the command, not its runs; would work: one value"
    ):
        run.sweep(compose_points([*COMMON, f"{field}={values}"]))


def test_points_of_one_label_run_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each run has its value in job.json and in its row; status, the report and the same command agree."""
    ran: list[int | None] = []

    def launch(job: Job, folder: RunFolder, **_: object) -> int:
        ran.append(folder.read_job().cluster.threads_per_rank)
        folder.write_result(folder.read_job(), "completed", 0, {"loss": 1.0})
        return 0

    monkeypatch.setattr("harness.launch.local.launch", launch)
    typed = [*COMMON, f"runs_dir={tmp_path}", "cluster.threads_per_rank=1,2", "parallelism.tp=1,3"]
    assert run.sweep(compose_points(typed)) == 0
    assert ran == [1, 2]
    registry = Registry.open(tmp_path / "n")
    rows = [RunFolder(point.run_dir).row for point in registry.points()]
    assert [row["job.cluster.threads_per_rank"] for row in rows] == [1, 2]
    assert [each.overrides[-2:] for each in registry.skipped()] == [
        ["cluster.threads_per_rank=1", "parallelism.tp=3"],
        ["cluster.threads_per_rank=2", "parallelism.tp=3"],
    ]
    out = capsys.readouterr().out
    assert "cluster.threads_per_rank=1  completed" in out and "cluster.threads_per_rank=2  completed" in out
    assert run.sweep(compose_points(typed)) == run.resume(registry) == 0 and ran == [1, 2]
    reported = of_sweep(registry)
    assert [row.get("job.cluster.threads_per_rank") for row in reported] == [1, 2, None, None]
    assert [row["point"] for row in load_points(tmp_path / "n")] == [
        "cluster.threads_per_rank=1",
        "cluster.threads_per_rank=2",
    ]


def load_points(folder: Path) -> list[dict[str, object]]:
    points = sorted(
        (Point(p.name, p, []) for p in folder.glob("*-*")),
        key=lambda each: each.job.cluster.threads_per_rank or 0,
    )
    names = names_of([Point(each.id, each.run_dir, typed_overrides(each.run_dir)) for each in points])
    return [{"point": name} for name in names]


def test_arrays_of_slurm_have_one_value_of_a_label(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [*COMMON, "cluster=slurm_cpu", "cluster.dry_run=true", f"runs_dir={tmp_path}"]
    axes = ["cluster.env.ALGO=Ring,Tree", "training.seed=1,2", "cluster.snapshot=true,false"]
    assert run.sweep(compose_points([*typed, *axes])) == 0
    scripts = capsys.readouterr().out.split("#!/bin/bash")[1:]
    assert len(scripts) == 4 and all("--array=0-1%" in each for each in scripts)
    assert sorted(("export ALGO=Ring" in each, "--code" in each) for each in scripts) == [
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    ]


def test_equal_jobs_are_one_point(tmp_path: Path) -> None:
    typed = ["cluster.ranks=2", "cluster.device=cpu", "training.global_batch_size=4", f"runs_dir={tmp_path}"]
    [(point, _)] = unique_points(compose_points([*typed, "parallelism.dp_shard=2,-1"]))
    assert "parallelism.dp_shard=2" in point.overrides


def test_labels_added_to_the_command_count_nothing_twice(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    for more in ([], ["cluster.wait=true"], ["++cluster.env.A=b"]):
        points = [Point(n, tmp_path / n, [f"training.seed={n}", *more]) for n in ("1", "2")]
        skipped = [Skipped([f"parallelism.tp={n}", *more], "cannot be") for n in (3, 5)]
        registry.add(points, skipped)
        assert len(registry.points()) == len(registry.skipped()) == 2
    # A file with duplicates is read too.
    rows = [
        {"skipped": "no", "overrides": ["parallelism.tp=3", *more]} for more in ([], ["cluster.wait=true"])
    ]
    (tmp_path / "sweep.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert registry.skipped() == [Skipped(["parallelism.tp=3"], "no")]
    assert labels([["training.seed=1"], ["training.seed=2", "cluster.wait=true"]]) == [
        "training.seed=1",
        "training.seed=2",
    ]
    assert labels([["a=1", "cluster.ranks=1"], ["a=2", "cluster.ranks=2"]]) == [
        "a=1 cluster.ranks=1",
        "a=2 cluster.ranks=2",
    ]


def test_a_point_that_never_began_gets_the_labels_of_the_last_command(tmp_path: Path) -> None:
    common = ["cluster=slurm", f"runs_dir={tmp_path}", "training.global_batch_size=8"]
    before, now = (compose_job([*common, f"cluster.time={time}"]) for time in ("1:00:00", "2:00:00"))
    folder = RunFolder(before.run_dir)
    folder.plan(before, [])
    folder.plan(now, ["cluster.time=2:00:00"])
    assert Point("", folder.path, []).job.cluster.time == "2:00:00"
    folder.set_status("submitted")
    folder.plan(before, [])
    assert Point("", folder.path, []).job.cluster.time == "2:00:00"


def test_a_job_in_the_queue_is_quoted_as_it_was_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["cluster=slurm", f"runs_dir={tmp_path}", "training.global_batch_size=8", "name=n"]
    before = compose_job([*common, "cluster.time=1:00:00"])
    folder = RunFolder(before.run_dir)
    folder.plan(before, [])
    SlurmJobRecord("n.x", None, "5").write(folder.path)
    monkeypatch.setattr(submit_module, "queued", lambda _: Queued("5", "n.x", "PENDING", "Priority"))
    now = compose_job([*common, "cluster.time=4:00:00", "cluster.partition=fast"])
    assert submit_module.submit_one(now, folder, []) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line == (
        "n: already submitted (PENDING) as job 5, 1 node x 1 rank, at most 1 GPU-hours; it keeps "
        "no partition, time=60, scancel it first to change that"
    )
