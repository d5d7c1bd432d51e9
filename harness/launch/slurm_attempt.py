"""One attempt at a SLURM job, on its first node: start the ranks, wait for them, complete ``result.json``.

This process does for a SLURM job what the controller does for a local job. It holds the run
folder's lock and the rendezvous store, waits for ``srun``, records ranks that ended without
recording an error, and completes the run's row in ``result.json``. When SLURM asked the ranks to
stop and they have saved, it requeues the job under the same id.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from harness.checkpoint.resume import is_finished, show_finished
from harness.config.failures import VICTIMS, kind_of_text
from harness.config.job import Job
from harness.launch import queue
from harness.launch.begin import begin_again, earlier_attempt
from harness.launch.faults import (
    LostNodes,
    UnfitNodes,
    check_nodes,
    dead_ranks,
    last_lines,
    only_victims,
    record_dead,
    record_left,
    unnamed_ranks,
)
from harness.launch.losses import Loss, go_on, lost_ranks
from harness.launch.state import NODE_FAILURE, SlurmJobRecord
from harness.metrics.slow_ranks import slow_ranks
from harness.run.folder import RunFolder
from harness.train.finish import find_cause, finish_run
from harness.train.process import rank_environment, rendezvous_store
from harness.train.rank import leave
from harness.util.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_RESUMABLE,
    STOPPED,
    MachineError,
    UserError,
)

if TYPE_CHECKING:
    from harness.launch.batch import Received

T = TypeVar("T")
POLL_SECONDS = 0.2
# A lost node keeps its file locks until its lease ends: 90 s with NFS.
HOLD_SECONDS = 180.0
# How long to retry when SLURM's controller is too busy to return a job's state.
ANSWER_SECONDS = 60.0
RETRY_SECONDS = 5.0
SRUN_LOG = "srun.err"
# How often to look for slow ranks, and how long to leave all nodes alone after one was replaced.
LOOK_SECONDS = 10.0
CONDEMN_SECONDS = 3600.0

# slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2026-11-22T12:00:00 DUE TO JOB REQUEUE ***
_CANCELLED = re.compile(r"\*\*\* JOB \d+ ON \S+ CANCELLED AT \S+ (?:DUE TO )?(.*)\*\*\*")
_BY_SLURM = ("TIME LIMIT", "PREEMPTION", "NODE FAILURE", "JOB REQUEUE")

SUPERSEDED = "SUPERSEDED"
# In these states the job has its nodes until this process ends, or it is not known whether it has.
_KEPT = ("RUNNING", "TIMEOUT", "UNKNOWN")
# In these states SLURM takes the nodes away; exit codes of the processes then mean nothing.
_TAKEN = {*queue.REQUEUED, "PREEMPTED", "TIMEOUT", "NODE_FAIL", "CANCELLED", SUPERSEDED}


def run_and_leave(run_dir: Path, received: Received) -> NoReturn:
    """Run the job of a run folder and end the process with its exit code."""
    job_id = os.environ["SLURM_JOB_ID"]
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        job_id = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    try:
        code = run(RunFolder(run_dir), Allocation(job_id, restarts), received)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        code = error.exit_code
    except Exception:
        traceback.print_exc()
        code = EXIT_BUG
    leave(code)


class Allocation:
    """The SLURM allocation of this job."""

    def __init__(self, job_id: str, restarts: int) -> None:
        self.job_id = job_id
        self.restarts = restarts

    def state(self) -> str:
        """Return the job's state in SLURM's terms; SUPERSEDED when SLURM has restarted the job elsewhere.

        Returns UNKNOWN when SLURM does not answer, as may happen during a mass preemption.
        """
        try:
            fields = _answered(lambda: queue.describe(self.job_id))
        except queue.SlurmError as error:
            sys.stderr.write(f"WARNING cannot read the state of this job: {error}\n")
            return "UNKNOWN"
        if int(fields.get("Restarts", "0")) > self.restarts:
            return SUPERSEDED
        return fields.get("JobState", "UNKNOWN")


def _answered(ask: Callable[[], T]) -> T:
    """Ask SLURM, and again for a minute while its controller is away or too busy."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            return ask()
        except queue.SlurmError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)


