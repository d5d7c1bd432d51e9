"""One attempt at a SLURM job, without SLURM: the verdict on its ranks, and code that cannot be imported."""

import json
import os
import shutil
import signal
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
from cases import rows
from processes import python

from harness.compose.composer import compose_job
from harness.config.fields import with_value
from harness.launch import losses
from harness.launch import slurm_attempt as attempt
from harness.launch.batch import SIGNALS, Received
from harness.launch.begin import begin, begin_again
from harness.launch.faults import UnfitNodes
from harness.launch.layouts import Layout
from harness.launch.queue import Jobs, SlurmError
from harness.launch.slurm_attempt import Allocation, _verdict
from harness.launch.state import SlurmJobRecord, read_state
from harness.run.folder import RunFolder
from harness.train.finish import finish_run
from harness.util.errors import EXIT_INTERRUPTED, EXIT_MACHINE, EXIT_OK, EXIT_RESUMABLE

ROOT = Path(__file__).parents[2]
SAID = {
    "died": "srun: error: node1: task 1: Segmentation fault\n",
    "ended": "srun: launch/slurm: _step_signal: Terminating StepId=7.0\n"
    "slurmstepd: error: *** STEP 7.0 ON node1 CANCELLED AT 2026-11-22T12:00:00 ***\n",
    "exited": "srun: error: node1: task 0: Exited with exit code 3\n",
    "forced": "srun: forcing job termination\n",
    "killed": "srun: error: node1: task 1: Killed\n",
    "terminated": "srun: error: node1: task 1: Terminated\n",
    "both": "srun: error: node1: tasks 0-1: Exited with exit code 3\n",
    "refused": "srun: error: Unable to create step\n",
}
ERRORS = {
    "timeout": RuntimeError("Timed out waiting 4000ms for recv operation to complete"),
    "peer": RuntimeError("Connection closed by peer"),
    "stop": KeyboardInterrupt(),
}


@pytest.fixture
def signals():
    """Signals that this process receives as the batch process does."""
    received = Received()
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGCONT)}
    received.install()
    yield received
    for number, handler in before.items():
        signal.signal(number, handler)


class Granted(Allocation):
    """An allocation with a given state."""

    def __init__(self, state):
        super().__init__("7", 0)
        self._state = state

    def state(self):
        return self._state


SLURM_JOB = ["model=llama3_tiny", "data=synthetic", "cluster=slurm_cpu", "cluster.max_requeues=2"]


@pytest.fixture(scope="module")
def job():
    return compose_job(SLURM_JOB)


# What srun says and returns, the exit code of rank 0's row and its error; and the first error, and the code:
# 3 is the machine's, 75 resumable, 130 interrupted. In the first row srun's SIGTERM turned the error of
# rank 0 into an interruption.
VERDICTS = rows("""
    dead, 0 interrupted  died ended               1    130   stop     [1, RankDied]           3
    killed, 0 sees it    killed ended exited      1    3     peer     [1, RankDied]           3
    dies late            exited ended died        1    3     peer     [1, RankDied]           3
    killed, named late   exited ended killed      1    3     peer     [1, RankDied]           3
    ended by srun        exited ended terminated  1    3     peer     [0, RuntimeError]       3
    leaves               exited ended             1    3     peer     [1, RankDied]           3
    all leave            ''                       0    null  null     [0, RankDied]           3
    hangs                exited ended killed      1    3     timeout  [0, RuntimeError]       3
    lags                 exited ended             1    3     timeout  [0, RuntimeError]       3
    stopped              ''                       1    75    null     [null, null]            75
    stopped early        ''                       1    130   stop     [0, KeyboardInterrupt]  130
    srun told to end     forced killed ended      137  null  null     [null, null]            130
    cancelled            ended killed             1    null  null     [null, null]            130
    done                 ''                       1    0     null     [null, null]            0
    srun fails           refused                  1    null  null     [null, StepFailed]      3
    srun killed          both                     -9   3     peer     [null, StepFailed]      3
""")


