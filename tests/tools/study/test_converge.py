"""harness converge from its command to its report; runs are those of harness.train, in this process."""

import csv
import functools
import json
import sys
import time
from typing import ClassVar

import pytest
from jobs import TINY

from harness.compose.composer import compose_job
from harness.launch.begin import begin
from harness.run.folder import RunFolder
from harness.tools.study import converge as verb
from harness.tools.study.techniques import ConvergeJob, compose_techniques
from harness.train.rank import run_rank
from harness.util.errors import EXIT_INTERRUPTED, EXIT_OK, UserError

JOB = (
    *(*TINY, "model.n_layers=1", "training.steps=12", "training.seq_len=32"),
    *("validation.interval=0", "checkpoint=disabled"),
)
GONE = {"exit_reason": "failed", "error.kind": "node", "error.message": "gone"}
OPTIONS = (
    *("converge.seeds=[1,2]", "converge.smooth_steps=4", "converge.bound=0.1"),
    "converge.only=[bf16,async_tp,recompute_full]",
)


class Sweep:
    """Runs what is missing, like ``harness.launch.sweep.run``; what a job wrote is kept for later tests."""

    written: ClassVar[dict[str, dict[str, bytes]]] = {}

    def __init__(self):
        self.ran = []
        self.stops_after, self.code = 100, EXIT_INTERRUPTED

    def __call__(self, points):
        for point in points:
            folder = RunFolder(point.job.run_dir)
            if folder.state == "completed":
                continue
            if len(self.ran) == self.stops_after:
                return self.code
            begin(folder, point.job, point.overrides)
            self._run(point.job, folder)
            folder.release()
            self.ran.append(folder.path)
        return EXIT_OK

    def _run(self, job, folder):
        if job.id in self.written:
            for name, content in self.written[job.id].items():
                (folder.path / name).write_bytes(content)
            return
        run_rank(job, folder, started=time.monotonic())
        names = ("metrics.jsonl", "result.json")
        self.written[job.id] = {name: (folder.path / name).read_bytes() for name in names}


@pytest.fixture
def sweep(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    made = Sweep()
    monkeypatch.setattr(verb, "sweep", made)
    monkeypatch.setattr(verb, "compose_techniques", lambda _, typed: composed(*typed)[1])
    return made


@functools.cache
def composed(*typed):
    job = compose_job(typed, config_name="converge", schema=ConvergeJob)
    return job, compose_techniques(job, typed)


def converge(runs_dir, *overrides):
    typed = [*JOB, *OPTIONS, f"runs_dir={runs_dir}", "name=c", *overrides]
    done = verb.converge(composed(*typed)[0], typed)
    if isinstance(done, int):
        return done
    sys.stdout.write(f"{done.text}{done.data['report']}")
    return done.code


def rows(runs_dir):
    with (runs_dir / "c" / "converge" / "table.csv").open() as file:
        return {row["technique"]: row for row in csv.DictReader(file)}


def edit_result(run_dir, **changes):
    path = run_dir / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_command(tmp_path, sweep, capsys):
    sweep.stops_after = 3
    assert converge(tmp_path) == EXIT_INTERRUPTED
    assert not (tmp_path / "c" / "converge").exists()
    # The same command again runs what is missing.
    sweep.stops_after = 100
    assert converge(tmp_path) == EXIT_OK
    assert len(sweep.ran) == len(set(sweep.ran)) == 6
    found = rows(tmp_path)
    assert {name: row["verdict"] for name, row in found.items()} == {
        "control": "control",
        "bf16": "equal",
        "recompute_full": "equal",
        "async_tp": "skipped",
    }
    assert found["recompute_full"]["final loss"] == found["control"]["final loss"] != "0"
    assert found["recompute_full"]["final loss difference"] == "0.0"
    assert found["recompute_full"]["final loss interval"] == "+0.00% to +0.00%"
    assert float(found["bf16"]["final loss difference"]) != 0.0
    assert found["bf16"]["gradient norm difference"] == "", (
        "it does not claim the control's numbers"
    )
    assert float(found["recompute_full"]["gradient norm difference"]) == 0.0
    out = capsys.readouterr().out
    assert "Against the control, seeds 1, 2: 2 equal, 1 skipped." in out
    folder = tmp_path / "c" / "converge"
    text = (folder / "tables.md").read_text()
    assert "`harness converge model=llama3_tiny" in text
    # A run that failed decides the verdict, also if the others are equal.
    edit_result(sweep.ran[2], **GONE)
    assert converge(tmp_path) == verb.EXIT_DIFFERS
    row = rows(tmp_path)["bf16"]
    assert (row["verdict"], row["reason"]) == ("failed", "node: gone (1 of 2 runs)")
    # A run that is not over yet leaves the technique incomplete.
    (sweep.ran[2] / "result.json").unlink()
    assert converge(tmp_path) == verb.EXIT_DIFFERS
    assert rows(tmp_path)["bf16"]["verdict"] == "incomplete"


def test_runs_that_failed(tmp_path, sweep):
    """No verdict for seeds without a control."""
    only = "converge.only=[bf16,recompute_full]"
    assert converge(tmp_path, only) == EXIT_OK
    sweep.stops_after, sweep.code = len(sweep.ran), 1
    kept = (sweep.ran[0] / "result.json").read_text()
    edit_result(sweep.ran[0], **GONE)
    assert converge(tmp_path, only) == verb.EXIT_DIFFERS
    found = rows(tmp_path)
    unpaired = ("incomplete", "the control has no curve of this seed (1 of 2 runs)", "1")
    assert {name: (row["verdict"], row["reason"], row["seeds"]) for name, row in found.items()} == {
        "control": ("failed", "node: gone (1 of 2 runs)", "1"),
        **dict.fromkeys(("bf16", "recompute_full"), unpaired),
    }
    assert found["bf16"]["final loss interval"] == "", "one seed has no interval"
    (sweep.ran[0] / "result.json").write_text(kept)
    metrics = sweep.ran[2] / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(line | {"loss": "nan"}) + "\n" for line in lines))
    assert converge(tmp_path, only) == verb.EXIT_DIFFERS
    assert {name: (row["verdict"], row["reason"]) for name, row in rows(tmp_path).items()} == {
        "control": ("control", ""),
        "bf16": ("failed", "a loss is not finite (1 of 2 runs)"),
        "recompute_full": ("equal", ""),
    }


def test_failed_control(tmp_path, sweep):
    sweep.stops_after = 1
    assert converge(tmp_path, "converge.seeds=[1]") == EXIT_INTERRUPTED
    edit_result(sweep.ran[0], **GONE)
    sweep.code = 1
    with pytest.raises(UserError, match=r"the control failed: node: gone"):
        converge(tmp_path, "converge.seeds=[1]")


def test_nothing_has_run(tmp_path, sweep, capsys):
    """On SLURM the command returns before the runs have ended."""
    sweep.stops_after, sweep.code = 0, EXIT_OK
    assert converge(tmp_path) == EXIT_OK
    shown = capsys.readouterr()
    assert shown.out == "None" and "no run of the control has ended" in shown.err