def run(folder: RunFolder, allocation: Allocation, received: Received) -> int:
    """Run the job of a run folder; return its exit code."""
    started = time.monotonic()
    job = folder.read_job()
    if is_finished(job, folder.path):  # the script was submitted again by hand
        return show_finished(job, folder.path)
    if not folder.path.name.startswith(job.id):  # a point of a sweep adds a digest
        sys.stderr.write(f"WARNING {folder.path}/job.json was edited: this job is {job.id}\n")
    _begin(job, folder, allocation)
    sys.stdout.write(f"run folder {folder.path}\noutput of rank 0 {folder.path}/logs/rank0.out\n")
    sys.stdout.flush()
    try:
        attempts = _Attempts(job, folder, allocation, received)
        code, loss = attempts.run(job, started)
        while loss is not None:
            smaller = go_on(job, folder, code, loss)
            if smaller is None:
                raise attempts.error
            job = smaller
            code, loss = attempts.run(job, time.monotonic())
    except Exception as error:
        # The ranks may start elsewhere, or later: SLURM's controller was away.
        unfit = isinstance(error, UnfitNodes) and job.cluster.node_check == "exclude"
        may_pass = unfit or isinstance(error, queue.SlurmError | LostNodes)
        if may_pass and allocation.restarts < job.cluster.max_requeues:
            return _requeue_after(error, job, folder, allocation)
        code = folder.errors.record(None, error)["exit_code"]
    slow = _slow_nodes(job, folder) if code in STOPPED else []
    try:
        # A job that waits can be changed, and one that was started again cannot.
        if slow and queue.is_requeued(allocation.job_id):
            queue.exclude(allocation.job_id, slow)
            sys.stderr.write(f"excluded {', '.join(slow)}, where ranks are slow\n")
    except queue.SlurmError as error:
        sys.stderr.write(f"WARNING cannot exclude {', '.join(slow)} from this job: {error}\n")
    state = allocation.state()
    if state == SUPERSEDED:
        return code  # the run folder now belongs to another attempt
    _end(folder, is_taken=state not in _KEPT)
    code = finish_run(job, folder, code)
    if code not in STOPPED or state not in _KEPT or allocation.state() not in _KEPT:
        return code  # SLURM is taking the nodes, and decides whether to requeue the job
    if not _has_progress(folder):
        rule = "stopped by SLURM before its first step was done, twice in a row"
        works = "a longer cluster.time, a smaller cluster.signal_seconds"
        folder.errors.record(None, NoProgress(f"{rule}; would work: {works}"))
        return finish_run(job, folder, NoProgress.exit_code)
    return _requeue(job, folder, allocation)


