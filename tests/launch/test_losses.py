"""A run that goes on without lost ranks: what counts as lost, and that nothing else changes."""

import contextlib
import json
import os
import shutil
import signal
import sys
from itertools import count
from pathlib import Path

import pytest
from cases import rows
from goes_on import LOSING, PATCH, WITNESSED, check_witness
from jobs import tiny, train

from harness.checkpoint.resume import find_start
from harness.launch import begin as begin_module
from harness.launch import local, losses, state
from harness.launch.begin import begin, begin_again
from harness.launch.faults import RankDied
from harness.launch.layouts import Layout
from harness.launch.losses import Loss, go_on
from harness.launch.state import SlurmJobRecord, record_lost
from harness.run.folder import LAYOUT, RunFolder
from harness.train.process import FLIGHT_RECORDER
from harness.util.errors import EXIT_MACHINE, EXIT_OK

ERRORS = {
    "peer": RuntimeError("Connection closed by peer"),
    "bug": LookupError("broken"),
    "node": RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    "memory": MemoryError(),
    "timeout": RuntimeError("Timed out waiting 4000ms for recv operation to complete"),
}


# Exit codes of ranks that recorded no error, errors that others recorded, and the ranks that count as lost.
@pytest.mark.parametrize(
    ("codes", "errors", "lost"),
    rows("""
        {2: -9}          {0: peer, 1: peer}  [2]
        {1: -15, 2: -9}  {0: peer}           [1, 2]
        {2: -9}          {0: bug}            []
        {2: -11}         {0: peer}           []
        {2: 7}           {0: peer}           []
        {}               {0: peer, 1: node}  [1]
        {}               {1: memory}         []
        {}               {0: timeout}        [2]
        {}               {0: peer}           []
        {}               {}                  []
    """),
)
def test_which_ranks_are_lost(codes, errors, lost, tmp_path):
    folder = RunFolder(tmp_path)
    for rank, name in errors.items():
        folder.errors.record(rank, ERRORS[name])
    (tmp_path / FLIGHT_RECORDER).mkdir()
    for rank in (0, 1):
        place = {"rank": rank, "group": "g", "number": 3, "members": [0, 1, 2], "begun": {"g": 3}}
        (tmp_path / FLIGHT_RECORDER / f"place-rank{rank}.json").write_text(json.dumps(place))
    dead = [(rank, RankDied.by_code(rank, code, 0, tmp_path)) for rank, code in codes.items()]
    for rank, died in dead:
        folder.errors.record(rank, died)
    assert losses.lost_ranks(folder, dead)[0] == lost


# A stand-in for a rank: it imports no torch, and ends as ``TEST_ENDS`` says for its attempt and rank.
STAND_IN = f"""#!{sys.executable}
import os, signal, sys, time
from pathlib import Path
from harness.run.folder import RunFolder
from harness.run.record import RunRecord
folder, rank = RunFolder(Path(sys.argv[-1])), int(os.environ["RANK"])
ends = os.environ["TEST_ENDS"].split("/")[len(list(folder.path.glob("attempts/*")))].split()
assert len(ends) == int(os.environ["WORLD_SIZE"])
if ends[rank] == "done":
    if rank == 0:
        RunRecord(folder.attempt_job(), folder).end("completed", 0, {{"step": 9}})
elif ends[rank] == "bug":
    sys.exit(folder.errors.record(rank, LookupError("broken"), step=4)["exit_code"])
elif ends[rank] == "stop":
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
elif ends[rank] == "waits":
    time.sleep(60)
else:
    os.kill(os.getpid(), getattr(signal, ends[rank]))
"""


# How ranks end, of each attempt, with a ! if a stop request comes before it; the exit code, the ranks of each
# attempt, and what is said.
@pytest.mark.parametrize(
    ("ends", "code", "worlds", "says"),
    rows("""
        done done done done                                     0    [4]        ''
        done SIGKILL done done / SIGTERM done done / done done  0    [4, 3, 2]  'rank 0 was lost: signal'
        SIGKILL done SIGKILL done / done done                   0    [4, 2]     ranks 0, 2 were lost
        SIGKILL done done done / bug done done                  1    [4, 3]     from step 0 on 3 ranks
        done bug done done                                     1    [4]        ''
        done SIGSEGV done done                                 3    [4]        ''
        SIGKILL SIGKILL SIGKILL done                            3    [4]        'left: fewer than cluster'
        done SIGKILL done done / waits stop waits               130  [4, 3]     ''
        done SIGKILL done done /! waits waits waits             130  [4, 3]     ''
        done done done SIGKILL / done done SIGKILL / SIGKILL done   3    [4, 3, 2]  '1 rank left'
    """),
)
def test_a_controller_goes_on_with_the_ranks_left(
    ends, code, worlds, says, tmp_path, monkeypatch, capfd
):
    layouts = [f"parallelism.dp_shard={ranks}" for ranks in (4, 3, 2)]
    common = (
        "training.global_batch_size=12",
        f"runs_dir={tmp_path}",
        "cluster.on_node_loss=continue",
    )
    job, *fewer = (tiny("parallelism=fsdp", each, *common) for each in layouts)
    monkeypatch.setattr(begin_module, "prepare", lambda *_: None)
    prepared = {each.world_size: Layout(each.world_size, each, "", 0, 0, 0) for each in fewer}

    def read_layouts(_):
        if "!" in ends:
            os.kill(os.getpid(), signal.SIGTERM)
        return prepared

    monkeypatch.setattr(losses, "read_layouts", read_layouts)
    (tmp_path / "rank").write_text(STAND_IN)
    (tmp_path / "rank").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "rank"))
    monkeypatch.setattr(local, "LEAVING_SECONDS", 60.0)
    monkeypatch.setenv("TEST_ENDS", ends.replace("!", ""))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    folder = RunFolder(job.run_dir)
    begin(folder, job, [])
    assert local.launch(job, folder) == code
    attempts = [RunFolder(folder.path / "attempts" / str(n)) for n in range(1, len(worlds))]
    found = [*(each.row for each in attempts), folder.row]
    assert [row["world_size"] for row in found] == worlds
    assert {row["id"] for row in found} == {job.id}
    assert [row.get("losses", 0) for row in found] == [4 - ranks for ranks in worlds]
    assert says in capfd.readouterr().err


