"""SLURM's commands: submit, list, requeue and cancel jobs, and read their states. Imports no torch.

A job id here is as ``squeue`` prints it: ``123``, or ``123_4`` for a task of an array.
"""

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from harness.config.slurm import minutes_of
from harness.util.errors import EXIT_USER, MachineError, UserError

COMMAND_SECONDS = 60
ATTEMPTS = 5
LONGEST_COMMAND = 200  # characters of a command that an error message shows
_SEPARATOR = "|"
# The last line of SLURM's commands on a machine that is not part of a cluster.
_NO_CONFIGURATION = "Could not establish a configuration source"
# What commands say while the controller is restarted, fails over, or ends many jobs at once.
_NO_ANSWER = re.compile(
    "Unable to contact slurm controller|Socket timed out|Unable to confirm allocation"
)
# How long srun is started again, and how often.
START_SECONDS = 60.0
RETRY_SECONDS = 5.0
# SLURM's default MaxArraySize.
LARGEST_ARRAY = 1001
# The limit that SLURM uses for UNLIMITED.
UNLIMITED_MINUTES = 365 * 24 * 60

# JOB STATE CODES of slurm.schedmd.com/squeue.html; a state in neither list is that of a job with
# its nodes.
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
ENDED = {
    **dict.fromkeys(("NODE_FAIL", "BOOT_FAIL"), "node"),
    **dict.fromkeys(("PREEMPTED", "TIMEOUT", "DEADLINE"), "preempted"),
    "OUT_OF_MEMORY": "out_of_memory",
    "CANCELLED": "cancelled",
    **dict.fromkeys(("COMPLETED", "FAILED", "REVOKED"), None),
}
"""States of a job that has ended, with the failure class of a run without a result, if the state
tells it."""
# States of a job that was running and is in the queue again, or will be when its processes have
# ended.
REQUEUED = {"PENDING", "REQUEUED", "COMPLETING"}
# Reasons for which a job stays in the queue until it is changed
# (slurm.schedmd.com/job_reason_codes.html).
_NEVER = (
    "AccountNotAllowed",
    "BadConstraints",
    "DependencyNeverSatisfied",
    "InvalidAccount",
    "InvalidQOS",
    "PartitionConfig",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "QOSNotAllowed",
)
# States of a node by sinfo; one that does not answer has a star.
_UNFIT = re.compile(r"down|drain|fail|error|unknown|power|reboot|.*\*$")
T = TypeVar("T")


@dataclass(frozen=True)
class Queued:
    """A job as squeue lists it: SLURM's long state name, and why it waits (or the text ``None``)."""

    id: str
    name: str
    state: str
    reason: str

    @property
    def is_waiting(self) -> bool:
        """Whether it has no nodes (yet, or again)."""
        return self.state in WAITING

    @property
    def never_starts(self) -> bool:
        """Whether no node can ever meet its request, or what it depends on can never come."""
        return self.is_waiting and (self.reason in _NEVER or self.reason.endswith("PerJobLimit"))


def is_live(state: str | None) -> bool:
    """Whether a job in this state has not ended; False if SLURM has forgotten it."""
    return state is not None and state not in ENDED


class Jobs:
    """Jobs listed by one call of squeue, with those that just ended, and each task of an array.

    Attributes:
        states: states by id and name. An id alone does not identify a job: SLURM gives it to
            another one when its counter starts again.
    """

    def __init__(self, listed: Iterable[Queued]) -> None:
        self.states: dict[tuple[str, str], str] = {}
        self._live: dict[str, list[Queued]] = defaultdict(list)
        for job in listed:
            self.states[job.id, job.name] = job.state
            if job.state not in ENDED:
                self._live[job.name].append(job)

    def find(self, job_id: str | None, name: str, index: int | None) -> Queued | None:
        """Return the job that has not ended and has this name and id; without an id, this array index."""
        # An array task has its index after an underscore; the id of a single job has no underscore.
        wanted = "" if index is None else str(index)
        for job in self._live[name]:
            task = job.id.partition("_")[2]
            if job.id == job_id or (job_id is None and task == wanted):
                return job
        return None


