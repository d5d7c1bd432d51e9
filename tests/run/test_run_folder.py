"""The run folder: one attempt at a time, no files lost, the cause of a failure recorded."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import tiny

from harness.config.job import Job
from harness.launch.begin import begin
from harness.metrics.jsonl import MetricsFile
from harness.run.folder import RESERVE, RunFolder
from harness.train.finish import finish_run
from harness.util.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_MACHINE,
    EXIT_NON_FINITE,
    EXIT_USER,
    DataError,
    MachineError,
    NonFiniteError,
    UserError,
)


@pytest.fixture(scope="module")
def job() -> Job:
    return tiny()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def test_a_begun_folder_is_enough_to_run_the_job(folder: RunFolder, job: Job) -> None:
    begin(folder, job, ["a=1", "b=2"])
    assert Job.from_json((folder.path / "job.json").read_text()) == job
    assert (folder.path / "overrides.txt").read_text() == "a=1\nb=2\n"
    assert json.loads((folder.path / "code.json").read_text())["versions"]["python"]
    assert json.loads((folder.path / "status.json").read_text())["state"] == "starting"


def test_an_earlier_attempt_is_put_away_whole_and_only_one_runs(folder: RunFolder, job: Job) -> None:
    begin(folder, job, ["first=1"])
    folder.record_error(0, ValueError("of the first"))
    folder.write_result(job, "failed", EXIT_BUG, {"step": 3})
    before = {p.relative_to(folder.path): p.read_bytes() for p in folder.path.rglob("*") if p.is_file()}
    other = RunFolder(folder.path)
    with pytest.raises(UserError, match="already running"):
        begin(other, job, [])
    folder.release()
    begin(other, job, ["second=2"])
    assert other.first_error() is None and not other.has_result
    for name, content in before.items():
        if name.name != ".lock":
            assert (folder.path / "attempts" / "1" / name).read_bytes() == content
    other.release()
    begin(folder, job, [])
    assert (folder.path / "attempts" / "2" / "overrides.txt").read_text() == "second=2\n"


def test_the_lock_ends_with_its_holder_however_that_ends(folder: RunFolder, job: Job) -> None:
    folder.path.mkdir()
    (folder.path / "job.json").write_text(job.to_json())
    code = (
        "import os, sys; from pathlib import Path; from harness.config.job import Job;"
        "from harness.launch.begin import begin; from harness.run.folder import RunFolder;"
        "path = Path(sys.argv[1]); job = Job.from_json((path / 'job.json').read_text());"
        "folder = RunFolder(path); begin(folder, job, []); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder.path)]).returncode == -9
    assert json.loads((folder.path / "status.json").read_text())["state"] == "starting"
    begin(folder, job, [])


@pytest.mark.parametrize("pid_started", [1, None])
def test_a_status_counts_only_while_its_process_lives(
    folder: RunFolder, job: Job, pid_started: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.run.folder.LEAVING_SECONDS", 0.2)
    folder.path.mkdir()
    status = {"state": "running", "host": socket.gethostname(), "pid": os.getppid()}
    (folder.path / "status.json").write_text(json.dumps({**status, "pid_started": pid_started}))
    if pid_started is None:  # start time unknown: assume that the living process wrote it
        with pytest.raises(UserError, match=f"already running .pid {os.getppid()}"):
            begin(folder, job, [])
    else:  # another start time: another process has the id now
        begin(folder, job, [])


def test_a_folder_that_cannot_be_written_is_the_users_error(tmp_path: Path, job: Job) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the run folder"):
        begin(RunFolder(tmp_path / "file" / "run"), job, [])


def test_the_cause_wins_over_its_consequences_whoever_writes_first(folder: RunFolder) -> None:
    folder.record_error(0, RuntimeError("[tcp/pair.cc] Connection closed by peer [127.0.0.1]:1"))
    folder.record_error(2, RuntimeError("Timed out waiting 2000ms for recv operation to complete"))
    folder.record_error(3, KeyboardInterrupt())
    assert folder.first_error()["rank"] == 2  # type: ignore[index]
    folder.record_error(1, LookupError("the cause"))
    folder.record_error(4, LookupError("a later one"))
    (folder.path / "errors" / "rank5.json").write_text("{broken")
    assert folder.first_error()["rank"] == 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("error", "kind", "exit_code"),
    [
        (DataError("no file"), "user", EXIT_USER),
        (NonFiniteError("nan"), "non_finite", EXIT_NON_FINITE),
        (MachineError("gone"), "machine", EXIT_MACHINE),
        (MemoryError(), "out_of_memory", EXIT_MACHINE),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out_of_memory", EXIT_MACHINE),
        (RuntimeError("Timed out waiting 2000ms for recv operation"), "collective_timeout", EXIT_MACHINE),
        (RuntimeError("Connection reset by peer"), "peer", EXIT_MACHINE),
        (KeyboardInterrupt(), "interrupted", EXIT_INTERRUPTED),
        (ValueError("x"), "bug", EXIT_BUG),
    ],
)
def test_every_error_has_a_kind_and_an_exit_code(
    folder: RunFolder, error: BaseException, kind: str, exit_code: int
) -> None:
    folder.record_error(0, error, step=7)
    row = folder.first_error()
    assert row is not None
    assert (row["kind"], row["exit_code"], row["step"]) == (kind, exit_code, 7)
    assert row["message"]


def test_an_error_that_cannot_be_recorded_is_shown(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.path.mkdir()
    (folder.path / "errors").write_text("in the way")
    folder.record_error(0, LookupError("the original"))
    assert "LookupError: the original" in capsys.readouterr().err


def test_settling_writes_the_row_that_rank_0_could_not(folder: RunFolder, job: Job) -> None:
    begin(folder, job, [])
    with MetricsFile(folder.path / "metrics.jsonl") as metrics:
        metrics.write({"step": 4, "loss": 2.5, "tokens": 64})
        metrics.write({"step": 4, "validation_loss": 3.0})
    folder.record_error(0, MachineError("killed"))
    folder.ensure_result(job, "failed", EXIT_MACHINE)
    row = json.loads((folder.path / "result.json").read_text())
    assert (row["step"], row["loss"], row["tokens"]) == (4, 2.5, 64)
    assert (row["exit_reason"], row["exit_code"], row["error.message"]) == ("failed", EXIT_MACHINE, "killed")


def test_settling_corrects_a_row_that_took_a_consequence_for_the_cause(folder: RunFolder, job: Job) -> None:
    begin(folder, job, [])
    folder.record_error(0, RuntimeError("Connection closed by peer"))
    folder.write_result(job, "failed", EXIT_MACHINE, {"step": 9})
    folder.record_error(1, LookupError("the cause"))
    folder.ensure_result(job, "failed", EXIT_BUG)
    row = json.loads((folder.path / "result.json").read_text())
    assert (row["step"], row["exit_code"]) == (9, EXIT_BUG)
    assert (row["error.rank"], row["error.type"]) == (1, "LookupError")
    folder.ensure_result(job, "interrupted", EXIT_INTERRUPTED)
    row = json.loads((folder.path / "result.json").read_text())
    assert row["exit_reason"] == "interrupted" and not [key for key in row if key.startswith("error.")]
    assert json.loads((folder.path / "status.json").read_text())["state"] == "interrupted"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
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


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)


def test_a_disk_that_gets_full_is_told_in_one_account(
    small_disk: Path, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(small_disk / "run")
    begin(folder, job, [])
    folder.set_status("running")
    with MetricsFile(folder.path / "metrics.jsonl") as file:
        file.write({"step": 1, "loss": 2.5})
    fill(small_disk / "others")
    folder.record_error(0, OSError(errno.ENOSPC, "No space left on device"), step=1)
    assert finish_run(job, folder, EXIT_BUG) == EXIT_MACHINE
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.startswith("error: rank 0 of 1 after step 1: OSError (machine): [Errno 28] No space left")
    assert folder.state == "failed"
    assert (folder.row["exit_code"], folder.row["step"]) == (EXIT_MACHINE, 1)
    assert not (folder.path / RESERVE).exists()


def test_a_disk_that_has_no_room_at_all(
    small_disk: Path, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(small_disk / "run")
    begin(folder, job, [])
    (folder.path / RESERVE).unlink()
    fill(small_disk / "others")
    with pytest.raises(UserError, match=r"cannot write the run folder: .*No space left"):
        begin(RunFolder(small_disk / "another"), job, [])
    folder.record_error(0, OSError(errno.ENOSPC, "No space left on device"), step=1)
    assert finish_run(job, folder, EXIT_BUG) == EXIT_MACHINE
    said = capsys.readouterr().err
    assert "Traceback" not in said and "how the run ended (failed, exit code 3) cannot be written" in said
