"""How jobs and sweeps end: by themselves, by signals, by the death of any of their processes.

Every test starts real processes and ends them by real means.
"""

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from cases import rows
from jobs import tiny
from launching import LONG, PATIENCE, TWO_RANKS
from one_line import one_line
from processes import python, until

from harness.compose.length import note
from harness.config.cluster import CLUSTERS, ClusterKind
from harness.config.fields import with_value
from harness.config.job import Job
from harness.launch.begin import begin, begin_again
from harness.launch.local import note_busy_cores
from harness.launch.train import train
from harness.run.folder import RunFolder
from harness.train.rank import Rank
from harness.train.setup import rendezvous
from harness.util.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_MACHINE,
    EXIT_NON_FINITE,
    EXIT_OK,
    EXIT_RESUMABLE,
    EXIT_USER,
    ConfigError,
    MachineError,
)

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "harness.train")


def patch_rank(rank, body):
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


@pytest.fixture(params=["harness", pytest.param("torchrun", marks=pytest.mark.thorough)])
def starter(request):
    return str(request.param)


@pytest.fixture
def start(launch, starter):
    """Starts two ranks by the harness or by torchrun."""

    def run(*overrides, **options):
        module = TORCHRUN if starter == "torchrun" else ("harness.train",)
        return launch(*TWO_RANKS, *overrides, module=module, **options)

    return run


def check_end(job, starter, code):
    """Wait for the end and check the exit code, of which torchrun keeps only whether it is 0."""
    ended = job.finish()
    assert (ended == code) if starter == "harness" else (bool(ended) == bool(code)), job.err
    assert job.ranks() == {}


def test_a_users_error_is_one_line_and_the_job_goes_on(start, starter, tmp_path):
    text = tmp_path / "corpus.txt"
    text.write_bytes(b"\xff" * 99)  # only reading it shows that it is not UTF-8
    overrides = ("data=local_text", f"data.paths=[{text}]", f"data.cache_dir={tmp_path}/cache")
    first = start(*overrides, "training.steps=2")
    check_end(first, starter, EXIT_USER)
    [line] = [each for each in first.err.splitlines() if each.startswith("error: ")]
    assert str(text) in line and (starter == "torchrun" or first.err.strip() == line)
    row = first.read("result.json")
    assert (row["exit_reason"], row["exit_code"], row["error.kind"]) == (
        "failed",
        EXIT_USER,
        "user",
    )
    assert first.read("status.json")["state"] == "failed"
    assert all(not isinstance(value, dict) for value in row.values())

    text.write_text("To be or not to be, that is the question.\n" * 200)
    second = start(*overrides, "training.steps=2")
    check_end(second, starter, EXIT_OK)
    assert second.run_dir == first.run_dir
    row = second.read("result.json")
    assert (row["exit_reason"], row["exit_code"], row["step"]) == ("completed", EXIT_OK, 2)
    assert second.read("status.json")["state"] == "completed"
    assert [each["step"] for each in second.rows] == [1, 2]
    [earlier] = (second.run_dir / "attempts").iterdir()
    assert json.loads((earlier / "result.json").read_text())["exit_code"] == EXIT_USER
    assert (earlier / "errors").is_dir() and (earlier / "overrides.txt").is_file()


def test_a_wrong_number_of_ranks_is_reported_once(launch):
    job = launch("parallelism=single", "training.steps=3", module=TORCHRUN)
    assert job.finish() != 0
    assert job.err.count("error: ") == 1, job.err
    assert not (job.folder / "runs").exists()


def test_a_bug_in_one_rank_ends_the_others_at_once(start, starter):
    patch = patch_rank(1, 'raise LookupError("broken here")')
    if starter == "harness":  # torchrun gives ranks half a minute to end
        # Rank 0 is nowhere near a collective: it cannot notice by itself that rank 1 is gone.
        patch += patch_rank(0, "time.sleep(600)")
    job = start(*LONG, patch=patch)
    check_end(job, starter, EXIT_BUG)
    assert "Traceback" in job.err and job.err.count("LookupError: broken here") == 1
    row = job.read("result.json")
    assert (row["exit_code"], row["error.rank"], row["error.type"]) == (EXIT_BUG, 1, "LookupError")
    if starter == "harness":
        assert "rank 1 of 2 after step 2" in job.err
        status, error = job.read("status.json"), job.read("errors/rank1.json")
        assert status["state"] == "failed" and status["time"] >= error["time"]