@pytest.mark.parametrize(("case", "said", "returned", "row", "error", "first", "code"), VERDICTS)
def test_the_first_true_cause_wins(case, said, returned, row, error, first, code, tmp_path):
    folder = RunFolder(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "srun.err").write_text("".join(SAID[word] for word in said.split()))
    if row is not None:
        (tmp_path / "result.json").write_text(json.dumps({"exit_code": row}))
    if error is not None:
        folder.errors.record(0, ERRORS[error])
    state = "CANCELLED" if case == "cancelled" else "RUNNING"
    assert _verdict(folder, Granted(state), returned, 2) == code
    found = folder.errors.first() or {}
    assert [found.get("rank"), found.get("type")] == first
    assert case != "srun killed" or found["kind"] == "machine"


@pytest.mark.parametrize(
    ("reasons", "is_taken", "cancelled"),
    rows("""
        ['']                                                         true   true
        [' DUE TO SIGNAL Terminated']                                true   true
        [' DUE TO JOB REQUEUE']                                      true   false
        [' DUE TO PREEMPTION', '']                                   true   true
        ['', ' DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS']  true   false
        ['']                                                         false  false
        []                                                           true   false
    """),
)
def test_what_slurm_says_in_the_log_tells_scancel_from_a_requeue(
    reasons, is_taken, cancelled, job, tmp_path
):
    said = "slurmstepd-node1: error: *** JOB 7 ON node1 CANCELLED AT 2026-11-23T18:05:03{} ***\n"
    (tmp_path / "7_0_log.out").write_text("".join(map(said.format, reasons)))
    SlurmJobRecord("a", None, "7", logs=str(tmp_path), begun=True).write(tmp_path)
    attempt._end(RunFolder(tmp_path), is_taken=is_taken)
    record = SlurmJobRecord.read(tmp_path)
    assert record is not None and (record.cancelled, record.begun) == (cancelled, False)
    code = finish_run(job, RunFolder(tmp_path), EXIT_RESUMABLE, quiet=True)
    row = RunFolder(tmp_path).row
    wanted = (EXIT_INTERRUPTED, "cancelled") if cancelled else (EXIT_RESUMABLE, None)
    assert (code, row.get("error.kind")) == wanted
    assert read_state(tmp_path, Jobs([])).state == ("cancelled" if cancelled else "stopped")


def test_a_signal_before_srun_is_no_failure(job, tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("PATH", "/nowhere")
    received = Received()
    received.has_any = True
    code = attempt._run_ranks(job, RunFolder(tmp_path), Granted("RUNNING"), 0.0, received)
    assert code == EXIT_INTERRUPTED


AWAY = "srun: error: Unable to confirm allocation for job 7: Unable to contact slurm controller"


@pytest.mark.parametrize(
    ("times", "scontrol", "ends"),
    [
        (2, "echo JobId=7 JobState=RUNNING Restarts=0", (EXIT_OK, "completed")),
        (9, "echo JobId=7 JobState=RUNNING Restarts=0", (EXIT_RESUMABLE, "requeued")),
        (9, "echo 'Unable to contact slurm controller' >&2; exit 1", (EXIT_MACHINE, "failed")),
    ],
)
def test_srun_is_started_again_while_the_controller_is_away(
    times, scontrol, ends, submitted, job, put, monkeypatch
):
    """After a minute the job is requeued; it has failed if SLURM is still away."""
    for module, name in ((attempt.queue, "RETRY_SECONDS"), (attempt, "ANSWER_SECONDS")):
        monkeypatch.setattr(module, name, 0.0)
    if times > 2:
        monkeypatch.setattr(attempt.queue, "START_SECONDS", 0.0)
    monkeypatch.setattr(attempt.queue.time, "sleep", lambda _: None)
    monkeypatch.setenv("SLURM_JOB_NAME", "a")
    run = submitted.path
    ended = json.dumps({"exit_code": EXIT_OK, "exit_reason": "completed", "state": "completed"})
    tried = f"echo >> {run}/tried; [ $(wc -l < {run}/tried) -le {times} ] && echo '{AWAY}' >&2 && exit 1"
    rank = f"touch {run}/logs/rank0.out; echo '{ended}' | tee {run}/status.json > {run}/result.json"
    put(srun=f"{tried}\n{rank}", scontrol=scontrol)
    assert attempt.run(submitted, Allocation("7", 0), Received()) == ends[0]
    assert submitted.state == ends[1]
    assert submitted.row.get("error.kind") == ("machine" if ends[1] == "failed" else None)


def test_srun_is_not_sent_the_signal_by_which_it_kills_ranks(monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append((process, number)))
    received = Received()
    received._handle(signal.SIGTERM, None)
    received.forward_to(7)
    assert sent == [(7, signal.SIGUSR2)]


@pytest.mark.parametrize(
    ("refused", "state", "ends"),
    [
        (False, "RUNNING", (EXIT_RESUMABLE, "requeued")),
        (True, "RUNNING", (EXIT_MACHINE, "failed")),
        (True, "PENDING", (EXIT_RESUMABLE, "requeued")),
    ],
)
def test_an_unfit_node_of_a_job_that_cannot_be_requeued_is_the_error(
    refused, state, ends, job, tmp_path, monkeypatch
):
    def requeue_without(*_):
        if refused:
            raise SlurmError("scontrol requeue 7: Access/permission denied")

    monkeypatch.setattr(attempt.queue, "requeue", requeue_without)
    folder = RunFolder(tmp_path)
    code = attempt._requeue_after(UnfitNodes({"node1": ["bad"]}), job, folder, Granted(state))
    assert (code, folder.state) == ends
    assert folder.row.get("error.message") == ("node1: bad" if ends[1] == "failed" else None)


@pytest.mark.parametrize("excludes", [True, False])
def test_nodes_of_slow_ranks_are_left_out(tmp_path, monkeypatch, job, excludes):
    asked = []
    monkeypatch.setattr(
        attempt.queue, "requeue", lambda job_id, nodes: asked.append((job_id, nodes))
    )
    found = {"device": "H100", "phase": "forward", "excess": 0.3, "step": 20}
    slow = [
        {"rank": rank, "host": host, "until": until, **found}
        for rank, host, until in ((3, "node2", None), (1, "node1", 40), (2, "node2", None))
    ]
    (tmp_path / "slow_ranks.json").write_text(json.dumps({"slow": slow}))
    slowed = with_value(job, "cluster.exclude_slow", excludes)
    assert attempt._requeue(slowed, RunFolder(tmp_path), Granted("RUNNING")) == EXIT_RESUMABLE
    assert asked == [("7", ["node2"] if excludes else [])]
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status.get("excluded")) == (
        "requeued",
        ["node2"] if excludes else None,
    )


