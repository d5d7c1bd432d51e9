"""The spaces of sweeps/: their descriptions, lists of points, and the time to plan a large one."""

import functools
import itertools
import re
from pathlib import Path

import pytest

from harness.compose.composer import compose_points
from harness.compose.paths import using_folders
from harness.compose.verb import Verb
from harness.config.job import Job
from harness.util.errors import UserError

ROOT = Path(__file__).parents[2]
ROWS = dict(
    re.findall(r"^\| `(\w+)` \| (\d+)", (ROOT / "sweeps" / "README.md").read_text(), re.MULTILINE)
)
SPACES = sorted(path.stem for path in (ROOT / "sweeps").glob("*.yaml") if path.stem != "optuna")


@functools.cache
def jobs_of(space, *overrides):
    """Return the jobs of a space, and the reasons of its skipped points."""
    points = compose_points([f"sweep={space}", *overrides])
    jobs = [each.job for each in points if each.job]
    return jobs, [each.reason for each in points if not each.job]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_every_space_has_a_row_in_the_readme():
    assert sorted(ROWS) == SPACES


@pytest.mark.parametrize("space", SPACES)
def test_a_space_has_the_points_that_its_row_says(space):
    lines = (ROOT / "sweeps" / f"{space}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_" and lines[1].startswith("# ")
    jobs, reasons = jobs_of(space)
    assert len(jobs) + len(reasons) == int(ROWS[space])
    assert len({job.id for job in jobs}) == len(jobs) >= 2, reasons
    assert all(job.name == f"llama3_debug-{space}" for job in jobs)
    if space in ("layouts_8", "pipeline_schedules", "batch_size", "scaling_strong"):
        assert len({job.numerics_id for job in jobs}) == 1, "layouts that compute one thing"


def test_layouts_8_is_every_layout_of_8_ranks():
    jobs, _ = jobs_of("layouts_8", "model=llama3_8b", "training.global_batch_size=64")
    degrees = {tuple(job.parallelism.degrees.values()) for job in jobs}
    every = {
        (pp, replicas, shards, 1, tp)
        for pp, replicas, shards, tp in itertools.product((1, 2, 4, 8), repeat=4)
        if pp * replicas * shards * tp == 8
    }
    assert len(every) == 20
    assert degrees == every


def test_a_point_is_a_job_by_the_command_that_a_report_prints():
    ran = []
    verb = Verb("train", lambda job, _: ran.append(job) or 0, job=Job, sweep=lambda points: 0)
    own = ["data=synthetic", "tokenizer=bytes", "cluster=slurm_cpu"]
    assert verb.run_line([*own, "sweep=degrees", "parallelism.tp=2", "parallelism.pp=1"]) == 0
    listed = ["experiment=ladder/stdlib", "scale.parameters=13k", "training.seed=1"]
    assert verb.run_line([*own, *listed]) == 0 and len(ran) == 2


SPACE = """# @package _global_
# Some points.
name: listed

hydra:
  sweeper:
    params:
      training.seed: 1,2
      points: |
        parallelism.tp=2 training.steps=7

        # a line that says something
        compile=on parallelism.pp=2
"""


@pytest.fixture
def conf(tmp_path):
    """A folder of configurations with a sweep."""
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "listed.yaml").write_text(SPACE)
    with using_folders([tmp_path]):
        yield tmp_path


def facts(*typed):
    jobs = [point.job for point in compose_points(["sweep=listed", *typed])]
    return [
        (
            job.parallelism.tp,
            job.parallelism.pp,
            job.training.steps,
            job.compile.enable,
            job.training.seed,
        )
        for job in jobs
    ]


def test_points_are_listed_axes_multiply_them_and_the_command_line_wins(conf):
    first, second = (2, 1, 7, False), (1, 2, 100, True)
    assert facts() == [(*first, 1), (*first, 2), (*second, 1), (*second, 2)]
    assert facts("training.steps=8,9", "training.seed=3") == [
        (2, 1, 8, False, 3),
        (2, 1, 9, False, 3),
        (1, 2, 8, True, 3),
        (1, 2, 9, True, 3),
    ]
    points = compose_points(["sweep=listed", "training.seed=1", "parallelism.tp=3"])
    assert [point.job for point in points] == [None, None]
    assert all("parallelism.tp=3" in point.reason for point in points)


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("compile=on", "compile=onn", r"compile=onn: no such option; did you mean on\?"),
        (
            "parallelism.pp",
            "parallelism.ppp",
            "parallelism.ppp=2: no such field; did you mean .*pp",
        ),
    ],
)
def test_a_typo_in_a_point_is_named(conf, right, wrong, says):
    (conf / "sweep" / "listed.yaml").write_text(SPACE.replace(right, wrong))
    with pytest.raises(UserError, match=f"^{says}"):
        compose_points(["sweep=listed"])
