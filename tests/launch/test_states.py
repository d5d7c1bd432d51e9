"""The state of a run from its folder and SLURM's queue, and the rows of jobs that ended without one."""

import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from unittest import mock

import pytest

from harness.compose.composer import compose_job
from harness.compose.verb import VERBS
from harness.launch.queue import Jobs, Queued
from harness.launch.state import SlurmJobRecord, state_of
from harness.launch.submit import states_of
from harness.launch.sweep.folder import Point, SweepFolder
from harness.launch.sweep.run import Selection
from harness.run.folder import RunFolder
from harness.util.errors import EXIT_MACHINE, EXIT_OK, EXIT_USER

POINTS = 12
COLUMNS = r"^(.{12})(.{10})(.{10})(\w+)(.*)$"


SENT = SlurmJobRecord("a", None, "7")
QUEUED = {"waits": "PENDING|Resources", "runs": "RUNNING|None", "ends": "COMPLETING|None"}
QUEUED |= {
    "held back": "SUSPENDED|None",
    "held": "REQUEUE_HOLD|JobHeldUser",
    "never": "PENDING|PartitionConfig",
    "gone": "NODE_FAIL|None",
}
# What status.json says, the record, the queue (None: unknown), and the state. The first row that holds wins.
STATES = """
completed   sent      waits     completed
failed      sent      waits     pending    job 7 waits: Resources, requeued by SLURM, after peer: rank
failed      begun     waits     pending    job 7 waits: Resources, requeued by SLURM, after peer: rank
failed      sent      held      pending    job 7 waits: JobHeldUser, requeued by SLURM, after peer: rank
failed      begun     runs      running    job 7, after peer: rank 0: lost
failed      begun     ends      running    job 7, after peer: rank 0: lost
failed      sent      ends      failed     rank 0: lost
failed      sent      gone      failed     rank 0: lost
failed      begun     None      failed     rank 0: lost
failed      begun     gone      lost       SLURM job 7 ended without a result
running     sent      held back suspended  job 7: scontrol resume 7 continues it
submitted   sent      never     blocked    job 7 can never start: PartitionConfig
submitted   sent      waits     pending    job 7 waits: Resources
requeued    restarted waits     pending    job 7 waits: Resources, started 3 times
interrupted sent      runs      running    job 7
running     sent      ends      running    job 7
interrupted sent      gone      stopped    before its end; the same command continues it
interrupted cancelled gone      cancelled
interrupted begun     None      stopped
interrupted begun     gone      lost       SLURM job 7 ended without a result
planned     none      gone      planned
-           none      gone      planned
running     none      alive     running
running     none      gone      lost       the process that ran it is gone
submitted   sent      None      pending    silent
running     sent      None      running    silent
submitted   unsent    gone      planned    never submitted
running     sent      gone      lost       SLURM job 7 ended without a result
"""
RECORDS = {
    "none": None,
    "sent": SENT,
    "unsent": replace(SENT, job_id=None),
    "begun": replace(SENT, begun=True),
    "restarted": replace(SENT, restarts=2),
    "cancelled": replace(SENT, cancelled=True),
}


@pytest.mark.parametrize("row", STATES.splitlines()[1:])
def test_the_state_of_a_run_is_that_of_the_first_row_that_holds(row, tmp_path):
    status, record, listed, state, reason = (each.strip() for each in re.split(COLUMNS, row)[1:-1])
    queue = Jobs([Queued("7", "a", *QUEUED[listed].split("|"))]) if listed in QUEUED else Jobs([])
    row = {"error.kind": "peer", "error.rank": 0, "error.message": "lost"}
    folder = mock.Mock(
        RunFolder, may_be_running=listed == "alive", stop_reason=None, row=row, path=tmp_path
    )
    folder.state = None if status == "-" else status
    found = state_of(folder, RECORDS[record], None if listed == "None" else queue, "silent")
    assert found[0] == state and found[1].startswith(reason), found
    assert found[2] == {"blocked": "user", "lost": "unknown", "failed": "peer"}.get(state)


