"""The run folder: one attempt at a time, no files lost, the cause of a failure and absent ranks recorded."""

import contextlib
import errno
import json
import math
import os
import socket
import subprocess
import time
from contextlib import closing

import pytest
import yaml
from jobs import tiny
from one_line import one_line

from harness.launch.begin import begin
from harness.metrics.jsonl import MetricsFile
from harness.run.folder import RunFolder
from harness.run.record import RunRecord
from harness.run.result import (
    git_commit,
    write_json_atomically,
    write_result,
)
from harness.train.finish import absent_ranks, finish_run
from harness.util import files
from harness.util.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_MACHINE,
    MachineError,
    UserError,
)

ERROR = {"rank": 0, "time": 100.0}


@pytest.fixture(scope="module")
def job():
    return tiny()


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


def test_a_begun_folder_describes_the_job_and_an_earlier_attempt_is_put_away_whole(folder, job):
    begin(folder, job, ["a=1", "b=2"])
    assert (folder.read_job(), folder.state) == (job, "starting")
    assert (folder.path / "overrides.txt").read_text() == "a=1\nb=2\n"
    assert json.loads((folder.path / "code.json").read_text())["versions"]["python"]
    folder.errors.record(0, ValueError("of the first"))
    RunRecord(job, folder).end("failed", EXIT_BUG, {"step": 3})
    before = {
        p.relative_to(folder.path): p.read_bytes() for p in folder.path.rglob("*") if p.is_file()
    }
    other = RunFolder(folder.path)
    with one_line(UserError, "already running"):
        begin(other, job, [])
    folder.release()
    begin(other, job, ["second=2"])
    assert other.errors.first() is None and not other.has_result
    for name, content in before.items():
        if name.name != ".lock":
            assert (folder.path / "attempts" / "1" / name).read_bytes() == content
    other.release()
    begin(folder, job, [])
    assert (folder.path / "attempts" / "2" / "overrides.txt").read_text() == "second=2\n"


@pytest.mark.parametrize("pid_started", [1, None])
def test_a_status_counts_only_while_its_process_lives(folder, job, pid_started, monkeypatch):
    monkeypatch.setattr("harness.run.folder.LEAVING_SECONDS", 0.2)
    folder.path.mkdir()
    status = {"state": "running", "host": socket.gethostname(), "pid": os.getppid()}
    (folder.path / "status.json").write_text(json.dumps({**status, "pid_started": pid_started}))
    if pid_started is None:  # start time unknown: assume that the living process wrote it
        with one_line(UserError, f"already running .pid {os.getppid()}"):
            begin(folder, job, [])
    else:  # another start time: another process has the id now
        begin(folder, job, [])


def test_a_folder_that_cannot_be_written_is_the_users_error(tmp_path, job):
    (tmp_path / "file").write_text("")
    with one_line(UserError, "cannot write the run folder"):
        begin(RunFolder(tmp_path / "file" / "run"), job, [])


def test_the_cause_wins_over_its_consequences_whoever_writes_first(folder):
    folder.errors.record(0, RuntimeError("[tcp/pair.cc] Connection closed by peer [127.0.0.1]:1"))
    folder.errors.record(2, RuntimeError("Timed out waiting 2000ms for recv operation to complete"))
    folder.errors.record(3, KeyboardInterrupt())
    assert folder.errors.first()["rank"] == 2
    folder.errors.record(1, LookupError("the cause"))
    folder.errors.record(4, LookupError("a later one"))
    (folder.path / "errors" / "rank5.json").write_text("{broken")
    assert folder.errors.first()["rank"] == 1


def test_an_unrecorded_error_is_shown(folder, capsys):
    folder.path.mkdir()
    (folder.path / "errors").write_text("in the way")
    folder.errors.record(0, LookupError("the original"))
    assert "LookupError: the original" in capsys.readouterr().err


def test_a_result_is_waited_for_until_it_is_there(folder, job, monkeypatch):
    begin(folder, job, [])
    polls = []

    def sleep(seconds):
        polls.append(seconds)
        if len(polls) == 3:
            RunRecord(job, folder).end("completed", 0, {})

    monkeypatch.setattr(time, "sleep", sleep)
    folder.wait_for_result(0)
    assert polls == []
    folder.wait_for_result(600)
    assert len(polls) == 3
    folder.wait_for_result(600)
    assert len(polls) == 3


def test_settling_writes_the_row_that_rank_0_could_not(folder, job):
    begin(folder, job, [])
    with closing(MetricsFile(folder.path / "metrics.jsonl")) as metrics:
        metrics.write({"step": 4, "loss": 2.5, "tokens": 64})
        metrics.write({"step": 4, "validation_loss": 3.0})
    assert folder.errors.record(0, MachineError("killed"), step=4)["step"] == 4
    RunRecord(job, folder).end("failed", EXIT_MACHINE)
    row = json.loads((folder.path / "result.json").read_text())
    assert (row["step"], row["loss"], row["tokens"]) == (4, 2.5, 64)
    assert (row["exit_reason"], row["exit_code"], row["error.message"]) == (
        "failed",
        EXIT_MACHINE,
        "killed",
    )