class SlurmError(MachineError):
    """A command of SLURM failed, after printing ``lines``."""

    def __init__(self, message: str, lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.lines = lines


class NoSlurm(SlurmError):
    """A command of SLURM is missing, or finds no configuration."""

    kind = "user"
    exit_code = EXIT_USER

    def __init__(self, command: str, why: str) -> None:
        super().__init__(
            f"this machine has no SLURM: {command} {why}; would work: a login node of the cluster, "
            "SLURM_CONF=FILE, or cluster=local"
        )


def require_slurm() -> None:
    """Raise UserError if SLURM's commands are missing, or its configuration."""
    _require_configuration()
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise UserError(
            "cluster.kind=slurm: there is no sbatch here; would work: a login node of the cluster, "
            "cluster.dry_run=true, which only shows what would be submitted, or cluster=local"
        )


def _require_configuration() -> None:
    # SLURM's commands would wait a minute for a file that is missing.
    path = os.environ.get("SLURM_CONF")
    if path and not os.access(path, os.R_OK):
        raise UserError(f"SLURM_CONF={path}: this file cannot be read")


def submit_script(script: Path) -> str:
    """Submit a script by sbatch; return the job's number."""
    command = ["sbatch", "--parsable", str(script)]
    # It tries for a minute to reach a scheduler that does not answer.
    done = subprocess.run(command, capture_output=True, text=True)
    number, _, _ = done.stdout.strip().partition(";")  # the name of the cluster may follow
    if done.returncode != 0 or not number.isdigit():
        message = _complaint(done)
        if _NO_ANSWER.search(message):
            raise SlurmError(f"sbatch: {message}")
        raise UserError(f"sbatch refuses the job: {message}")
    return number


def until_answered(start: Callable[[], str]) -> None:
    """Start srun, and again while SLURM's controller is away; raise SlurmError after a minute.

    Args:
        start: runs srun and returns its complaint; empty if tasks have started.
    """
    deadline = time.monotonic() + START_SECONDS
    while _NO_ANSWER.search(said := start()):
        message = " ".join(said.split())
        if time.monotonic() > deadline:
            raise SlurmError(message)
        sys.stderr.write(f"WARNING {message}; it is started again in {RETRY_SECONDS:.0f} s\n")
        sys.stderr.flush()
        time.sleep(RETRY_SECONDS)


def jobs() -> Jobs:
    """List this user's jobs: of the user that sbatch submits as, whatever $LOGNAME says."""
    _require_configuration()
    return Jobs(_listed(f"--user={os.getuid()}"))


def _listed(which: str) -> list[Queued]:
    form = _SEPARATOR.join(("%i", "%j", "%T", "%r"))
    lines = _run("squeue", "--noheader", "--array", "--states=all", which, f"--format={form}")
    # A name may contain the separator, so the other fields are split off first.
    found = []
    for line in lines.splitlines():
        ident, _, rest = line.strip().partition(_SEPARATOR)
        name, state, reason = rest.rsplit(_SEPARATOR, 2)
        found.append(Queued(ident, name, state, reason))
    return found


def describe(job_id: str) -> dict[str, str]:
    """Return the fields of ``scontrol show job``; empty if SLURM has forgotten the job."""
    try:
        text = _run("scontrol", "show", "job", "--oneliner", job_id)
    except SlurmError as error:
        # The second message is for array tasks.
        if "Invalid job id" in str(error) or f"Job {job_id} not found" in str(error):
            return {}
        raise
    # A name may hold anything, too; the user's id follows it.
    return _facts(text.partition(" UserId=")[2] or text)


def last_states(wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return the states of any users' jobs by id and name, running or ended, if SLURM remembers them.

    Queries the controller first, then the accounting database if there is one, with one call each.
    """
    if not wanted:
        return {}
    try:
        states = Jobs(_listed(f"--jobs={','.join(job_id for job_id, _ in wanted)}")).states
    except SlurmError as error:
        if "Invalid job id" not in str(error):  # squeue's message if it knows none of them
            raise
        states = {}
    unknown = [job_id for job_id, name in wanted if (job_id, name) not in states]
    return {**_accounted(unknown), **states}


def _accounted(job_ids: Sequence[str]) -> dict[tuple[str, str], str]:
    if not job_ids or shutil.which("sacct") is None:
        return {}
    try:
        form = "--format=JobID,State,JobName"
        lines = _run("sacct", "--noheader", "--parsable2", "-X", form, "-j", ",".join(job_ids))
    except SlurmError:
        return {}  # sacct is installed, but accounting is not configured
    states = {}
    for line in lines.splitlines():
        job_id, _, rest = line.partition(_SEPARATOR)
        state, _, name = rest.partition(_SEPARATOR)
        if state:
            states[job_id, name] = state.split()[0]  # CANCELLED by 1000
    return states


@functools.cache
def partition_minutes(partition: str | None) -> int:
    """Return the time limit in minutes of a job without one: the partition's default, or else its maximum.

    Of several partitions separated by commas the longest limit counts; None is the default
    partition.
    """
    wanted = (partition or "").split(",")
    limits = []
    for line in _run("scontrol", "show", "partition", "--oneliner").splitlines():
        facts = _facts(line)
        if facts["PartitionName"] in wanted or (
            partition is None and facts.get("Default") == "YES"
        ):
            limit = facts.get("DefaultTime", "NONE")
            limits.append(facts.get("MaxTime", "UNLIMITED") if limit == "NONE" else limit)
    minutes = [UNLIMITED_MINUTES if limit == "UNLIMITED" else minutes_of(limit) for limit in limits]
    return max(minutes, default=UNLIMITED_MINUTES)


@functools.cache
def largest_array() -> int:
    """Return how many tasks an array may have; SLURM's default if there is no SLURM here."""
    if shutil.which("scontrol") is None:
        return LARGEST_ARRAY
    found = None
    with contextlib.suppress(NoSlurm):
        shown = _run("scontrol", "show", "config")
        found = re.search(r"^MaxArraySize *= *(\d+)", shown, re.MULTILINE)
    return LARGEST_ARRAY if found is None else max(1, int(found[1]))


def _facts(line: str) -> dict[str, str]:
    facts: dict[str, str] = {}
    for part in line.split():
        name, equals, value = part.partition("=")
        if equals:
            facts.setdefault(name, value)  # comments follow the state, and may hold anything
    return facts


def requeue(job_id: str, without: Sequence[str] = ()) -> None:
    """Requeue a running job under its id, without some nodes; SLURM ends its processes.

    SLURM does not start the job again before its processes have ended, such as this one.
    """
    # Read first: SLURM's signal to the job's processes may end a later scontrol.
    excluded = _with_excluded(job_id, without) if without else None
    try:
        _run("scontrol", "requeue", job_id)
    except SlurmError:
        # SLURM's signal to the job's processes may have ended scontrol after it was obeyed.
        if not is_requeued(job_id):
            raise
    if excluded is not None:
        _update(job_id, excluded)


def is_requeued(job_id: str) -> bool:
    """Return whether SLURM has put a job that ran back into its queue."""
    return _retried(lambda: describe(job_id)).get("JobState") in REQUEUED


def own_nodes() -> list[str]:
    """Return the nodes of the allocation that this process runs in."""
    return _run("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()


def nodes_of(job_id: str) -> list[str]:
    """Return the nodes that a job has: with sbatch --no-kill, without those that have failed."""
    listed = describe(job_id).get("NodeList", "(null)")
    return _run("scontrol", "show", "hostnames", listed).split()


def unfit_nodes(job_id: str, nodes: Sequence[str]) -> dict[str, str]:
    """Return those of a job's nodes that it has lost, or that SLURM calls unfit, with their states."""
    kept = nodes_of(job_id)
    command = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N %T"]
    states = dict(line.split() for line in _run(*command).splitlines())
    return {
        node: states.get(node, "unknown")
        for node in nodes
        if node not in kept or _UNFIT.match(states.get(node, "unknown"))
    }


def exclude(job_id: str, nodes: Sequence[str]) -> None:
    """Exclude nodes from a job that waits; SLURM refuses it for others."""
    _update(job_id, _with_excluded(job_id, nodes))


def _with_excluded(job_id: str, nodes: Sequence[str]) -> str:
    before = describe(job_id).get("ExcNodeList", "(null)")
    return "excnodelist=" + ",".join([*nodes] if before == "(null)" else [before, *nodes])


def _update(job_id: str, change: str) -> None:
    _retried(lambda: _run("scontrol", "update", f"jobid={job_id}", change))


def _retried(call: Callable[[], T]) -> T:
    # SLURM's signal to the job's processes ends commands too.
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(SlurmError):
            return call()
        time.sleep(1.0)
    return call()


def cancel(job_ids: Sequence[str]) -> None:
    """Cancel waiting and running jobs by one call of scancel; ignore jobs that have already ended."""
    if not job_ids:
        return
    try:
        _run("scancel", *job_ids)
    except SlurmError as error:
        if not error.lines:  # scancel is missing, or does not answer
            raise
        complaints = [line for line in error.lines if "Invalid job id" not in line]
        if complaints:
            raise SlurmError(f"scancel: {complaints[0]}", complaints) from None


def _run(*command: str) -> str:
    # The user's settings for squeue could hide jobs.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")
    }
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=COMMAND_SECONDS
        )
    except FileNotFoundError:
        raise NoSlurm(command[0], "is not there") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]}: no answer within {COMMAND_SECONDS} s") from None
    if done.returncode != 0:
        shown = f"{command[0]} {' '.join(command[1:])[:LONGEST_COMMAND]}"
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise SlurmError(f"{shown}: {_complaint(done)}", lines)
    return done.stdout


def _complaint(done: subprocess.CompletedProcess[str]) -> str:
    """Return in a line why a command failed; raise NoSlurm if it finds no configuration."""
    # scontrol reports unknown array tasks on stdout.
    said = " ".join((done.stderr.strip() or done.stdout).split())
    if _NO_CONFIGURATION in said:
        raise NoSlurm(done.args[0], "finds no configuration")
    return said or f"exit code {done.returncode}"
