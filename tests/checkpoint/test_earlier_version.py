"""A run folder and a checkpoint that commit e6bc5cb wrote are read today.

``run_e6bc5cb.tar.gz`` is the run of its overrides.txt on two ranks, without the checkpoint of the last step.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import jobs
import pytest

from harness.checkpoint.catalog import open_checkpoint
from harness.launch.rows import load

ARCHIVE = Path(__file__).parent / "run_e6bc5cb.tar.gz"
RUN = "7bd788310b19"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path / "earlier", filter="data")
    return tmp_path / "earlier" / RUN


def test_its_row_is_reported(run: Path) -> None:
    [row] = load(run.parent)
    assert (row["state"], row["step"], row["world_size"], row["id"]) == ("completed", 4, 2, RUN)
    assert row["loss"] == pytest.approx(6.253406, abs=1e-6)


def test_its_checkpoint_is_continued_on_another_layout(run: Path, tmp_path: Path) -> None:
    """Losses after the checkpoint are those of the run that wrote it."""
    checkpoint = run / "checkpoints" / "step-2"
    assert open_checkpoint(str(checkpoint)).step == 2
    overrides = [
        line
        for line in (run / "overrides.txt").read_text().splitlines()
        if not line.startswith(("parallelism", "runs_dir", "checkpoint"))
    ]
    done = jobs.train(
        tmp_path,
        *overrides,
        "parallelism=single",
        f"checkpoint.initial_load_path={checkpoint}",
        "checkpoint.initial_load_model_only=false",
    )
    assert done.code == 0
    earlier, today = (
        {row["step"]: row["loss"] for row in map(json.loads, path.read_text().splitlines()) if "loss" in row}
        for path in (run / "metrics.jsonl", done.folder.path / "metrics.jsonl")
    )
    assert sorted(today) == [3, 4]
    assert today == pytest.approx({step: earlier[step] for step in today}, rel=1e-5)
