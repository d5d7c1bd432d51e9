"""Launching on this machine: how jobs end, by themselves, by signals, by the death of any of their processes.

Every test starts real processes and ends them by real means.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import LONG, TWO_RANKS, Launch, until
from tiers import rest_is_thorough

from harness.config.job import Job
from harness.launch.begin import begin
from harness.run.folder import RunFolder
from harness.util.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_MACHINE,
    EXIT_NON_FINITE,
    EXIT_OK,
    EXIT_RESUMABLE,
    EXIT_USER,
)

Start = Callable[..., Launch]
GONE_SECONDS = 6.0


def patch_rank(rank: int, body: str) -> str:
    """Return source code that makes one rank run ``body`` before the gradients of its third step."""
    return f"""
import os
if os.environ.get("RANK") == "{rank}":
    import sys, time
    import harness.train.engine as engine
    original, calls = engine.Engine.gradients, []
    def gradients(self, *args, **kwargs):
        calls.append(0)
        if len(calls) == 3:
            {body}
        return original(self, *args, **kwargs)
    engine.Engine.gradients = gradients
"""


def test_a_users_error_is_one_line_and_the_same_job_goes_on_in_its_folder(
    launch: Start, tmp_path: Path
) -> None:
    text = tmp_path / "corpus.txt"
    overrides = [
        *TWO_RANKS,
        "data=local_text",
        f"data.paths=[{text}]",
        f"data.cache_dir={tmp_path}/cache",
        "training.steps=2",
    ]
    first = launch(*overrides)
    assert first.finish() == EXIT_USER
    [line] = [each for each in first.err.splitlines() if each]
    assert line.startswith("error: ") and str(text) in line
    row = first.read("result.json")
    assert (row["exit_reason"], row["exit_code"], row["error.kind"]) == ("failed", EXIT_USER, "user")
    assert first.read("status.json")["state"] == "failed"
    assert all(not isinstance(value, dict) for value in row.values())

    text.write_text("To be or not to be, that is the question.\n" * 200)
    second = launch(*overrides)
    assert second.finish() == EXIT_OK, second.err
    assert second.run_dir == first.run_dir
    row = second.read("result.json")
    assert (row["exit_reason"], row["exit_code"], row["step"]) == ("completed", EXIT_OK, 2)
    assert second.read("status.json")["state"] == "completed"
    assert [each["step"] for each in second.rows] == [1, 2]
    earlier = second.run_dir / "attempts" / "1"
    assert json.loads((earlier / "result.json").read_text())["exit_code"] == EXIT_USER
    assert (earlier / "errors").is_dir() and (earlier / "overrides.txt").is_file()


def test_a_bug_in_one_rank_ends_the_others_at_once(launch: Start) -> None:
    # Rank 0 is nowhere near a collective: it cannot notice by itself that rank 1 is gone.
    body = 'time.sleep(600) if os.environ["RANK"] == "0" else exec("raise LookupError(\'broken here\')")'
    job = launch(*TWO_RANKS, *LONG, patch=patch_rank(0, body) + patch_rank(1, body))
    until(lambda: "broken here" in job.err or job.process.poll() is not None, 90)
    assert job.finish() == EXIT_BUG
    assert "Traceback" in job.err and "LookupError: broken here" in job.err
    assert "rank 1 of 2 after step 2" in job.err
    row, error = job.read("result.json"), job.read("errors/rank1.json")
    assert (row["exit_code"], row["error.rank"], row["error.type"]) == (EXIT_BUG, 1, "LookupError")
    status = job.read("status.json")
    assert status["state"] == "failed" and status["time"] - error["time"] < GONE_SECONDS
    assert job.ranks() == {}


@pytest.mark.parametrize("rank", rest_is_thorough([0, 1], 1))
def test_a_killed_rank_is_the_cause_and_not_its_peers(launch: Start, rank: int) -> None:
    job = launch(*TWO_RANKS, *LONG)
    job.wait_for_step()
    os.kill(job.ranks()[rank], signal.SIGKILL)
    killed = time.monotonic()
    assert job.finish() == EXIT_MACHINE
    assert time.monotonic() - killed < GONE_SECONDS
    assert f"rank {rank} ended with signal 9 (SIGKILL)" in job.err and "Traceback" not in job.err
    row = job.read("result.json")
    assert (row["exit_reason"], row["exit_code"], row["error.rank"]) == ("failed", EXIT_MACHINE, rank)
    assert row["step"] >= 5 and row["loss"] > 0
    assert job.read("status.json")["state"] == "failed"
    assert job.ranks() == {}


@pytest.mark.parametrize(("ranks", "named"), [([1], 1), ([0, 1], 0)])
def test_a_rank_that_leaves_with_exit_code_0_has_not_completed(
    launch: Start, ranks: list[int], named: int
) -> None:
    patch = "".join(patch_rank(rank, "os._exit(0)") for rank in ranks)
    job = launch(*TWO_RANKS, *LONG, patch=patch)
    assert job.finish() == EXIT_MACHINE
    assert f"rank {named} ended with exit code 0 in the middle of the run" in job.err
    row = job.read("result.json")
    assert (row["exit_reason"], row["error.rank"], row["error.type"]) == ("failed", named, "RankDied")


@pytest.mark.parametrize("number", rest_is_thorough([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
def test_a_stop_request_ends_all_ranks_at_one_step(launch: Start, number: signal.Signals) -> None:
    job = launch(*TWO_RANKS, *LONG, "metrics.log_interval=1")
    job.wait_for_step()
    if number == signal.SIGINT:
        again = launch(*TWO_RANKS, *LONG)
        assert again.finish() == EXIT_USER
        assert again.err.count("\n") == 1 and "already running" in again.err
        assert again.ranks().keys() == {0, 1}, "the refused launch has ended the running one"
        # As a terminal does: to all processes of the foreground process group.
        os.killpg(job.process.pid, number)
    else:
        job.process.send_signal(number)
    assert job.finish() == EXIT_RESUMABLE
    assert job.ranks() == {} and "Traceback" not in job.err
    row, rows = job.read("result.json"), job.rows
    assert (row["exit_reason"], row["exit_code"]) == ("interrupted", EXIT_RESUMABLE)
    assert row["step"] == rows[-1]["step"] and row["loss"] == rows[-1]["loss"]
    assert (job.run_dir / "metrics.jsonl").read_bytes().endswith(b"\n")
    assert job.read("status.json")["state"] == "interrupted"
    assert not list((job.run_dir / "errors").iterdir())


def test_a_second_interrupt_ends_at_once(launch: Start) -> None:
    job = launch(*TWO_RANKS, *LONG)
    job.wait_for_step()
    os.kill(job.ranks()[1], signal.SIGSTOP)
    job.process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert job.process.poll() is None, "a stuck rank cannot agree on a step"
    job.process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    assert job.finish() == EXIT_INTERRUPTED
    assert time.monotonic() - sent < GONE_SECONDS
    assert job.ranks() == {}
    assert job.read("result.json")["exit_reason"] == "interrupted"


def test_a_stuck_rank_is_found_by_the_timeout_of_a_step(launch: Start) -> None:
    job = launch(*TWO_RANKS, *LONG, "cluster.step_timeout_seconds=4")
    job.wait_for_step()
    os.kill(job.ranks()[1], signal.SIGSTOP)
    assert job.finish() == EXIT_MACHINE
    row = job.read("result.json")
    assert (row["error.kind"], row["error.rank"]) == ("collective_timeout", 0)
    assert row["error.absent_ranks"] == [1], "the stopped rank is absent, not the waiting one"
    # Rank, position and operation.
    assert f"rank 0 of 2 after step {row['step']}" in job.err and "Timed out waiting 4000ms" in job.err
    assert "in harness/" in job.err and "Traceback" not in job.err
    assert job.ranks() == {}


def test_a_killed_controller_leaves_no_orphans_and_a_folder_that_can_be_used(launch: Start) -> None:
    job = launch(*TWO_RANKS, *LONG)
    job.wait_for_step()
    job.process.send_signal(signal.SIGKILL)
    assert until(lambda: job.ranks() == {}, GONE_SECONDS) < GONE_SECONDS
    row = job.read("result.json")
    assert (row["exit_reason"], row["error.type"]) == ("failed", "LauncherGone")
    # The status of a dead controller, whose process id now belongs to another process.
    status = job.read("status.json")
    (job.run_dir / "status.json").write_text(json.dumps({**status, "state": "running", "pid": os.getpid()}))
    again = RunFolder(job.run_dir)
    begin(again, Job.from_json((job.run_dir / "job.json").read_text()), [])
    again.release()
    assert (job.run_dir / "attempts" / "1" / "result.json").is_file()


def test_numbers_gone_wrong_are_one_line_that_says_where_the_evidence_is(launch: Start) -> None:
    job = launch("optimizer.lr=1e38", "schedule=constant", "training.steps=50", "training.max_norm=0")
    assert job.finish() == EXIT_NON_FINITE
    [line] = [each for each in job.err.splitlines() if each]
    assert line.startswith("error: step ") and "evidence in" in line
    assert job.read("result.json")["exit_code"] == EXIT_NON_FINITE
    assert list((job.run_dir / "evidence").glob("*.pt"))


@pytest.mark.thorough
def test_a_lone_rank_stops_as_several_do(launch: Start) -> None:
    job = launch(*LONG)
    job.wait_for_step()
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == EXIT_RESUMABLE
    assert job.read("result.json")["exit_reason"] == "interrupted" and "Traceback" not in job.err


def test_ranks_share_the_cores_unless_the_user_says_otherwise(launch: Start) -> None:
    job = launch(*TWO_RANKS, *LONG, environment={"OMP_NUM_THREADS": "3"})
    until(lambda: len(job.ranks()) == 2, 60)
    for pid in job.ranks().values():
        assert "OMP_NUM_THREADS=3" in Path(f"/proc/{pid}/environ").read_text().split("\0")
    # Before its first step a job has nothing to save: it ends without waiting for one.
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == EXIT_INTERRUPTED
    assert job.read("result.json")["exit_reason"] == "interrupted"
