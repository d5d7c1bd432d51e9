"""``harness runs``: all runs of a folder, the last written first."""

import os
from pathlib import Path

import pytest
from jobs import TINY

from harness.compose.composer import compose_job
from harness.launch.begin import begin
from harness.launch.listing import goodput_in_words
from harness.run.folder import RunFolder
from harness.tools.report.listing import list_runs
from harness.util.errors import UserError


def test_runs_are_listed_newest_first_and_once(tmp_path):
    folders = []
    for seed, age in ((1, 7200), (2, 90)):
        typed = [*TINY, f"runs_dir={tmp_path}", f"training.seed={seed}", "tags=[a,b]", "notes=why"]
        job = compose_job([*typed, "+user.ticket=12"])
        folder = RunFolder(job.run_dir)
        begin(folder, job, typed)
        folder.set_status("completed")
        folder.release()
        for path in folder.path.glob("*.*"):
            os.utime(path, (path.stat().st_mtime - age,) * 2)
        folders.append(folder.path)
    link = tmp_path / folders[0].parent.name / "latest"
    assert link.is_symlink() and link.resolve() == folders[1]
    result = list_runs(tmp_path)
    assert [Path(row["run"]) for row in result.data["runs"]] == folders[::-1]
    newest = result.data["runs"][0]
    shown = {name: newest[name] for name in ("age", "state", "tags", "notes")}
    assert shown == {"age": "2 min", "state": "completed", "tags": ["a", "b"], "notes": "why"}
    assert RunFolder(folders[0]).plain_job["user"] == {"ticket": 12}
    assert result.text.splitlines()[-1] == "2 completed"
    assert len(result.text.splitlines()) == 4
    with pytest.raises(UserError, match="no runs; would work: harness train"):
        list_runs(tmp_path / "nowhere")


def test_goodput_of_all_runs_is_that_of_their_time():
    hour = {"wall_seconds": 3600.0, "train_seconds": 1800.0}
    half = {"wall_seconds": 1800.0, "train_seconds": 1800.0}
    assert goodput_in_words([hour, half, {"loss": 1.0}]) == "goodput 66.7% of 1.5 hours"
    assert goodput_in_words([{"wall_seconds": 60.0, "train_seconds": 30.0}]) == ""
