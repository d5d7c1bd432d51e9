"""One attempt at a SLURM job, on its first node: it starts the ranks, waits for them, and completes the row.

It is to a SLURM job what the controller is to one on this machine: it holds the run folder and the store at
which the ranks meet, waits for ``srun``, records ranks that ended without a word, and completes the run's
row. When the ranks were told to stop and have saved, it puts the job back into the queue, under the same id.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from harness.checkpoint.resume import is_finished, tell_finished
from harness.cluster import queue
from harness.cluster.node_check import UnfitNodes, check_nodes
from harness.cluster.outcome import last_words, settle
from harness.cluster.srun_log import dead_ranks
from harness.cluster.ticket import Ticket
from harness.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_RESUMABLE,
    STOPPED,
    MachineError,
    UserError,
)
from harness.failures import VICTIMS, kind_of_text
from harness.job import Job
from harness.rank import STARTED, leave
from harness.run_folder import RunFolder

if TYPE_CHECKING:
    from harness.cluster.batch import Received

POLL_SECONDS = 0.2
# A node that is gone keeps its locks for as long as its lease lasts: 90 s with NFS.
HOLD_SECONDS = 180.0
# How long SLURM's controller may be too busy to say what a job's state is.
ANSWER_SECONDS, RETRY_SECONDS = 60.0, 5.0
# How much earlier than asked SLURM may send the signal before the time limit.
LIMIT_SECONDS = 60.0
SRUN_LOG = "srun.err"

SUPERSEDED = "SUPERSEDED"
# States of a job that SLURM is taking its nodes from, whatever its processes end with.
_TAKEN = {"PENDING", "REQUEUED", "COMPLETING", "PREEMPTED", "TIMEOUT", "NODE_FAIL", "CANCELLED", SUPERSEDED}


def run_and_leave(run_dir: Path, received: Received) -> NoReturn:
    """Runs the job that is described in a run folder, and ends the process with its exit code."""
    try:
        code = run(RunFolder(run_dir), Allocation.here(), received)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        code = error.exit_code
    except Exception:
        traceback.print_exc()
        code = EXIT_BUG
    leave(code)


class Allocation:
    """What SLURM has given this job.

    Attributes:
        job_id: as ``squeue`` prints it.
        restarts: how often the job was started before.
    """

    def __init__(self, job_id: str, restarts: int) -> None:
        self.job_id, self.restarts = job_id, restarts

    @classmethod
    def here(cls) -> Allocation:
        """The one this process runs in."""
        array = os.environ.get("SLURM_ARRAY_JOB_ID")
        ident = (
            os.environ["SLURM_JOB_ID"] if array is None else f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        )
        return cls(ident, int(os.environ.get("SLURM_RESTART_COUNT", "0")))

    def state(self) -> str:
        """SLURM's word for the job's state; SUPERSEDED when it has started the job again elsewhere.

        UNKNOWN when it does not say; in the middle of a mass preemption it may be too busy for a while.
        """
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            try:
                said = queue.describe(self.job_id)
            except queue.SlurmError as error:
                if time.monotonic() < deadline:
                    time.sleep(RETRY_SECONDS)
                    continue
                sys.stderr.write(f"WARNING the state of this job is not known: {error}\n")
                return "UNKNOWN"
            if int(said.get("Restarts", "0")) > self.restarts:
                return SUPERSEDED
            return said.get("JobState", "UNKNOWN")


def run(folder: RunFolder, allocation: Allocation, received: Received) -> int:
    """Runs the job that is described in a folder; returns its exit code."""
    started = time.time()
    job = folder.read_job()
    if is_finished(job, folder.path):  # the script was submitted again by hand
        return tell_finished(job, folder.path)
    _begin(job, folder, allocation)
    sys.stdout.write(f"run folder {folder.path}\noutput of rank 0 {folder.path}/logs/rank0.out\n")
    sys.stdout.flush()
    try:
        if job.cluster.node_check != "off":
            check_nodes(job, folder.path)
        code = _run_ranks(job, folder, allocation, started, received)
    except UnfitNodes as error:
        if job.cluster.node_check == "exclude" and allocation.restarts < job.cluster.max_requeues:
            return _requeue_without(error, job, folder, allocation)
        code = folder.record_error(None, error)["exit_code"]
    except Exception as error:
        code = folder.record_error(None, error)["exit_code"]
    if allocation.state() == SUPERSEDED:
        return code  # the folder is another attempt's
    code = settle(job, folder, code)
    if code not in STOPPED or allocation.state() not in ("RUNNING", "TIMEOUT", "UNKNOWN"):
        return code  # where SLURM takes the nodes it also decides whether the job comes back
    if not _is_worth_another(folder):
        folder.record_error(None, NoProgress())
        return settle(job, folder, NoProgress.exit_code)
    return _go_on_later(job, folder, allocation, time.time() - started)


def _is_worth_another(folder: RunFolder) -> bool:
    """Whether this attempt or the one before has finished a step; a third in vain would be no better."""
    attempts = [path for path in (folder.path / "attempts").glob("*") if path.name.isdigit()]
    earlier = max(attempts, key=lambda path: int(path.name), default=None)
    if earlier is None:
        return True
    rows = (folder.row, RunFolder(earlier).row)
    return any((row.get("step") or 0) > (row.get("start_step") or 0) for row in rows)


def _begin(job: Job, folder: RunFolder, allocation: Allocation) -> None:
    """Takes the folder, which whoever submitted the job may hold for another moment."""
    deadline = time.monotonic() + HOLD_SECONDS
    while True:
        try:
            folder.begin_again(job)
            break
        except UserError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    # The one in the folder is another job's if the script was submitted again by hand.
    name, index = os.environ["SLURM_JOB_NAME"], None if task is None else int(task)
    ticket = Ticket.read(folder.path) or Ticket(name)
    ident, restarts = allocation.job_id, allocation.restarts
    ticket = replace(ticket, name=name, index=index, job_id=ident, restarts=restarts, cancelled=False)
    ticket.write(folder.path)


def _run_ranks(
    job: Job, folder: RunFolder, allocation: Allocation, started: float, received: Received
) -> int:
    """Starts the ranks, waits for them, and records those that ended without a word; returns an exit code."""
    logs = folder.path / "logs"
    with _store() as port, (logs / SRUN_LOG).open("ab") as log:
        environment = {**os.environ, **rank_environment(job, port, started)}
        if received.last is not None:
            return EXIT_INTERRUPTED  # srun would die of the signal before it can handle it
        srun = subprocess.Popen(srun_command(job, folder.path), env=environment, stderr=log)
        received.forward_to(srun.pid)
        returned = srun.wait()
        received.process = None
    return _verdict(folder, allocation, returned)


def _verdict(folder: RunFolder, allocation: Allocation, returned: int) -> int:
    """Determine why the ranks ended, and record a rank that could not record its error itself.

    An error that is no consequence of another rank's comes first, then a rank that was killed: what rank 0
    wrote when srun ended it for that reason is a consequence, and so is a collective that failed.

    Args:
        folder: the run folder.
        allocation: what SLURM has given the job.
        returned: exit code of srun.

    Returns:
        an exit code.
    """
    error, code = folder.first_error(), folder.row.get("exit_code")
    if error is not None and error["kind"] not in VICTIMS:
        return int(error["exit_code"])
    if code in (EXIT_OK, EXIT_RESUMABLE):  # all ranks have agreed to end there
        return int(code)
    if allocation.state() in _TAKEN:
        return EXIT_INTERRUPTED  # what ranks say of each other while SLURM ends them is no cause
    logs = folder.path / "logs"
    dead = [
        each
        for each in dead_ranks((logs / SRUN_LOG).read_text(errors="replace"), logs)
        if not folder.has_error_of(each[0])
    ]
    if not dead and code == EXIT_INTERRUPTED:
        return EXIT_INTERRUPTED
    if not dead and error is not None and error["kind"] != "interrupted":
        return int(error["exit_code"])
    # The first that ended takes the others along, unless one's log says why it had to.
    told = [each for each in dead if each[1].kind not in ("unknown", *VICTIMS)]
    rank, died = next(iter(told or dead), (None, StepFailed(returned, logs)))
    folder.record_error(rank, died)
    return died.exit_code


class NoProgress(MachineError):
    """The time was up, or somebody else needed the nodes, before a step was done; twice in a row."""

    kind = "preempted"

    def __init__(self) -> None:
        super().__init__(
            "told to stop before its first step was done, twice in a row; would work: a longer cluster.time, "
            "a smaller cluster.signal_seconds"
        )


class StepFailed(MachineError):
    """srun failed, and no rank has said why."""

    def __init__(self, code: int, logs: Path) -> None:
        said = last_words(logs / SRUN_LOG)
        self.kind = kind_of_text(said) or "unknown"
        super().__init__(f"srun ended with exit code {code}{said}")


def _go_on_later(job: Job, folder: RunFolder, allocation: Allocation, seconds: float) -> int:
    """Puts a job that was told to stop and has saved back into the queue, as often as the job allows.

    Args:
        job: the resolved job.
        folder: its run folder.
        allocation: what SLURM has given it.
        seconds: how long it has run.
    """
    if allocation.restarts >= job.cluster.max_requeues:
        reason = _why_it_ends(job, seconds)
        folder.set_status("interrupted", exit_code=EXIT_RESUMABLE, reason=reason)
        sys.stderr.write(f"{reason}\n")
        return EXIT_RESUMABLE
    folder.set_status("requeued", restarts=allocation.restarts + 1)
    folder.release()
    try:
        queue.requeue(allocation.job_id)
    except queue.SlurmError as error:
        folder.set_status("interrupted", exit_code=EXIT_RESUMABLE)
        sys.stderr.write(f"WARNING this job could not be put back into the queue: {error}\n")
    return EXIT_RESUMABLE


def _requeue_without(unfit: UnfitNodes, job: Job, folder: RunFolder, allocation: Allocation) -> int:
    """Puts the job back into the queue without the nodes that failed the check, or fails if it cannot."""
    sys.stderr.write(f"WARNING the job goes back into the queue without {', '.join(unfit.nodes)}: {unfit}\n")
    folder.set_status("requeued", restarts=allocation.restarts + 1, excluded=unfit.nodes)
    folder.release()
    try:
        queue.requeue_without(allocation.job_id, unfit.nodes)
    except queue.SlurmError as error:
        sys.stderr.write(f"WARNING this job could not be put back into the queue without them: {error}\n")
        if allocation.state() in _TAKEN:
            return EXIT_RESUMABLE  # it is in the queue, with them
        return settle(job, folder, folder.record_error(None, unfit)["exit_code"])
    return EXIT_RESUMABLE


def _why_it_ends(job: Job, seconds: float) -> str:
    config = job.cluster
    if config.minutes is None:  # the partition's limit
        why = "its time was up, or SLURM told it to stop"
    elif seconds > 60 * config.minutes - config.signal_seconds - LIMIT_SECONDS:
        why = f"its time was up (cluster.time={config.time})"
    else:
        why = "SLURM told it to stop"
    return (
        f"{why}, and cluster.max_requeues={config.max_requeues} allows no further requeue; the same command "
        "continues from its last checkpoint"
    )


@contextmanager
def _store() -> Iterator[int]:
    """Keeps the store at which the ranks meet; yields its port, which is free because the system chose it."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def rank_environment(job: Job, port: int, started: float) -> dict[str, str]:
    """What all ranks are told; their places come from srun.

    Args:
        job: the resolved job.
        port: of the store, on this node.
        started: time.time() at which the job was started.
    """
    nodes, local = job.cluster.nodes_for(job.world_size)
    # A node need not resolve its own name, and without a network that takes minutes to fail.
    address = "127.0.0.1" if nodes == 1 else socket.gethostname()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = job.cluster.threads_per_rank or job.cluster.cpus_per_rank or max(1, cores // local)
    return {
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": job.cluster.env.get("MASTER_ADDR", address),
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        STARTED: str(started),
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000"),  # see openmp_environment
        "OMP_NUM_THREADS": job.cluster.env.get("OMP_NUM_THREADS", str(threads)),
    }


def srun_command(job: Job, run_dir: Path) -> list[str]:
    """The command that starts a job's ranks: one task each, ended together."""
    config = job.cluster
    nodes, local = config.nodes_for(job.world_size)
    logs = str(run_dir / "logs").replace("%", "%%")
    command = [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={job.world_size}",
        f"--ntasks-per-node={local}",
        # Not every version hands it on from sbatch, and data loaders would share one core.
        *([f"--cpus-per-task={config.cpus_per_rank}"] if config.cpus_per_rank else []),
        "--kill-on-bad-exit=1",
        # Rank 0 may have much to write when the others are through.
        "--wait=0",
        # sbatch may have been told to export nothing.
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
    container = shlex.split(config.container or "")
    return [
        *command,
        *container,  # options of srun, or a command around Python
        config.python or sys.executable,
        "-u",
        "-m",
        "harness.rank",
        str(run_dir),
    ]
