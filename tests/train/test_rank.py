"""One rank: its records when it fails, and its end with the process that started it."""

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from jobs import batches_of, tiny
from processes import is_alive, python, until

from harness.data.cache import cache_folder
from harness.data.documents import LocalFiles
from harness.data.tokenizer import build_tokenizer
from harness.launch.begin import begin
from harness.run.folder import RunFolder
from harness.train import rank
from harness.train.finish import finish_run
from harness.train.objective import _wait_for_all
from harness.util.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_MACHINE, EXIT_USER, DataError
from harness.util.store import only_builder


@pytest.fixture(scope="module")
def job():
    return tiny()


@pytest.fixture
def folder(tmp_path, job):
    made = RunFolder(tmp_path / "run")
    begin(made, job, [])
    return made


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (DataError("no such file"), EXIT_USER, "failed"),
        (LookupError("a bug"), EXIT_BUG, "failed"),
        (torch.OutOfMemoryError("CUDA out of memory."), EXIT_MACHINE, "failed"),
        (KeyboardInterrupt(), EXIT_INTERRUPTED, "interrupted"),
    ],
)
def test_errors_while_ending_do_not_hide_the_cause(folder, job, error, code, reason):
    """The results of the trainer cannot be read, and the service of the recorder is gone."""
    trainer, recorder = Mock(progress=Mock(step=5)), Mock()
    trainer.result.side_effect = ArithmeticError("no result either")
    recorder.close.side_effect = ConnectionError("no service")
    failing = Mock(side_effect=error)
    with (
        patch.multiple(rank.Rank, trainer=trainer, recorder=recorder),
        patch.object(rank.process, "set_environment", failing),
    ):
        assert rank.run_rank(job, folder, started=time.monotonic()) == code
    assert (folder.row["exit_reason"], folder.row["exit_code"]) == (reason, code)
    recorder.close.assert_called_with({"exit_code": code})  # W&B shows the run as failed
    if reason == "failed":
        assert (folder.row["error.message"], folder.row["error.step"]) == (str(error), 5)


def test_a_process_ends_with_its_parent_and_takes_its_own_children_along(tmp_path):
    child = (
        "import os, subprocess, sys, time; from harness.util.lifeline import end_with_parent;"
        "worker = subprocess.Popen(['sleep', '600']); end_with_parent(int(sys.argv[1]),"
        "lambda: open(sys.argv[2], 'w').write('said')); print(os.getpid(), worker.pid, flush=True);"
        "time.sleep(600)"
    )
    parent = (
        "import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid()),"
        "sys.argv[2]], start_new_session=True).wait()"
    )
    said = tmp_path / "said"
    process = subprocess.Popen(
        [sys.executable, "-c", parent, child, str(said)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path.cwd(),
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    process.kill()
    process.communicate()
    until(lambda: not any(is_alive(pid) for pid in pids))
    assert said.read_text() == "said"


@pytest.mark.parametrize("arguments", [(), ("somewhere",)])
def test_starting_a_rank_by_hand_is_a_one_line_error(arguments):
    done = python("-m", "harness.train.rank", *arguments)
    assert done.returncode == EXIT_USER
    assert done.stderr == "error: the harness starts its ranks itself; would work: harness train\n"


@pytest.mark.parametrize("started_by", ["controller", "srun"])
def test_a_rank_with_a_damaged_job_is_one_line_of_the_controller(folder, job, started_by, capsys):
    (folder.path / "job.json").write_text('{"name": 1}')
    place = {"HARNESS_CONTROLLER": str(os.getpid()), "RANK": "1"}
    variables = place if started_by == "controller" else {"SLURM_PROCID": "1"}
    command = ("-m", "harness.train.rank", str(folder.path))
    done = python(*command, HARNESS_STARTED="1.0", **variables)
    assert (done.returncode, done.stderr) == (EXIT_USER, "")
    assert finish_run(job, folder, done.returncode) == EXIT_USER
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: {folder.path}/job.json: damaged, or another version wrote it: name=1: "
    )
    row = folder.row
    assert (row["error.kind"], row["error.rank"], row["exit_code"]) == ("user", 1, EXIT_USER)


# -- ranks wait for the rank that tokenizes, without a collective, whose timeout would end the job --

TIMEOUT_SECONDS, BUILDING_SECONDS = 0.5, 1.0


def wait_twice():
    """Return when this rank entered and left each of two waits; rank 0 enters both late."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_SECONDS))
    times = []
    for _ in range(2):
        if dist.get_rank() == 0:
            time.sleep(BUILDING_SECONDS)  # longer than a collective allows
        entered = time.monotonic()
        _wait_for_all()
        times.append((entered, time.monotonic()))
    return times


def test_ranks_wait_for_a_builder_longer_than_for_a_collective(pool):
    """The second wait is not mistaken for the first."""
    ranks = pool.run(3, wait_twice)
    for wait in range(2):
        entered, _ = ranks[0][wait]
        assert all(left > entered for _, left in (rank[wait] for rank in ranks))


def load_while_another_builds(job):
    """Build the loader of a job whose token cache another process builds; return when it is there."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_SECONDS))
    batches_of(job, range(2))
    return time.monotonic()


def test_ranks_wait_for_the_builder_of_another_node(pool, tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 1000)
    files = (f"data.paths=[{tmp_path}/*.txt]", f"data.cache_dir={tmp_path}/cache")
    job = tiny("model.vocab_size=512", "data=local_text", *files, "data.validation_fraction=0")
    tokenizer = build_tokenizer(job.tokenizer)
    folder = cache_folder(LocalFiles(job.data, "train"), tokenizer, 0.0)
    work = folder / ".unfinished"
    holds, ended = threading.Event(), []

    def build():
        with only_builder(work, lambda: False):
            holds.set()
            time.sleep(TIMEOUT_SECONDS + BUILDING_SECONDS)
            ended.append(time.monotonic())

    builder = threading.Thread(target=build)
    builder.start()
    holds.wait()
    ranks = pool.run(3, load_while_another_builds, job)
    builder.join()
    assert all(loaded > ended[0] for loaded in ranks) and not work.exists()