def test_a_killed_rank_is_the_cause_and_not_its_peers(launch):
    job = launch(*TWO_RANKS, *LONG)
    job.wait_for_step()
    os.kill(job.ranks()[1], signal.SIGKILL)
    check_end(job, "harness", EXIT_MACHINE)
    assert "rank 1 ended with signal 9 (SIGKILL)" in job.err and "Traceback" not in job.err
    row = job.read("result.json")
    assert (row["exit_reason"], row["exit_code"], row["error.rank"]) == ("failed", EXIT_MACHINE, 1)
    assert row["step"] >= 5 and row["loss"] > 0
    assert job.read("status.json")["state"] == "failed"


def test_ranks_that_leave_with_exit_code_0_have_not_completed(launch):
    patch = patch_rank(0, "os._exit(0)") + patch_rank(1, "os._exit(0)")
    job = launch(*TWO_RANKS, *LONG, patch=patch)
    check_end(job, "harness", EXIT_MACHINE)
    assert "rank 0 ended with exit code 0 in the middle of the run" in job.err
    row = job.read("result.json")
    assert (row["exit_reason"], row["error.rank"], row["error.type"]) == ("failed", 0, "RankDied")


@pytest.mark.parametrize(
    ("starter", "number", "typed", "code"),
    [
        ("harness", signal.SIGINT, TWO_RANKS, EXIT_RESUMABLE),
        ("torchrun", signal.SIGTERM, TWO_RANKS, EXIT_RESUMABLE),
        ("harness", signal.SIGTERM, [], EXIT_RESUMABLE),
        ("harness", signal.SIGTERM, ["checkpoint.enable=false"], EXIT_INTERRUPTED),
    ],
    ids=["harness", "torchrun", "one rank", "nothing saved"],
)
def test_a_stop_request_ends_all_ranks_at_one_step(launch, starter, number, typed, code):
    module = TORCHRUN if starter == "torchrun" else ("harness.train",)
    job = launch(*LONG, *typed, "metrics.log_interval=1", module=module)
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
    check_end(job, starter, code)
    assert starter == "torchrun" or "Traceback" not in job.err
    row, rows = job.read("result.json"), job.rows
    assert (row["exit_reason"], row["exit_code"]) == ("interrupted", code)
    assert row["step"] == rows[-1]["step"] and row["loss"] == rows[-1]["loss"]
    assert (job.run_dir / "metrics.jsonl").read_bytes().endswith(b"\n")
    assert job.read("status.json")["state"] == "interrupted"
    assert not list((job.run_dir / "errors").iterdir())


def test_a_second_interrupt_ends_at_once(launch):
    job = launch(*TWO_RANKS, *LONG)
    job.wait_for_step()
    os.kill(job.ranks()[1], signal.SIGSTOP)
    job.process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert job.process.poll() is None, "a stuck rank cannot agree on a step"
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == EXIT_INTERRUPTED
    assert job.ranks() == {}
    assert job.read("result.json")["exit_reason"] == "interrupted"


ELSEWHERE = """
def somewhere_else():
    import time
    time.sleep(600)
"""


