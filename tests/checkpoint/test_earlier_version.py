"""A run folder and a checkpoint that commit e6bc5cb wrote are read today.

``run_e6bc5cb.tar.gz`` is the run of its overrides.txt on two ranks, without the checkpoint of the last step.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import jobs
import pytest
from local_runs import Run

from harness.launch.rows import load
from harness.run.folder import RunFolder

ARCHIVE = Path(__file__).parent / "run_e6bc5cb.tar.gz"
RUN = "7bd788310b19"


def test_its_row_is_reported_and_its_checkpoint_continued_on_another_layout(tmp_path: Path) -> None:
    """Losses after the checkpoint are those of the run that wrote it."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path / "earlier", filter="data")
    earlier = Run(RunFolder(tmp_path / "earlier" / RUN))
    [row] = load(earlier.path.parent)
    assert (row["state"], row["step"], row["world_size"], row["id"]) == ("completed", 4, 2, RUN)
    assert row["loss"] == pytest.approx(6.253406, abs=1e-6)
    assert earlier.checkpoints.find(2).step == 2
    typed = (earlier.path / "overrides.txt").read_text().splitlines()
    typed = [line for line in typed if not line.startswith(("parallelism", "runs_dir", "checkpoint"))]
    path = f"checkpoint.initial_load_path={earlier.step(2)}"
    whole = "checkpoint.initial_load_model_only=false"
    done = jobs.train(tmp_path, *typed, "parallelism=single", path, whole)
    assert done.code == 0
    today = Run(done.folder).losses
    assert sorted(today) == [3, 4]
    assert today == pytest.approx({step: earlier.losses[step] for step in today}, rel=1e-5)