class _Attempts:
    """Attempts on the nodes of the allocation, of which ``cluster.on_node_loss=continue`` may lose some.

    Attributes:
        error: why the last attempt ended, if it lost nodes.
    """

    def __init__(
        self, job: Job, folder: RunFolder, allocation: Allocation, received: Received
    ) -> None:
        self.folder = folder
        self.allocation = allocation
        self.received = received
        self.error: Exception
        self.next_condemned = 0.0
        self.checks = job.cluster.node_check
        self.goes_on = job.cluster.on_node_loss == "continue"
        self.nodes = queue.own_nodes() if self.goes_on or self.checks != "off" else []

    def run(self, job: Job, started: float) -> tuple[int, Loss | None]:
        """Check the nodes and run the ranks; return the exit code, and which nodes were lost."""
        nodes = self.nodes[: job.cluster.nodes_for(job.world_size)[0]]
        # Also while nodes are checked and it is found out which are lost, which may take minutes.
        with _guarded(self.allocation, nodes if self.goes_on else [], self.folder.path / "logs"):
            return self._guarded_run(job, nodes, started)

    def _guarded_run(self, job: Job, nodes: list[str], started: float) -> tuple[int, Loss | None]:
        if self.checks != "off":
            try:
                check_nodes(job, self.folder.path, nodes)
            except UnfitNodes as error:
                if not self.goes_on or self.checks != "exclude":
                    raise
                code = int(self.folder.errors.record(None, error)["exit_code"])
                return code, self._without(error.nodes, str(error), error)
        on = nodes if self.goes_on else []
        slow: dict[str, list[str]] = {}
        with self._watched(job, on, slow):
            code = _run_ranks(job, self.folder, self.allocation, started, self.received, on)
        if slow and code == EXIT_RESUMABLE and not self.received.has_any:
            replaced = UnfitNodes(slow)
            return code, self._without(replaced.nodes, str(replaced), replaced)
        if not self.goes_on or code in (EXIT_OK, *STOPPED):
            return code, None
        lost, why = self._lost(job, nodes)
        return code, self._without(lost, f"{', '.join(lost)} lost: {why}", LostNodes(why))

    @contextmanager
    def _watched(self, job: Job, nodes: list[str], slow: dict[str, list[str]]) -> Iterator[None]:
        """Ask the ranks to stop, at most once an hour, if a spare node can replace a slow one.

        Args:
            slow: gets the slow nodes, each with its slow ranks.
        """
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(LOOK_SECONDS):
                if slow or time.monotonic() < self.next_condemned:
                    continue
                found: dict[str, list[str]] = {}
                for each in slow_ranks(self.folder.path):
                    if each.until is None:
                        node = nodes[each.rank * len(nodes) // job.world_size]
                        found.setdefault(node, []).append(str(each))
                if found and nodes[0] not in found and len(self.nodes) >= len(nodes) + len(found):
                    self.next_condemned = time.monotonic() + CONDEMN_SECONDS
                    slow.update(found)
                    self.received.stop_ranks()

        if job.cluster.exclude_slow and nodes:
            threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _lost(self, job: Job, nodes: list[str]) -> tuple[list[str], str]:
        """Return the nodes that are the cause of the attempt's end, and why; none if it is another."""
        cause = find_cause(self.folder)
        if cause is None or cause["kind"] not in ("node", "machine", "unknown", *VICTIMS):
            return [], ""
        ranks, why = lost_ranks(self.folder, [])
        local = job.world_size // len(nodes)
        lost = {nodes[rank // local]: why for rank in ranks}
        unfit = _answered(lambda: queue.unfit_nodes(self.allocation.job_id, self.nodes))
        # Spare nodes may have failed unnoticed.
        self.nodes = [node for node in self.nodes if node in nodes or node not in unfit]
        lost |= {node: f"SLURM says {unfit[node]}" for node in nodes if node in unfit}
        if not lost and self.checks == "exclude":
            try:
                check_nodes(job, self.folder.path, nodes)
            except UnfitNodes as error:
                lost = dict.fromkeys(error.nodes, str(error))
        return list(lost), "; ".join(dict.fromkeys(lost.values()))

    def _without(self, lost: list[str], words: str, error: Exception) -> Loss | None:
        # With the first node this process ends, so what it runs on must stay.
        first = self.nodes[0]
        self.nodes = [node for node in self.nodes if node not in lost]
        left = 0 if first in lost else len(self.nodes)
        self.error = error
        return Loss(words, len(lost), left) if lost else None


@contextmanager
def _guarded(allocation: Allocation, nodes: list[str], logs: Path) -> Iterator[None]:
    """Have the second node requeue the job if it loses the first one, and this process with it."""
    if len(nodes) < 2:
        yield
        return
    command = ["srun", "--overlap", "--nodes=1", f"--nodelist={nodes[1]}", "--ntasks=1"]
    command += ["--mpi=none", "--export=ALL", sys.executable, "-m", "harness.launch.guard"]
    with (logs / "guard.err").open("ab") as log:
        guard = subprocess.Popen(
            [*command, allocation.job_id, nodes[0]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            yield
        finally:
            guard.terminate()  # without waiting: its node may be lost


def _has_progress(folder: RunFolder) -> bool:
    """Whether this attempt or the one before finished a step; True for the first attempt."""
    earlier = earlier_attempt(folder.path)
    if earlier is None or folder.layout:
        return True
    rows = (folder.row, RunFolder(earlier).row)
    return any((row.get("step") or 0) > (row.get("start_step") or 0) for row in rows)


def _begin(job: Job, folder: RunFolder, allocation: Allocation) -> None:
    """Lock the run folder for this attempt; wait for the submitting process to release it."""
    deadline = time.monotonic() + HOLD_SECONDS
    while True:
        try:
            begin_again(folder, job)
            break
        except UserError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    # The record in the folder is another job's if the script was submitted again by hand.
    before = SlurmJobRecord.read(folder.path)
    SlurmJobRecord(
        os.environ["SLURM_JOB_NAME"],
        None if task is None else int(task),
        allocation.job_id,
        allocation.restarts,
        logs=None if before is None else before.logs,
        begun=True,
    ).write(folder.path)


def _end(folder: RunFolder, *, is_taken: bool = False) -> None:
    """Note in the job's record that this attempt ends by itself, and whether the job was cancelled."""
    record = SlurmJobRecord.read(folder.path)
    if record is None:
        return  # somebody has removed it
    # Until this process has ended, SLURM's state is COMPLETING whatever the cause. Its log has the
    # reason.
    said = ""
    if is_taken and record.log is not None and record.log.is_file():
        said = record.log.read_text(errors="replace")
    reasons = _CANCELLED.findall(said)
    cancelled = bool(reasons) and not reasons[-1].startswith(_BY_SLURM)
    replace(record, begun=False, cancelled=cancelled or record.cancelled).write(folder.path)


def _run_ranks(
    job: Job,
    folder: RunFolder,
    allocation: Allocation,
    started: float,
    received: Received,
    on: Sequence[str] = (),
) -> int:
    logs = folder.path / "logs"
    with rendezvous_store() as port, (logs / SRUN_LOG).open("ab") as log:
        if "OMP_NUM_THREADS" not in job.cluster.env:
            os.environ.pop("OMP_NUM_THREADS", None)  # of the submitting shell, passed on by sbatch
        # srun sets each task's rank.
        environment = {**os.environ, **rank_environment(job, port, started)}
        returned = None

        def start() -> str:
            nonlocal returned
            returned = None
            before = os.fstat(log.fileno()).st_size
            if received.has_any:
                return ""  # the signal would kill srun before it can handle it
            command = srun_command(job, folder.path, on)
            srun = subprocess.Popen(command, env=environment, stderr=log)
            received.forward_to(srun.pid)
            returned = srun.wait()
            received.process = None
            if any(logs.glob("rank*")):
                return ""
            return (logs / SRUN_LOG).read_bytes()[before:].decode(errors="replace")

        queue.until_answered(start)
    if returned is None:
        return EXIT_INTERRUPTED
    return _verdict(folder, allocation, returned, job.world_size)


def _verdict(folder: RunFolder, allocation: Allocation, returned: int, ranks: int) -> int:
    """Determine why the ranks ended, and record a rank that could not record its error itself.

    An error that is not a consequence of another rank's failure comes first, then a rank that was
    killed. If srun ended rank 0 because another rank was killed, rank 0's error is a consequence.
    So is a failed collective. If all recorded errors say that a peer is gone, the rank that
    recorded none is the cause.
    """
    error = folder.errors.first()
    code = folder.row.get("exit_code")
    if error is not None and error["kind"] not in VICTIMS:
        return int(error["exit_code"])
    if code in (EXIT_OK, EXIT_RESUMABLE):  # all ranks have agreed to end there
        return int(code)
    if allocation.state() in _TAKEN:
        return EXIT_INTERRUPTED  # SLURM ended the ranks; the errors they recorded are not the cause
    logs = folder.path / "logs"
    if returned < 0:  # srun was killed, and its end has ended the ranks
        return int(folder.errors.record(None, StepFailed(returned, logs))["exit_code"])
    said = (logs / SRUN_LOG).read_text(errors="replace")
    if failed := NODE_FAILURE.findall(said):
        error = folder.errors.record(None, LostNodes(f"{', '.join(failed)} failed"))
        return int(error["exit_code"])
    if "forcing job termination" in said:  # srun got SIGTERM, as from scancel --full --signal=TERM
        return EXIT_INTERRUPTED
    dead = record_dead(folder, dead_ranks(said, logs))
    if not dead and only_victims(folder):
        dead = record_dead(folder, dead_ranks(said, logs, late=True))
    if not dead and (error is not None or returned == 0):
        dead = record_left(folder, unnamed_ranks(said, ranks))
    if dead:
        return dead[0].exit_code
    if code == EXIT_INTERRUPTED:
        return EXIT_INTERRUPTED
    if error is not None and error["kind"] != "interrupted":
        return int(error["exit_code"])
    return int(folder.errors.record(None, StepFailed(returned, logs))["exit_code"])


class NoProgress(MachineError):
    kind = "preempted"


class StepFailed(MachineError):
    """srun failed or was killed, and no rank recorded a reason."""

    def __init__(self, code: int, logs: Path) -> None:
        tail = last_lines(logs / SRUN_LOG)
        said = "\n".join([tail, *map(last_lines, logs.glob("rank*.err"))])
        self.kind = "machine" if code < 0 else kind_of_text(said) or "unknown"
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        super().__init__(f"srun {how}{tail}")


def _requeue(job: Job, folder: RunFolder, allocation: Allocation) -> int:
    """Requeue a job that stopped after saving, at most ``cluster.max_requeues`` times."""
    if allocation.restarts >= job.cluster.max_requeues:
        limit = f"cluster.max_requeues={job.cluster.max_requeues} allows no further requeue"
        reason = (
            f"SLURM stopped the job, or its time limit was reached, and {limit}; the same command "
            "continues from its last checkpoint"
        )
        folder.set_status("interrupted", exit_code=EXIT_RESUMABLE, reason=reason)
        sys.stderr.write(f"{reason}\n")
        return EXIT_RESUMABLE
    if not _put_back(folder, allocation, _slow_nodes(job, folder)):
        folder.set_status("interrupted", exit_code=EXIT_RESUMABLE)
    return EXIT_RESUMABLE


def _put_back(
    folder: RunFolder, allocation: Allocation, without: list[str], words: str = ""
) -> bool:
    """Requeue the job without some nodes; return whether SLURM has done so."""
    excluded = {"excluded": without} if without else {}
    folder.set_status("requeued", restarts=allocation.restarts + 1, **excluded)
    folder.release()
    try:
        queue.requeue(allocation.job_id, without)
    except queue.SlurmError as error:
        sys.stderr.write(f"WARNING cannot requeue this job{words}: {error}\n")
        return False
    return True


def _slow_nodes(job: Job, folder: RunFolder) -> list[str]:
    if not job.cluster.exclude_slow:
        return []
    return sorted({each.host for each in slow_ranks(folder.path) if each.until is None})


def _requeue_after(error: Exception, job: Job, folder: RunFolder, allocation: Allocation) -> int:
    """Requeue a job whose ranks could not start, without unfit nodes; fail if that is impossible."""
    nodes = error.nodes if isinstance(error, UnfitNodes) else []
    without = f" without {', '.join(nodes)}" if nodes else ""
    sys.stderr.write(f"WARNING requeueing{without}: {error}\n")
    _end(folder)
    # If SLURM has taken the nodes, the job is in the queue anyway, and may get these nodes again.
    is_queued = _put_back(folder, allocation, nodes, without)
    if is_queued or allocation.state() in _TAKEN:
        return EXIT_RESUMABLE
    return finish_run(job, folder, folder.errors.record(None, error)["exit_code"])


def srun_command(job: Job, run_dir: Path, on: Sequence[str] = ()) -> list[str]:
    """Return the srun command that starts a job's ranks: one task each, ended together.

    Args:
        on: nodes of the allocation; empty: all.
    """
    config = job.cluster
    nodes, local = config.nodes_for(job.world_size)
    logs = str(run_dir / "logs").replace("%", "%%")
    command = [
        "srun",
        f"--nodes={nodes}",
        *([f"--nodelist={','.join(on)}"] if on else []),
        f"--ntasks={job.world_size}",
        f"--ntasks-per-node={local}",
        # Not every version takes it from sbatch; data loaders would then share one core.
        *([f"--cpus-per-task={config.cpus_per_rank}"] if config.cpus_per_rank else []),
        "--kill-on-bad-exit=1",
        # Rank 0 may still be writing when the other ranks have ended.
        "--wait=0",
        # The user's sbatch may export nothing.
        "--export=ALL",
        *([f"--distribution={config.distribution}"] if config.distribution else []),
        *([f"--gpu-bind={config.gpu_bind}"] if config.gpu_bind else []),
        "--mpi=none",
        "--unbuffered",
        "--open-mode=append",
        f"--output={logs}/rank%t.out",
        f"--error={logs}/rank%t.err",
        *config.srun_args,
    ]
    container = shlex.split(config.container or "")  # options of srun, or a command around Python
    python = [config.python or sys.executable, "-u", "-m", "harness.train.rank", str(run_dir)]
    return [*command, *container, *python]
