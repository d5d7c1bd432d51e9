"""The spaces of sweeps/: their descriptions in the README, and the time to plan a large one."""

from __future__ import annotations

import functools
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.compose.composer import compose_points
from harness.compose.verb import Verb
from harness.config.job import Job
from harness.util.errors import UserError

ROOT = Path(__file__).parents[2]
ROWS = dict(re.findall(r"^\| `(\w+)` \| (\d+)", (ROOT / "sweeps" / "README.md").read_text(), re.MULTILINE))
SPACES = sorted(path.stem for path in (ROOT / "sweeps").glob("*.yaml") if path.stem != "optuna")


@functools.cache
def jobs_of(space: str, *overrides: str) -> tuple[list[Job], list[str]]:
    """Return the jobs of a space, and the reasons of its skipped points."""
    points = compose_points([f"sweep={space}", *overrides])
    return [each.job for each in points if each.job], [each.reason for each in points if not each.job]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_every_space_has_a_row_and_a_comment() -> None:
    assert sorted(ROWS) == SPACES
    for space in SPACES:
        lines = (ROOT / "sweeps" / f"{space}.yaml").read_text().splitlines()
        assert lines[0] == "# @package _global_" and lines[1].startswith("# "), space


@pytest.mark.parametrize("space", SPACES)
def test_a_space_has_the_points_that_its_row_says(space: str) -> None:
    jobs, reasons = jobs_of(space)
    assert len(jobs) + len(reasons) == int(ROWS[space])
    assert len({job.id for job in jobs}) == len(jobs) >= 2, reasons
    assert all(job.name == f"llama3_debug-{space}" for job in jobs)


def test_layouts_8_is_every_layout_of_8_ranks() -> None:
    jobs, _ = jobs_of("layouts_8", "model=llama3_8b", "training.global_batch_size=64")
    degrees = {tuple(job.parallelism.degrees.values()) for job in jobs}
    every = {
        (pp, replicas, shards, 1, tp)
        for pp, replicas, shards, tp in itertools.product((1, 2, 4, 8), repeat=4)
        if pp * replicas * shards * tp == 8
    }
    assert len(every) == 20
    assert degrees == every


@pytest.mark.parametrize("space", ["layouts_8", "pipeline_schedules", "batch_size", "scaling_strong"])
def test_spaces_of_layouts_compute_one_thing(space: str) -> None:
    jobs, _ = jobs_of(space)
    assert len({job.numerics_id for job in jobs}) == 1


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            "sweep=degrees",
            "sweep=degrees: has several points (parallelism.tp, parallelism.pp); would work: -m",
        ),
        ("sweep=degrees parallelism.tp=2", "sweep=degrees: has several points (parallelism.pp)"),
        ("experiment=ladder/stdlib", "experiment=ladder/stdlib: has several points (points)"),
        ("sweep=degrees parallelism.tp=2 parallelism.pp=1", ""),
        ("experiment=ladder/stdlib scale.parameters=13k training.seed=1", ""),
    ],
)
def test_a_space_is_no_job(
    typed: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A single point is a job, by the command that a report prints for it."""
    given = ["data=synthetic", "tokenizer=bytes", "cluster=slurm_cpu", *typed.split()]
    monkeypatch.setattr(sys, "argv", ["train", *given])
    ran: list[Job] = []

    def verb(job: Job, _: list[str]) -> int:
        ran.append(job)
        return 0

    with pytest.raises(SystemExit) as ended:
        Verb("train", verb, job=Job, sweep=lambda points: 0).main()
    assert ended.value.code == (2 if message else 0)
    assert len(ran) == (0 if message else 1)
    assert capsys.readouterr().err.startswith(f"error: {message}" if message else "")


def test_a_mistake_in_every_point_is_one_mistake() -> None:
    for typed in (["training.sed=1,2"], ["training.seed=1,2", "model=llama9"], ["training.seed=choice(1"]):
        with pytest.raises(UserError):
            compose_points(typed)


def test_two_hundred_points_are_planned(tmp_path: Path) -> None:
    typed = [
        *("model=llama3_8b", "cluster=slurm_h100", "cluster.dry_run=true", "name=many", "runs_dir=runs"),
        *("training.global_batch_size=1024", "parallelism.dp_shard=-1", "cluster.nodes=4"),
        *("parallelism.tp=1,2,4,8,16", "parallelism.pp=1,2,4,8", "training.seed=1,2,3,4,5,6,7,8,9,10"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "harness.train", "-m", *typed],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("runs/many: 200 points, 150 to run\n  150 x 4 nodes x 8 ranks\n")
    assert "at most 4800 GPU-hours (H100 SXM)" in done.stderr
    assert "50 skipped" in done.stderr
    assert "#SBATCH --array=0-149%16" in done.stdout
    assert not (tmp_path / "runs" / "many").exists()