class Slurm:
    """Mocked SLURM commands that print given output and record their calls; a sweep submitted as array 7."""

    def __init__(self, put, monkeypatch, sweep):
        for name in ("squeue", "scontrol", "sacct", "scancel"):
            script = (
                f'cd "$(dirname "$0")"; echo "{name} $*" >> calls\n'
                f"[ -f {name}.fails ] && cat {name}.fails >&2 && exit 1\n"
                f'case "$*" in *--jobs=*) cat {name}.by_id;; *) cat {name}.out;; esac'
            )
            self.folder = put(**{name: script})
            self.prints(name)
            self.prints(name, file="by_id")
        self.sweep, self.monkeypatch = sweep, monkeypatch

    def prints(self, command, *lines, file="out"):
        (self.folder / f"{command}.{file}").write_text("".join(f"{line}\n" for line in lines))

    def calls(self):
        """The calls since the last call of this method."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def verb(self, name, *arguments, run=".", code=EXIT_OK):
        """Run ``harness runs``, or a command of ``harness sweep``; return stdout and stderr."""
        said, warned = io.StringIO(), io.StringIO()
        typed = [str(self.sweep.path / run), *arguments]
        verb = VERBS["runs" if name == "runs" else "sweep"]
        self.monkeypatch.setattr("sys.argv", [name, *([] if name == "runs" else [name]), *typed])
        with redirect_stdout(said), redirect_stderr(warned), pytest.raises(SystemExit) as ended:
            verb.main()
        assert ended.value.code == code, warned.getvalue()
        return said.getvalue(), warned.getvalue()


@pytest.fixture
def mocked(put, monkeypatch, tmp_path):
    monkeypatch.setattr("harness.launch.state.LAST_WRITES_SECONDS", 0.0)
    folder = SweepFolder(tmp_path / "sweep")
    job = compose_job(
        ["cluster=slurm_cpu", "cluster.time=30", f"runs_dir={tmp_path}", "name=sweep"]
    )
    points = [Point(f"p{n}", folder.path / f"p{n}", [f"training.seed={n}"]) for n in range(POINTS)]
    for n, point in enumerate(points):
        RunFolder(point.run_dir).plan(job, point.overrides)
        RunFolder(point.run_dir).set_status("submitted")
        SlurmJobRecord("sweep.1", n, f"7_{n}").write(point.run_dir)
    folder.add(points, [])
    return Slurm(put, monkeypatch, folder)


def test_slurm_is_queried_once(mocked):
    # One waits, one failed recently, one is another user's, three are in accounting, the others unknown.
    mocked.prints("squeue", "7_0|sweep.1|PENDING|Resources", "7_1|sweep.1|OUT_OF_MEMORY|None")
    mocked.prints("squeue", "7_2|sweep.1|RUNNING|None", file="by_id")
    mocked.prints(
        "sacct", "7_3|NODE_FAIL|sweep.1", "7_4|CANCELLED by 1000|sweep.1", "7_5|TIMEOUT|sweep.1"
    )
    for number in (1, 3):
        RunFolder(mocked.sweep.points()[number].run_dir).set_status("running")
    # Rank 0 has written that it was stopped, and the batch process has not written its end.
    killed = mocked.sweep.points()[6].run_dir
    RunFolder(killed).set_status("interrupted", exit_code=75)
    SlurmJobRecord("sweep.1", 6, "7_6", begun=True).write(killed)
    out, err = mocked.verb("runs")
    called = mocked.calls()
    assert [call.split()[0] for call in called] == ["squeue", "squeue", "sacct"]
    assert "7_0," not in called[1] and "7_2," not in called[2] and "7_11" in called[2]
    assert out.splitlines()[-1] == "1 pending, 9 failed, 1 running, 1 cancelled"
    kinds = "1 out_of_memory, 1 node, 1 cancelled, 1 preempted, 1 machine, 5 unknown"
    left = "11 jobs not in SLURM's queue, without a result; in 0 s missing rows are written"
    assert err == f"{left}\n10 points ended without a result: {kinds}\n"
    row = json.loads((mocked.sweep.points()[3].run_dir / "result.json").read_text())
    assert (row["error.kind"], row["exit_reason"]) == ("node", "failed")
    assert "SLURM says NODE_FAIL" in row["error.message"]
    row = json.loads((killed / "result.json").read_text())
    assert (row["error.kind"], row["exit_code"]) == ("machine", EXIT_MACHINE)
    assert row["error.message"].startswith(
        "the batch process of SLURM job 7_6 was killed; SLURM does not"
    )
    # The others' rows are written; only the other user's job is queried again.
    out, err = mocked.verb("runs")
    assert [call.split()[0] for call in mocked.calls()] == ["squeue", "squeue"]
    assert err == "1 job not in SLURM's queue, without a result; in 0 s missing rows are written\n"


def test_a_sweep_is_cancelled_by_one_command(mocked, monkeypatch):
    mocked.prints(
        "squeue",
        *(f"7_{n}|sweep.1|PENDING|Resources" for n in range(POINTS - 1)),
        "9|single|RUNNING|None",
    )
    SlurmJobRecord("single", None, "9").write(mocked.sweep.points()[-1].run_dir)
    out, _ = mocked.verb("cancel")
    assert out == f"cancelled {POINTS} of {POINTS} points\n"
    tasks = " ".join(f"7_{n}" for n in range(POINTS - 1))
    assert mocked.calls()[1:] == [f"scancel {tasks} 9"]
    mocked.prints("squeue")
    reads, read_job = [], RunFolder.read_job
    monkeypatch.setattr(
        RunFolder, "read_job", lambda self: reads.append(self.path) or read_job(self)
    )
    out, err = mocked.verb("runs")
    assert out.splitlines()[-1] == f"{POINTS} cancelled"
    assert len(reads) == POINTS, "reading a job is most of the work"
    assert err.splitlines()[1] == f"{POINTS} points ended without a result: {POINTS} cancelled"
    assert not list(mocked.sweep.path.glob("*/errors/*"))
    row = json.loads((mocked.sweep.points()[0].run_dir / "result.json").read_text())
    assert (row["exit_reason"], row["exit_code"]) == ("interrupted", 130)
    out, err = mocked.verb("runs")
    assert out.splitlines()[-1] == f"{POINTS} cancelled" and not err


def test_cancel_fails_unless_the_job_has_ended(mocked, monkeypatch):
    mocked.prints("squeue", "7_0|sweep.1|PENDING|Resources", "7_1|sweep.1|PENDING|Resources")
    over = "scancel: error: Kill job error on job id 7_0: Invalid job id specified"
    mocked.prints("scancel", over, file="fails")
    mocked.verb("cancel")
    mocked.prints("scancel", over, "scancel: error: 7_1: Access/permission denied", file="fails")
    _, err = mocked.verb("cancel", code=EXIT_MACHINE)
    assert "7_1: Access/permission denied" in err
    (mocked.folder / "scancel").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr("harness.launch.queue.COMMAND_SECONDS", 1)
    silent = ("", "error: scancel: no answer within 1 s\n")
    assert mocked.verb("cancel", code=EXIT_MACHINE) == silent


def test_without_slurm_jobs_may_run(mocked, monkeypatch):
    mocked.prints(
        "squeue", "squeue: fatal: Could not establish a configuration source", file="fails"
    )
    _, err = mocked.verb("cancel", code=EXIT_USER)
    assert err.startswith(
        "error: this machine has no SLURM: squeue finds no configuration; would work: "
    )
    monkeypatch.setenv("PATH", "/nowhere")
    out, err = mocked.verb("runs")
    assert out.splitlines()[-1] == f"{POINTS} pending" and not err
    assert "no SLURM here to read its state from" in out
    out, err = mocked.verb("cancel", code=EXIT_USER)
    assert out == f"cancelled 0 of {POINTS} points\n"
    assert f"{POINTS} points submitted to SLURM, and there is no squeue here" in err


def test_folders_are_shown_without_an_answer(mocked):
    mocked.prints(
        "squeue", "slurm_load_jobs error: Unable to contact slurm controller", file="fails"
    )
    RunFolder(mocked.sweep.points()[0].run_dir).set_status("running")
    RunFolder(mocked.sweep.points()[1].run_dir).set_status("failed")
    out, err = mocked.verb("runs", code=EXIT_MACHINE)
    assert "Unable to contact slurm controller" in err and err.count("\n") == 1
    assert out.splitlines()[-1] == f"1 running, 1 failed, {POINTS - 2} pending"
    assert "SLURM does not answer" in out.splitlines()[1]
    out, _ = mocked.verb("runs", "--json", code=EXIT_MACHINE)
    states = [point["state"] for point in json.loads(out)["runs"]]
    assert states == ["running", "failed", *["pending"] * (POINTS - 2)]


def test_suspended_and_blocked_points(mocked):
    points = mocked.sweep.points()
    for n, point in enumerate(points[4:], start=4):
        SlurmJobRecord("sweep.2", n).write(
            point.run_dir
        )  # the controller was killed before it called sbatch
    mocked.prints(
        "squeue",
        "7_0|sweep.1|SUSPENDED|None",
        *("7_1|sweep.1|PENDING|DependencyNeverSatisfied", "7_2|sweep.1|PENDING|PartitionConfig"),
        "7_3|sweep.1|PENDING|QOSMaxCpuPerJobLimit",
    )
    out, err = mocked.verb("runs")
    assert out.splitlines()[-1] == f"1 suspended, 3 blocked, {POINTS - 4} planned" and not err
    assert "user: job 7_2 can never start: PartitionConfig; would work: cancel it" in out
    assert "never submitted" in out.splitlines()[5]
    # Neither is submitted a second time.
    wanted = Selection.of(mocked.sweep, points, states_of(points)).wanted
    assert [point.id for point in wanted] == [point.id for point in points[4:]]
    out, _ = mocked.verb("cancel")
    assert out == f"cancelled 4 of {POINTS} points\n"


def test_failed_points_that_slurm_puts_back_into_its_queue_are_started_once(mocked):
    """One lost a node, a person requeued one, SLURM is ending one, and one died with its node."""
    rows = {0: ("peer", "reset by peer"), 3: ("peer", "reset by peer")}
    points = mocked.sweep.points()
    for n, point in enumerate(points):
        folder = RunFolder(point.run_dir)
        kind, message = rows.get(n, ("bug", "no"))
        row = {
            "error.kind": kind,
            "error.rank": 0,
            "error.message": message,
            "exit_code": EXIT_MACHINE,
        }
        (folder.path / "result.json").write_text(json.dumps(row))
        folder.set_status("failed")
        SlurmJobRecord("sweep.1", n, f"7_{n}", begun=n in (0, 3)).write(folder.path)
    said = "srun: error: Node failure on node2\n"
    (points[0].run_dir / "logs").mkdir(exist_ok=True)
    (points[0].run_dir / "logs" / "srun.err").write_text(said)
    mocked.prints("squeue", "7_0|sweep.1|PENDING|BeginTime", "7_1|sweep.1|REQUEUE_HOLD|JobHeldUser")
    with (mocked.folder / "squeue.out").open("a") as out:
        out.write("7_2|sweep.1|COMPLETING|None\n7_3|sweep.1|NODE_FAIL|None\n")
    out, _ = mocked.verb("runs")
    assert out.splitlines()[-1] == f"2 pending, {POINTS - 2} failed"
    assert "job 7_0 waits: BeginTime, requeued by SLURM, after node: node2 failed" in out
    assert "requeued by SLURM, after bug: rank 0: no" in out
    row = json.loads((points[3].run_dir / "result.json").read_text())
    assert row["error.kind"] == "node" and "SLURM says NODE_FAIL" in row["error.message"]
    assert not mocked.verb("runs")[1], "its row is written once"
    wanted = Selection.of(mocked.sweep, points, states_of(points)).wanted
    assert [point.id for point in wanted] == [point.id for point in points[2:]]
    out, _ = mocked.verb("cancel")
    assert out == f"cancelled 2 of {POINTS} points\n" and mocked.calls()[-1] == "scancel 7_0 7_1"


@pytest.mark.parametrize("trouble", ["held", "job.json", "slurm/job.json"])
def test_a_damaged_point(trouble, mocked):
    """Another process that submits a point again holds its folder."""
    folder = RunFolder(mocked.sweep.points()[0].run_dir)
    if trouble == "held":
        folder.hold()
    else:
        (folder.path / trouble).write_text("{")
    out, err = mocked.verb("runs")
    folder.release()
    if trouble != "held":
        [first, *_] = json.loads(mocked.verb("runs", "--json")[0])["runs"]
        assert first["reason"].startswith(f"{folder.path / trouble}: damag")
    assert out.splitlines()[-1] == f"1 lost, {POINTS - 1} failed"
    assert err.splitlines()[1:] == [
        f"{POINTS - 1} points ended without a result: {POINTS - 1} unknown"
    ]


@pytest.mark.parametrize(
    ("field", "text", "words"),
    [
        (
            "account",
            "a\ntouch F",
            "cluster.account=a\\ntouch F: must be one line of printable text",
        ),
        ("env", {"HF_TOKEN": "hf_x"}, "cluster.env.HF_TOKEN=***: holds a value of HF_TOKEN"),
    ],
)
def test_resumed_jobs_keep_the_rules_for_texts(mocked, field, text, words):
    path = mocked.sweep.points()[0].run_dir / "job.json"
    job = json.loads(path.read_text())
    job["cluster"][field] = text
    path.write_text(json.dumps(job))
    _, err = mocked.verb("resume", code=EXIT_USER)
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert words in line and "hf_x" not in line


def test_single_runs_have_the_same_verbs(mocked):
    (mocked.sweep.path / "sweep.jsonl").unlink()
    (
        mocked.sweep.path / "p2" / "overrides.txt"
    ).unlink()  # a controller was killed before it wrote it
    mocked.prints("squeue", "7_0|sweep.1|PENDING|Resources", "7_1|sweep.1|RUNNING|None")
    out, _ = mocked.verb("runs", run="p0")
    assert "job 7_0 waits: Resources" in out and out.endswith("1 pending\n")
    out, _ = mocked.verb("cancel", run="p0")
    assert out == "cancelled 1 of 1 point\n" and mocked.calls()[-1] == "scancel 7_0"
    # A folder of all runs of one name.
    out, _ = mocked.verb("runs")
    assert {"1 pending", "1 running"} <= set(out.splitlines()[-1].split(", "))
