"""Sweeps with a list of points: one per line under ``hydra.sweeper.params.points``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from omegaconf import DictConfig

from harness.compose.composer import compose_job, compose_points
from harness.compose.paths import using_folders
from harness.util.errors import UserError

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
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of configurations with a sweep."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "listed.yaml").write_text(SPACE)
    with using_folders([tmp_path]):
        yield tmp_path


def facts(*typed: str) -> list[tuple[int, int, int, bool, int]]:
    jobs = [point.job for point in compose_points(["sweep=listed", *typed])]
    return [
        (job.parallelism.tp, job.parallelism.pp, job.training.steps, job.compile.enable, job.training.seed)
        for job in jobs
    ]


def test_points_are_listed_and_axes_multiply_them(conf: Path) -> None:
    assert facts() == [
        (2, 1, 7, False, 1),
        (2, 1, 7, False, 2),
        (1, 2, 100, True, 1),
        (1, 2, 100, True, 2),
    ]


def test_options_are_neither_composed_nor_copied_for_each_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    axes = ["model=llama3_tiny,qwen3_debug", "optimizer=adamw", "schedule=cosine,linear", "compile=on,off"]
    axes = [*axes, "training.seed=3,4", "data=synthetic", "tokenizer=bytes"]
    compose_points(axes)
    copied = DictConfig.__deepcopy__
    with mock.patch.object(DictConfig, "__deepcopy__", autospec=True, side_effect=copied) as asked:
        points = compose_points(axes)
    # A complete config has more than twenty nodes. Its root and training, where a value is set, are copied.
    assert asked.call_count < 5 * len(points)
    assert len(points) == 16
    assert all(point.job == compose_job(point.overrides) for point in points)


def test_the_command_line_wins_and_can_be_an_axis(conf: Path) -> None:
    assert facts("training.steps=8,9", "training.seed=3") == [
        (2, 1, 8, False, 3),
        (2, 1, 9, False, 3),
        (1, 2, 8, True, 3),
        (1, 2, 9, True, 3),
    ]


def test_a_typo_in_a_point_is_named(conf: Path) -> None:
    path = conf / "sweep" / "listed.yaml"
    path.write_text(SPACE.replace("compile=on", "compile=onn"))
    with pytest.raises(UserError, match=r"^compile=onn: no such option; did you mean on\?"):
        compose_points(["sweep=listed"])
    path.write_text(SPACE.replace("parallelism.pp", "parallelism.ppp"))
    with pytest.raises(UserError, match=r"^parallelism.ppp=2: no such field; did you mean parallelism.pp"):
        compose_points(["sweep=listed"])


def test_an_invalid_point_has_a_reason(conf: Path) -> None:
    points = compose_points(["sweep=listed", "training.seed=1", "parallelism.tp=3"])
    assert [point.job for point in points] == [None, None]
    assert all("parallelism.tp=3" in point.reason for point in points)
