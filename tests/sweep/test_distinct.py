"""Duplicate points run once, and points that differ in labels only are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cluster import submit as submit_module
from harness.cluster.queue import Queued
from harness.compose import compose_job, compose_points
from harness.errors import UserError
from harness.run.folder import RunFolder
from harness.run.slurm_record import SlurmJobRecord
from harness.sweep import run
from harness.sweep.distinct import unique_points
from harness.sweep.registry import Point, Registry, Skipped, labels


@pytest.mark.parametrize(
    ("axis", "field"),
    [
        ("cluster.env.NCCL_ALGO=Ring,Tree", "cluster.env.NCCL_ALGO"),
        ("cluster.threads_per_rank=1,2", "cluster.threads_per_rank"),
        ("cluster.partition=a,b", "cluster.partition"),
        ("metrics.log_interval=1,2", "metrics.log_interval"),
    ],
)
def test_labels_make_no_second_run(axis: str, field: str, tmp_path: Path) -> None:
    typed = ["name=n", f"runs_dir={tmp_path}", "training.seed=1,2", axis]
    first, _, second = axis.partition("=")[2].partition(",")
    works = f"name=n-${{{field}}}"
    with pytest.raises(UserError) as caught:
        run.sweep(compose_points(typed))
    assert str(caught.value).startswith(
        f"{field}: labels do not change the run folder, so {field}={first} and "
    )
    assert str(caught.value).endswith(f"would work: '{works}', a folder for each")
    assert f"{field}={second} would share {tmp_path}/n/" in str(caught.value)
    assert not list(tmp_path.iterdir())
    # The suggested value works: four run folders, with different names in every table.
    found = unique_points(compose_points([*typed[1:], works]))
    assert len({point.run_dir for point, _ in found}) == 4
    registry = Registry(tmp_path)
    registry.add([point for point, _ in found], [])
    assert len(registry.points()) == 4
    assert len(set(labels([point.overrides for point in registry.points()]))) == 4


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