def test_settling_corrects_a_row_that_took_a_consequence_for_the_cause(folder, job):
    begin(folder, job, [])
    folder.errors.record(0, RuntimeError("Connection closed by peer"))
    RunRecord(job, folder).end("failed", EXIT_MACHINE, {"step": 9})
    folder.errors.record(1, LookupError("the cause"))
    RunRecord(job, folder).end("failed", EXIT_BUG)
    row = json.loads((folder.path / "result.json").read_text())
    assert (row["step"], row["exit_code"]) == (9, EXIT_BUG)
    assert (row["error.rank"], row["error.type"]) == (1, "LookupError")
    RunRecord(job, folder).end("interrupted", EXIT_INTERRUPTED)
    row = json.loads((folder.path / "result.json").read_text())
    assert row["exit_reason"] == "interrupted" and not [
        key for key in row if key.startswith("error.")
    ]
    assert json.loads((folder.path / "status.json").read_text())["state"] == "interrupted"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    path = tmp_path / "small"
    path.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    try:
        subprocess.run(mounting, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a file system takes root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def fill(path):
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)


def test_a_full_disk(small_disk, job, capsys):
    folder = RunFolder(small_disk / "run")
    begin(folder, job, [])
    fill(small_disk / "others")
    with one_line(UserError, r"cannot write the run folder: .*No space left"):
        begin(RunFolder(small_disk / "another"), job, [])
    folder.errors.record(0, OSError(errno.ENOSPC, "No space left on device"), step=1)
    assert finish_run(job, folder, EXIT_BUG) == EXIT_MACHINE
    said = capsys.readouterr().err
    assert (
        "Traceback" not in said
        and "how the run ended (failed, exit code 3) cannot be written" in said
    )


def git(folder, *arguments):
    who = ("-c", "user.name=A", "-c", "user.email=a@b.c")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def test_result_is_one_flat_row(tmp_path):
    row = {
        "exit": "done",
        "job": {"training": {"steps": 3}, "empty": {}},
        "tags": ["a"],
        "loss": math.nan,
    }
    path = write_result(tmp_path, {**row, "run_dir": tmp_path})
    assert json.loads(path.read_text()) == {
        "exit": "done",
        "job.training.steps": 3,
        "tags": ["a"],
        "loss": "nan",
        "run_dir": str(tmp_path),
    }


def test_a_crash_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    write_json_atomically(path, {"state": "old"})

    def fail(handle):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_json_atomically(path, {"state": "new"})
    assert json.loads(path.read_text()) == {"state": "old"}
    assert os.listdir(tmp_path) == ["status.json"]


def test_git_commit(tmp_path):
    nothing = {"commit": None, "dirty": None}
    assert git_commit(tmp_path / "missing") == nothing
    git(tmp_path, "init")
    assert git_commit(tmp_path) == nothing
    (tmp_path / ".gitignore").write_text("ignored/\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    clean = git_commit(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "new.py").write_text("y = 2\n")
    assert git_commit(tmp_path) == {**clean, "dirty": True}
    (tmp_path / "ignored").mkdir()
    assert git_commit(tmp_path / "ignored") == nothing


# What ranks say of their positions, and which are absent. A group has the ranks 0 and 1, unless they say so.
CASES = yaml.safe_load("""
one is behind:
    0: {group: a, begun: {a: 7}}
    1: {group: a, begun: {a: 6}}
    absent: [1]
one is stopped and wrote nothing:
    0: {group: a, begun: {a: 7}}
    absent: [1]
one was continued when the other had failed:
    0: {group: a, begun: {a: 7}}
    1: {group: a, begun: {a: 7}, late: true}
    absent: [1]
the node of one has another clock:
    0: {group: a, begun: {a: 7}, members: [0, 1, 2]}
    1: {group: a, begun: {a: 6}, members: [0, 1, 2]}
    2: {group: a, begun: {a: 7}, members: [0, 1, 2], time: 105.0}
    absent: [1]
one waits for the other, which waits for a third:
    0: {group: a, begun: {a: 7}}
    1: {group: b, begun: {a: 6, b: 3}, members: [1, 2]}
    2: {group: b, begun: {b: 2}, members: [1, 2]}
    absent: [2]
none is missing:
    0: {group: a, begun: {a: 7}}
    1: {group: a, begun: {a: 7}}
    absent: []
two are missing:
    0: {group: a, begun: {a: 7}, members: [0, 1, 2, 3]}
    2: {group: a, begun: {a: 7}, members: [0, 1, 2, 3]}
    absent: [1, 3]
no positions: {absent: []}
the position was written after the timeout:
    0: {group: a, begun: {a: 7}, timed_out: true}
    absent: []
all were stopped:
    0: {group: a, begun: {a: 7}, late: true}
    1: {group: a, begun: {a: 7}, late: true}
    absent: []
""")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_absent_ranks(case, tmp_path):
    folder = tmp_path / "flight_recorder"
    folder.mkdir()
    *ranks, _ = case
    for rank in ranks:
        own = case[rank]
        place = {
            "rank": rank,
            "members": [0, 1],
            "time": 90.0,
            "number": own["begun"][own["group"]],
        }
        (folder / f"place-rank{rank}.json").write_text(json.dumps(place | own))
    assert absent_ranks(tmp_path, ERROR) == case["absent"]