def test_a_rank_that_does_not_reach_a_collective_is_located_after_a_resume(launch):
    """The short timeout holds from the second step of this process on, whichever step that is."""
    job = [*TWO_RANKS, *LONG, "metrics.log_interval=1", "cluster.step_timeout_seconds=4"]
    first = launch(*job)
    first.wait_for_step()
    first.process.send_signal(signal.SIGTERM)
    assert first.finish() == EXIT_RESUMABLE
    assert not (first.run_dir / "flight_recorder").exists()
    reached = first.read("result.json")["step"]

    second = launch(*job, patch=patch_rank(1, "somewhere_else()") + ELSEWHERE)
    check_end(second, "harness", EXIT_MACHINE)
    row, folder = second.read("result.json"), second.run_dir / "flight_recorder"
    assert (row["error.kind"], row["error.rank"], row["step"]) == (
        "collective_timeout",
        0,
        reached + 2,
    )
    assert row["error.absent_ranks"] == [1]
    # Rank, position and operation.
    assert (
        f"rank 0 of 2 after step {row['step']}" in second.err
        and "Timed out waiting 4000ms" in second.err
    )
    assert "in harness/" in second.err and "Traceback" not in second.err
    assert "rank 1 did not reach the collective that rank 0 waited in: " in second.err
    assert (
        f"the collective and each rank's position: {folder.relative_to(second.folder)}"
        in second.err
    )
    waiting, absent = ((folder / f"stacks-rank{rank}.txt").read_text() for rank in (0, 1))
    for rank, text in enumerate((waiting, absent)):
        assert text.startswith(f"rank {rank}, step {reached + 3}: ")
        assert "last collective begun: gloo:" in text and "default_pg" in text
        assert text.count("hread 0x") >= 2, "not all threads"
    assert "gloo:all_reduce" in waiting and "in world_total" in waiting
    assert "in somewhere_else" in absent and "in world_total" not in absent


def test_a_killed_controller_leaves_no_orphans_and_no_lock(start, starter):
    job = start(*LONG)
    job.wait_for_step()
    job.process.send_signal(signal.SIGKILL)
    until(lambda: job.ranks() == {})
    row = job.read("result.json")
    assert (row["exit_reason"], row["error.type"]) == ("failed", "LauncherGone")
    if starter == "torchrun":
        return
    # The status of a dead controller, whose process id now belongs to another process.
    status = job.read("status.json")
    (job.run_dir / "status.json").write_text(
        json.dumps({**status, "state": "running", "pid": os.getpid()})
    )
    again = RunFolder(job.run_dir)
    begin(again, Job.from_json((job.run_dir / "job.json").read_text()), [])
    again.release()
    assert (job.run_dir / "attempts" / "1" / "result.json").is_file()


def test_numbers_gone_wrong_are_one_line_that_says_where_the_evidence_is(launch):
    job = launch(
        "optimizer.lr=1e38", "schedule=constant", "training.steps=50", "training.max_norm=0"
    )
    assert job.finish() == EXIT_NON_FINITE
    [line] = [each for each in job.err.splitlines() if each]
    assert line.startswith("error: step ") and "evidence in" in line
    assert job.read("result.json")["exit_code"] == EXIT_NON_FINITE
    assert list((job.run_dir / "evidence").glob("*.pt"))


def test_ranks_share_the_cores_unless_the_user_says_otherwise(launch):
    job = launch(*TWO_RANKS, *LONG, environment={"OMP_NUM_THREADS": "3"})
    until(lambda: len(job.ranks()) == 2)
    for pid in job.ranks().values():
        assert "OMP_NUM_THREADS=3" in Path(f"/proc/{pid}/environ").read_text().split("\0")
    # Before its first step a job has nothing to save: it ends without waiting for one.
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == EXIT_INTERRUPTED
    assert job.read("result.json")["exit_reason"] == "interrupted"


