"""A short part of experiments/checkpoint: killed runs, and damage to the checkpoints of one rank."""

from __future__ import annotations

import contextlib
import io
import math
import random
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from tiers import rest_is_thorough

from harness.compose.composer import compose_job
from harness.launch.begin import begin
from harness.launch.local import launch
from harness.run.folder import RunFolder
from harness.util.errors import HarnessError

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "checkpoint"))

import attempts
import bench
import damages
import faults
import soak


@pytest.mark.parametrize("mode", rest_is_thorough(["sync", "async"], "sync"))
def test_killed_and_resumed_is_the_run_that_was_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    layout = "fsdp 2"
    monkeypatch.setitem(attempts.LAYOUTS, layout, ["parallelism=fsdp", "parallelism.dp_shard=2"])
    draw = random.Random("inside saving" if mode == "sync" else "2")
    inside_saving = [soak.Kill("saving", fraction=1.0, ordinal=2, delay=0.0, victim="all")]
    kills = inside_saving if mode == "sync" else soak.draw_kills(draw)[:1]
    reference = soak.make_reference(tmp_path / "reference", layout, mode)
    report = soak.Soak(tmp_path / mode, layout, mode, reference).run(kills, draw)
    assert report.problems == [] and len(report.kills) == 1
    if mode == "sync":
        assert report.kills == [("saving", "all")]
        assert (report.half_written, report.named, report.lost) == (1, 1, [soak.INTERVAL])


def test_a_run_that_differs_is_found(tmp_path: Path) -> None:
    """The comparison fails for one changed bit of a loss, a missing row, or a repeated row."""
    rows = [(step, 5.0 + step) for step in range(1, 4)]
    other = [*rows[:-1], (3, math.nextafter(8.0, 9.0))]
    for found in (other, rows[:-1], [*rows, rows[-1]]):
        assert soak._difference(found, rows)
    assert soak._difference(rows, rows) == ""
    report = soak.Report("fsdp 4", "sync", kills=[("saving", "all")], problems=["other losses"])
    assert "**no**: 1 of 1" in soak.table([report]) and "other losses" in soak.document([report], 0, 1, 1.0)


def run_here(folder: Path, overrides: Iterable[str], patch: str = "") -> attempts.Ended:
    """Run the command of a single rank in this process."""
    assert not patch
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            typed = list(overrides)
            job = compose_job([*typed, f"runs_dir={folder}/runs"])
            run_folder = RunFolder(job.run_dir)
            begin(run_folder, job, typed, adopt=True)
            code = launch(job, run_folder)
        except HarnessError as error:
            said.write(f"error: {error}\n")
            code = error.exit_code
    return attempts.Ended(code, said.getvalue())


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> bench.Faults:
    """A finished run; faults are injected into its copies."""
    return bench.Faults(tmp_path_factory.mktemp("faults"), run_here)


CHEAP = {
    fault.name: fault
    for fault in (*damages.DAMAGES, *damages.NOWHERE, *faults.PURGE)
    if fault.ranks == 1 and not fault.needs_processes
}
# Other places of a flipped bit, other manifests that cannot be read, and other foreign files.
ALIKE = {
    "bit flipped in optimizer state",
    "bit flipped in random states",
    "first bit of a data file flipped",
    "manifest empty",
    "manifest overwritten with other JSON",
    "step folder empty",
    "a bit flipped in all",
    "a copy called `backup-of-step-12` beside it",
}


@pytest.mark.parametrize("name", rest_is_thorough(CHEAP, *(CHEAP.keys() - ALIKE)))
def test_damage_is_reported_and_costs_the_expected_steps(copies: bench.Faults, name: str) -> None:
    assert copies.happen(CHEAP[name]).bench.problems == []


def test_an_unreported_fault_is_found(copies: bench.Faults) -> None:
    """The check fails if another step or other words are expected for the same damage."""
    inject = damages.flip_entry(damages.WEIGHT)
    for wrong in (
        damages.damage("wrong step", inject, 8, "cannot be used"),
        damages.damage("silence", inject, 6),
    ):
        assert copies.happen(wrong).bench.problems
