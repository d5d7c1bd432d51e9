"""``torchrun -m harness.train``: one job in one run folder, with the controller's error messages."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import tiny
from launching import LONG, TWO_RANKS, Launch, until
from test_launch import GONE_SECONDS, patch_rank
from tiers import rest_is_thorough

from harness.compose.composer import compose_job
from harness.launch.begin import begin
from harness.launch.local import _rendezvous
from harness.run.folder import RunFolder
from harness.train.rank import Rank
from harness.util.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_RESUMABLE, EXIT_USER, MachineError

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "harness.train")


@pytest.fixture
def torchrun(launch: Callable[..., Launch]) -> Callable[..., Launch]:
    def start(*overrides: str, **options: Any) -> Launch:
        return launch(*overrides, module=TORCHRUN, **options)

    return start


def test_a_good_run_is_one_run(torchrun: Callable[..., Launch]) -> None:
    job = torchrun(*TWO_RANKS, "training.steps=3")
    assert job.finish() == 0, job.err
    assert job.read("result.json")["exit_reason"] == "completed"
    assert [row["step"] for row in job.rows] == [1, 2, 3]
    assert not (job.run_dir / "attempts").exists()


def test_a_wrong_number_of_ranks_is_reported_once(torchrun: Callable[..., Launch]) -> None:
    job = torchrun("parallelism=single", "training.steps=3")
    assert job.finish() != 0
    assert job.err.count("error: ") == 1, job.err
    assert not (job.folder / "runs").exists()


def test_a_users_error_is_reported_once_and_leaves_a_row(torchrun: Callable[..., Launch]) -> None:
    job = torchrun(*TWO_RANKS, "data=local_text", "data.paths=[/nowhere.txt]", "training.steps=3")
    assert job.finish() != 0
    assert job.err.count("error: ") == 1 and "/nowhere.txt" in job.err
    assert job.read("result.json")["exit_code"] == EXIT_USER


def test_a_bug_in_one_rank_leaves_a_row_that_names_it(torchrun: Callable[..., Launch]) -> None:
    job = torchrun(*TWO_RANKS, *LONG, patch=patch_rank(1, 'raise LookupError("broken here")'))
    assert job.finish() != 0
    assert job.err.count("LookupError: broken here") == 1
    row = job.read("result.json")
    assert (row["exit_code"], row["error.rank"], row["error.type"]) == (EXIT_BUG, 1, "LookupError")
    assert job.ranks() == {}


@pytest.mark.thorough  # as in test_launch.py
def test_a_stop_request_ends_all_ranks_at_one_step(torchrun: Callable[..., Launch]) -> None:
    job = torchrun(*TWO_RANKS, *LONG, "metrics.log_interval=1")
    job.wait_for_step()
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() != 0
    row = job.read("result.json")
    assert (row["exit_reason"], row["exit_code"]) == ("interrupted", EXIT_RESUMABLE)
    assert row["step"] == job.rows[-1]["step"]


def test_a_killed_torchrun_leaves_no_orphans(torchrun: Callable[..., Launch]) -> None:
    job = torchrun(*TWO_RANKS, *LONG)
    job.wait_for_step()
    job.process.send_signal(signal.SIGKILL)
    assert until(lambda: job.ranks() == {}, GONE_SECONDS) < GONE_SECONDS
    assert job.read("result.json")["error.type"] == "LauncherGone"


@pytest.mark.parametrize("peer_failed", rest_is_thorough([False, True], True))
def test_the_row_of_a_rank_that_is_stopped_names_the_peer_that_failed(
    tmp_path: Path, peer_failed: bool
) -> None:
    """A rank 0 that is stopped before training begins sees only the interruption."""
    job = tiny(f"runs_dir={tmp_path}")
    folder = RunFolder(job.run_dir)
    begin(folder, job, [])
    if peer_failed:
        folder.record_error(1, LookupError("broken here"))
    assert Rank(job, folder).fail(KeyboardInterrupt()) == EXIT_INTERRUPTED
    row = json.loads((folder.path / "result.json").read_text())
    expected = ("failed", EXIT_BUG) if peer_failed else ("interrupted", EXIT_INTERRUPTED)
    assert (row["exit_reason"], row["exit_code"]) == expected


def test_a_store_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    job = compose_job([*TWO_RANKS, "data=synthetic", "training.global_batch_size=4", "cluster.device=cpu"])
    job = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, start_timeout_seconds=1))
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MachineError, match=r"^rank 1 cannot connect to the store at 127.0.0.1:1 ") as failed:
        _rendezvous(job)
    assert "\n" not in str(failed.value)