def start(run, code, *arguments, **environment):
    command = ("-m", "harness.launch.batch", *arguments)
    return python(*command, cwd=run, PYTHONPATH=str(code), PYTHONSAFEPATH="1", **environment)


@pytest.fixture
def submitted(tmp_path, job):
    folder = RunFolder(tmp_path / job.id)
    begin(folder, job, [], state="submitted")
    folder.release()
    return folder


def test_a_job_that_was_edited_after_its_submission_says_so(
    submitted, job, put, monkeypatch, capsys
):
    put(srun="exit 1", scontrol="echo JobState=FAILED")
    monkeypatch.setenv("SLURM_JOB_NAME", "a")
    for made, says in ((job, False), (with_value(job, "training.seed", 99), True)):
        (submitted.path / "job.json").write_text(made.to_json())
        attempt.run(submitted, Allocation("7", 0), Received())
        submitted.release()
        warning = f"WARNING {submitted.path}/job.json was edited: this job is {made.id}"
        assert (warning in capsys.readouterr().err) == says


def test_code_that_is_gone_is_not_replaced_by_other_code(submitted, job):
    run = submitted.path
    # An attempt that still runs keeps its status.
    begin_again(submitted, job)
    done = start(run, ROOT, str(run), "--code", f"{run}/code/1")
    assert (done.returncode, submitted.state, submitted.row) == (EXIT_MACHINE, "starting", {})
    submitted.release()
    (run / "result.json").write_text("{")  # of an attempt that was killed
    done = start(run, ROOT, str(run), "--code", f"{run}/code/1")
    assert (done.returncode, submitted.state) == (EXIT_MACHINE, "failed")
    [line] = done.stderr.splitlines()
    assert line.startswith(
        f"error: the job was submitted with the code in {run}/code/1, which is not there"
    )
    row = submitted.row
    assert (row["error.type"], row["error.kind"], row["exit_code"]) == (
        "WrongCode",
        "machine",
        EXIT_MACHINE,
    )
    assert submitted.errors.first()["message"] == row["error.message"]