@pytest.mark.parametrize(
    ("load", "running", "threads", "field", "device", "says"),
    rows("""
        12.34  3/400  null  null  cpu   true
        12.34  3/400  null  null  auto  true
        12.34  null   null  null  cpu   true
        12.34  2/400  null  null  cpu   false
        1.9    3/400  null  null  cpu   false
        12.34  3/400  '1'   null  cpu   false
        12.34  3/400  null  1     cpu   false
        12.34  3/400  null  null  cuda  false
    """),
)
def test_a_machine_in_use_is_said(
    load, running, threads, field, device, says, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr("harness.launch.local._LOAD", tmp_path / "loadavg")
    if running:
        (tmp_path / "loadavg").write_text(f"{load} 0.00 0.00 {running} 4711\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0" if device == "cuda" else "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    note.cache_clear()
    job = with_value(tiny(), "cluster.threads_per_rank", field)
    note_busy_cores(with_value(job, "cluster.device", device))
    shown = "NOTE other processes use this machine (load 12.3 on 2 cores), so steps are slow; "
    assert capsys.readouterr().err.startswith(shown) is says


@pytest.mark.parametrize("peer_failed", [False, True])
def test_the_row_of_a_stopped_rank_names_the_failed_peer(tmp_path, peer_failed):
    """A rank 0 that is stopped before training begins sees only the interruption."""
    job = tiny(f"runs_dir={tmp_path}")
    folder = RunFolder(job.run_dir)
    begin(folder, job, [])
    if peer_failed:
        folder.errors.record(1, LookupError("broken here"))
    assert Rank(job, folder).fail(KeyboardInterrupt()) == EXIT_INTERRUPTED
    row = json.loads((folder.path / "result.json").read_text())
    expected = ("failed", EXIT_BUG) if peer_failed else ("interrupted", EXIT_INTERRUPTED)
    assert (row["exit_reason"], row["exit_code"]) == expected


@pytest.mark.parametrize("is_late", [True, False])
def test_a_rank_whose_node_comes_back_leaves_the_next_attempt_alone(tmp_path, is_late):
    job = tiny(f"runs_dir={tmp_path}")
    folder = RunFolder(job.run_dir)
    begin(folder, job, [])
    rank = Rank(job, folder)
    if is_late:
        begin_again(folder, job)
    rank.fail(RuntimeError("Connection closed by peer"))
    assert (folder.has_result, folder.errors.has(0)) == (not is_late, not is_late)


@pytest.mark.parametrize(
    ("kind", "ranks", "rule"),
    [
        (
            "local",
            "2",
            "a job has one number of ranks, and torchrun chooses another when it goes on",
        ),
        ("own", None, "is of cluster.kind=local and slurm, and this is own; would work: requeue"),
    ],
)
def test_other_launchers_do_not_go_on_without_a_node(monkeypatch, kind, ranks, rule):
    monkeypatch.setitem(CLUSTERS._builtins, "own", ClusterKind("nowhere:start", is_here=True))
    if ranks is not None:
        for name, value in {**LONE, "RANK": "1", "WORLD_SIZE": ranks, "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
    typed = [*TWO_RANKS, f"cluster.kind={kind}", "cluster.on_node_loss=continue"]
    with one_line(ConfigError, f"cluster.on_node_loss=continue: {rule}"):
        train(tiny(*typed), typed)


def test_a_store_that_cannot_be_reached_is_one_line(monkeypatch):
    job = with_value(
        tiny(*TWO_RANKS, "training.global_batch_size=4"), "cluster.start_timeout_seconds", 1
    )
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with one_line(MachineError, r"^rank 1 cannot connect to the store at 127.0.0.1:1 "):
        rendezvous(job)


LONE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_lone_rank_says_what_it_waits_for_and_can_be_stopped(launch, number):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    job = launch(*TWO_RANKS, environment={**LONE, "MASTER_PORT": str(port)})
    until(
        lambda: f"waiting for 1 of 2 ranks at localhost:{port} (WORLD_SIZE, " in job.err, PATIENCE
    )
    assert "this is rank 0 of 2, because a launcher set RANK=0 and WORLD_SIZE=2" in job.err
    job.process.send_signal(number)
    assert job.finish() != EXIT_OK
    assert "Traceback" not in job.err


@pytest.mark.parametrize(
    ("overrides", "says"),
    rows("""
        [cluster=slurm_cpu, cluster.dry_run=true]  so the job would train here, and not by cluster.kind=sl
        [cluster=slurm_cpu]                        so the job would train here, and not by cluster.kind=slurm
        [-m, 'training.seed=1,2']                  a multirun (-m) starts the ranks of all its jobs
    """),
)
def test_variables_of_a_launcher_that_started_nothing(launch, overrides, says):
    job = launch(*overrides, environment={"RANK": "0", "WORLD_SIZE": "1"})
    assert job.finish() == EXIT_USER
    assert f"error: RANK=0 and WORLD_SIZE=1 are set, as torchrun does: {says}" in job.err
    assert "would work: env -u RANK -u WORLD_SIZE" in job.err
    assert not list(job.folder.rglob("metrics.jsonl"))


def test_a_layout_that_does_not_fit_names_the_variable(monkeypatch):
    for name, value in {**LONE, "RANK": "5", "WORLD_SIZE": "8", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with one_line(ConfigError, r"but there are 8 ranks by WORLD_SIZE, which a launcher sets"):
        tiny(*TWO_RANKS)
    with one_line(ConfigError, r"does not divide the world size 8 by WORLD_SIZE"):
        tiny("parallelism.dp_shard=-1", "parallelism.tp=3")


def verb(folder, *arguments, code=EXIT_OK):
    """Return the output of a verb, stderr first."""
    done = python("-m", "harness", *arguments, cwd=folder)
    assert done.returncode == code, done.stderr
    return done.stderr + done.stdout


def test_a_sweep_goes_on_after_failures_and_names_them(launch, tmp_path):
    """Two points that are not valid jobs, one whose text is not UTF-8, and one that completes."""
    (tmp_path / "there.txt").write_text("All the world is text. " * 200)
    (tmp_path / "wrong.txt").write_bytes(b"\xff" * 99)
    typed = (
        "-m",
        "parallelism.dp_shard=1,5",
        "data=local_text",
        "data.paths=[there.txt],[wrong.txt]",
    )
    typed = (*typed, "data.cache_dir=cache", "name=swept", "training.steps=4")
    job = launch(*typed)
    assert job.finish() == 1
    assert job.err.startswith("runs/swept: 4 points, 2 to run\n")
    rule = "parallelism.dp_shard=5 data.paths=[there.txt]: training.global_batch_size=4: must have a row"
    assert rule in job.err
    assert "[2/2] data.paths=[wrong.txt], about " in job.err
    assert "1 of 2 points did not complete:\n  data.paths=[wrong.txt]: user: " in job.err
    shown = dict(
        line.split()[:2] for line in job.out.splitlines() if line.startswith("data.paths=")
    )
    assert shown == {"data.paths=[there.txt]": "completed", "data.paths=[wrong.txt]": "failed"}

    again = launch(*typed)
    assert again.finish() == 1
    assert "4 points, 1 to run" in again.err and "1 completed already" in again.err

    printed = verb(tmp_path, "runs", "runs/swept")
    assert printed.splitlines()[-1] == "1 completed, 1 failed, 2 skipped"
    verb(tmp_path, "report", "runs/swept")
    table = (tmp_path / "runs" / "swept" / "report" / "table.csv").read_text().splitlines()
    assert len(table) == 5 and table[0].startswith("point,state,kind,")
    refused = verb(tmp_path, "runs", "nothing", code=EXIT_USER)
    assert refused.startswith("error: nothing: no runs; would work: ")


GRID = ("training.seed=1,2",)
STUDY = ("sweep=optuna", "sweep.n_trials=2", "sweep.n_jobs=1", "optimizer.lr=interval(1e-4,1e-2)")


@pytest.mark.parametrize("axes", [GRID, STUDY], ids=["grid", "study"])
def test_a_killed_sweep_is_resumed(launch, tmp_path, axes):
    typed = ("-m", *axes, "name=cut", "training.steps=200", "checkpoint.interval=10")
    typed = (*typed, "metrics.log_interval=10")
    first = launch(*typed)
    until(lambda: bool(list(tmp_path.glob("runs/cut/[0-9a-f]*/checkpoints/step-*/manifest.json"))))

    if axes == GRID:
        second = launch(*typed)
        assert second.finish() == EXIT_USER
        assert "another process is starting the jobs of this sweep" in second.err
    first.process.kill()
    until(lambda: not first.ranks())
    if axes == GRID:
        printed = verb(tmp_path, "runs", "runs/cut")
        assert printed.splitlines()[-1] in ("1 failed, 1 planned", "1 stopped, 1 planned")
        assert "2 points, 2 to run" in verb(tmp_path, "sweep", "resume", "runs/cut")
    else:
        third = launch(*typed)
        assert third.finish() == EXIT_OK, third.err
        assert third.out.splitlines()[-2].startswith("best (minimize loss): optimizer.lr=")
    rows = [
        json.loads(path.read_text()) for path in tmp_path.glob("runs/cut/[0-9a-f]*/result.json")
    ]
    assert [row["exit_reason"] for row in rows] == ["completed"] * 2
    assert max(row["start_step"] for row in rows) > 0, "it resumed from a checkpoint"