class Killed(BaseException):
    """The end of this process, as far as a test sees it."""


@pytest.fixture
def kill_at(monkeypatch):
    """Says before which of the next changes of a name, by which every write ends, this process is killed."""
    left = [0]

    def counted(change):
        def changed(*arguments, **options):
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return change(*arguments, **options)

        return changed

    monkeypatch.setattr(os, "fsync", lambda _: None)  # there are many writes, and no power failure
    for name in ("rename", "replace", "mkdir"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    return lambda number: left.__setitem__(0, number)


def again_here(folder, job):
    begin(folder, job, [])


def again_on_slurm(folder, job):
    assert folder.state is None or folder.row["error.type"] == "JobLost"
    begin(folder, job, [], state="submitted")


# Who finds the folder: the same command, here or on SLURM, or the job that SLURM has started again.
@pytest.mark.parametrize(
    ("saves", "again"), [(True, again_here), (True, again_on_slurm), (False, begin_again)]
)
def test_each_instruction_between_two_attempts_may_be_the_last(
    saves, again, tmp_path, monkeypatch, put, kill_at
):
    """Nothing saved is lost, and the next attempt is on all ranks."""
    monkeypatch.setattr(begin_module, "prepare", lambda *_: None)
    common = (*WITNESSED, "schedule.total_steps=6")
    done = train(tmp_path, *common, "training.steps=4", f"checkpoint.enable={saves}").folder.path
    layouts = (f"parallelism.dp_shard={ranks}" for ranks in (3, 2))
    job, smaller = (tiny("parallelism=fsdp", each, *common, LOSING[1]) for each in layouts)
    monkeypatch.setattr(losses, "read_layouts", lambda _: {2: Layout(2, smaller)})
    monkeypatch.setattr(state, "LAST_WRITES_SECONDS", 0.0)
    put(squeue="exit", sacct="exit")
    began = None
    for number in count(1):
        run = tmp_path / f"{number}" / job.id
        folder = RunFolder(run)
        begin(folder, job, [])
        if saves:
            shutil.copytree(done / "checkpoints", run / "checkpoints")
        shutil.copy(done / "metrics.jsonl", run)
        if again is again_on_slurm:
            SlurmJobRecord("a", None, "7", begun=True).write(run)
        folder.errors.record(1, ERRORS["peer"], step=4)
        kill_at(number)
        with contextlib.suppress(Killed):
            began = go_on(job, folder, EXIT_MACHINE, Loss("rank 2 was lost", 1, 2))
        kill_at(0)
        folder.release()
        found = RunFolder(run)
        record_lost([run])
        again(found, found.read_job())
        found.release()
        assert found.read_job() == found.attempt_job() == job
        start = find_start(job, run)
        assert [each.step for each in start.candidates[:1]] == [4] * saves
        kept = run if saves else next(run.glob("attempts/*/metrics.jsonl")).parent
        assert (kept / "metrics.jsonl").read_bytes() == (done / "metrics.jsonl").read_bytes()
        assert [path.name for path in run.glob("attempts/*/errors/rank1.json")] == ["rank1.json"]
        if began is not None:
            break
    assert began == smaller and number > 10
    assert [path.name for path in run.glob(f"attempts/*/{LAYOUT}")] == [LAYOUT]


def test_losses_change_no_number(launch):
    """While a checkpoint is written, and while it is loaded; tests/slurm has one in the first step."""
    job = launch(
        *("parallelism=fsdp", "parallelism.dp_shard=3", "cluster.min_nodes=1", *WITNESSED, *LOSING),
        patch=PATCH.read_text(),
        environment={"TEST_DEATHS": "2@save4 1@load"},
    )
    assert job.finish() == EXIT_OK, job.err
    said = [line for line in job.err.splitlines() if "lost" in line]
    assert [line.partition("; ")[2] for line in said] == [
        "going on from step 2 on 2 ranks: dp_shard 2",
        "going on from step 2 on 1 rank: one rank",
    ]
    row = job.read("result.json")
    assert (row["losses"], row["lost_steps"], row["start_step"]) == (2, 2, 2)
    assert row["recovery_seconds"] == pytest.approx(
        sum(
            row[f"recovery.{part}"]
            for part in ("ended", "decided", "ranks", "loaded", "first_step")
        )
    )
    check_witness(job.run_dir)