def test_code_that_cannot_be_imported_leaves_a_row(submitted, tmp_path):
    code = tmp_path / "code"
    shutil.copytree(
        ROOT / "harness", code / "harness", ignore=shutil.ignore_patterns("__pycache__")
    )
    (code / "harness" / "run" / "folder.py").write_text("def broken(\n")
    (tmp_path / "list").write_text(f"/nobody\n{submitted.path}\n")
    done = start(tmp_path, code, "--list", str(tmp_path / "list"), SLURM_ARRAY_TASK_ID="1")
    assert (done.returncode, submitted.state) == (1, "failed")
    assert "SyntaxError" in done.stderr
    assert (submitted.row["error.type"], submitted.row["exit_reason"]) == ("SyntaxError", "failed")
    done = start(tmp_path, ROOT, "--list", str(tmp_path / "list"), SLURM_ARRAY_TASK_ID="2")
    assert done.stderr.startswith(
        f"error: {tmp_path}/list lists the runs of an array of 2 tasks, and this is "
    )


def attempts_of(folder, monkeypatch, *overrides):
    """Attempts of a job on three of four nodes, and the job."""
    monkeypatch.setattr(attempt, "_guarded", lambda *_: nullcontext())
    monkeypatch.setattr(attempt.queue, "own_nodes", lambda: ["n1", "n2", "n3", "n4"])
    losing = ["parallelism=fsdp", "parallelism.dp_shard=3", "cluster.ranks_per_node=1"]
    losing += ["training.global_batch_size=12", "cluster.on_node_loss=continue"]
    job = compose_job([*SLURM_JOB, *losing, "cluster.spare_nodes=1", *overrides])
    return attempt._Attempts(job, folder, Granted("RUNNING"), Received()), job


# The error of an attempt on three of four nodes, what SLURM says after it was away once, nodes that the check
# finds unfit (before the ranks, after them), and which nodes are lost and how many left. The first is this
# process's own.
@pytest.mark.parametrize(
    ("error", "unfit", "checked", "lost", "left"),
    rows("""
        peer    {n3: down}             []            [n3]      3
        peer    {n2: idle, n3: down*}  []            [n2, n3]  2
        peer    {n1: drained}          []            [n1]      0
        bug     {n3: down}             []            []        4
        memory  {n3: down}             []            []        4
        stop    {n3: down}             []            []        4
        peer    {}                     []            []        4
        peer    {}                     [null, n2]    [n2]      3
        peer    {}                     [n3]          [n3]      3
    """),
)
def test_which_nodes_are_lost(error, unfit, checked, lost, left, submitted, job, monkeypatch):
    errors = {**ERRORS, "bug": LookupError("broken"), "memory": MemoryError()}

    def run_ranks(*_):
        row = submitted.errors.record(1, errors[error])
        return row["exit_code"]

    def ask_slurm(*_):
        if away:
            raise away.pop()
        return unfit

    def check(*_):
        if checked and (node := checked.pop(0)):
            raise UnfitNodes({node: ["bad"]})

    away = [SlurmError("Unable to contact slurm controller")]
    monkeypatch.setattr(attempt, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(attempt, "_run_ranks", run_ranks)
    monkeypatch.setattr(attempt, "check_nodes", check)
    monkeypatch.setattr(attempt.queue, "unfit_nodes", ask_slurm)
    checks = "exclude" if checked else "off"
    attempts, job = attempts_of(submitted, monkeypatch, f"cluster.node_check={checks}")
    _, loss = attempts.run(job, 0.0)
    assert attempts.nodes == [node for node in ("n1", "n2", "n3", "n4") if node not in lost]
    assert (loss.nodes, loss.left) == (len(lost), left) if lost else loss is None


def test_a_spare_takes_the_place_of_a_slow_node_at_most_once_an_hour(submitted, monkeypatch):
    slowed = ["profiling.phases=true", "cluster.exclude_slow=true"]
    attempts, job = attempts_of(submitted, monkeypatch, *slowed)
    asked = threading.Event()
    attempts.received.stop_ranks = asked.set
    seconds = 60.0

    def run_ranks(*_):
        found = {"device": "H100", "phase": "forward", "excess": 0.3, "step": 20, "until": None}
        slow = json.dumps({"slow": [{"rank": 1, "host": "n2", **found}]})
        (submitted.path / "slow_ranks.json").write_text(slow)
        return EXIT_RESUMABLE if asked.wait(seconds) else EXIT_OK

    monkeypatch.setattr(attempt, "_run_ranks", run_ranks)
    monkeypatch.setattr(attempt, "LOOK_SECONDS", 0.01)
    code, loss = attempts.run(job, 0.0)
    assert (code, loss.left, attempts.nodes) == (EXIT_RESUMABLE, 3, ["n1", "n3", "n4"])
    assert "n2: rank 1 (n2, H100) computes 30% longer" in loss.words
    asked.clear()
    attempts.nodes.append("n5")
    seconds = 0.2
    assert attempts.run(job, 0.0) == (EXIT_OK, None)


# A job on three of four nodes loses n3. What happens when its process asks SLURM about the nodes, and their
# states; whether SLURM takes the job back into its queue; on which nodes ranks started, and how it ended.
@pytest.mark.parametrize(
    ("sinfo", "takes", "on", "code", "state"),
    rows("""
        ":; idle idle down idle"                  true   [n1 n2 n3, n1 n2 n4]  0   completed
        "fails 1; idle idle down idle"            true   [n1 n2 n3, n1 n2 n4]  0   completed
        "fails 9; idle idle down idle"            true   [n1 n2 n3]            75  requeued
        "fails 9; idle idle down idle"            false  [n1 n2 n3]            3   failed
        "kill -TERM $PPID; idle idle down idle"   true   [n1 n2 n3]            75  requeued
        "kill -USR2 $PPID; idle idle down idle"   true   [n1 n2 n3]            75  requeued
        ":; idle idle down* drained"              true   [n1 n2 n3, n1 n2]     0   completed
        ":; idle down down down"                  true   [n1 n2 n3]            75  requeued
        ":; idle down down down"                  false  [n1 n2 n3]            3   failed
        ":; down idle down idle"                  true   [n1 n2 n3]            75  requeued
    """),
)
def test_bad_luck_between_two_attempts(
    sinfo, takes, on, code, state, submitted, put, monkeypatch, signals
):
    run = submitted.path
    act, _, states = sinfo.partition("; ")
    listed = "\n".join(f"n{number} {state}" for number, state in enumerate(states.split(), 1))
    (run / "sinfo").write_text(f"{listed}\n")
    ended = json.dumps({"exit_code": EXIT_OK, "exit_reason": "completed", "state": "completed"})
    refused = "echo Unable to contact slurm controller >&2; exit 1"
    put(
        sinfo=f"""
            fails() {{ echo >> {run}/asked; [ $(wc -l < {run}/asked) -gt $1 ] || {{ {refused}; }}; }}
            {act}
            cat {run}/sinfo
        """,
        scontrol=f"""
            case "$*" in
                requeue*) {"exit" if takes else refused};;
                *hostnames*) printf 'n1\nn2\nn3\nn4\n';;
                *) echo JobState=RUNNING Restarts=0 NodeList=n[1-4];;
            esac
        """,
        srun=f"""
            nodes=$(echo "$*" | sed 's/.*--nodelist=//; s/ .*//; s/,/ /g')
            echo $nodes >> {run}/tried
            touch {run}/logs/rank0.out
            case "$nodes" in *n3*) echo 'srun: error: Node failure on n3' >&2; exit 1;; esac
            echo '{ended}' | tee {run}/status.json > {run}/result.json
        """,
    )
    monkeypatch.setattr(attempt, "RETRY_SECONDS", 0.0)
    if "9" in sinfo:
        monkeypatch.setattr(attempt, "ANSWER_SECONDS", 0.0)
    for name in ("SLURM_JOB_NAME", "SLURM_JOB_NODELIST"):
        monkeypatch.setenv(name, "a")
    monkeypatch.setattr(attempt, "_guarded", lambda *_: nullcontext())
    losing = ["parallelism=fsdp", "cluster.ranks_per_node=1", "training.global_batch_size=12"]
    losing = [*SLURM_JOB, *losing, "cluster.spare_nodes=1", "cluster.on_node_loss=continue"]
    job, smaller = (compose_job([*losing, f"parallelism.dp_shard={ranks}"]) for ranks in (3, 2))
    monkeypatch.setattr(losses, "read_layouts", lambda _: {2: Layout(2, smaller)})
    (run / "job.json").write_text(job.to_json())
    assert attempt.run(submitted, Allocation("7", 0), signals) == code
    assert (run / "tried").read_text().splitlines() == on
    assert submitted.state == state
