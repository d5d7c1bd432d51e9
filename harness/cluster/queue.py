"""What SLURM's commands say of its jobs. Imports no torch.

A job id here is as ``squeue`` prints it: ``123``, or ``123_4`` for a task of an array.
"""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from harness.errors import MachineError, UserError

COMMAND_SECONDS = 60
_SEPARATOR = "|"


@dataclass(frozen=True)
class Queued:
    """A job in the queue.

    Attributes:
        id: its id.
        name: its name.
        state: SLURM's long word, e.g. PENDING, RUNNING, COMPLETING.
        reason: why it waits; ``None`` as a text if it does not.
    """

    id: str
    name: str
    state: str
    reason: str

    @property
    def waits(self) -> bool:
        """Whether it has no nodes (yet, or again)."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED")


# States of a job that has not come to its end, whoever owns it.
LIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "STOPPED", "RESIZING")


class SlurmError(MachineError):
    """A command of SLURM failed."""


def require_slurm() -> None:
    """Raises UserError where SLURM's commands are missing."""
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise UserError(
            "cluster.kind=slurm: there is no sbatch here; would work: a login node of the cluster, "
            "cluster.dry_run=true, which only shows what would be submitted, or cluster=local"
        )


def queue() -> list[Queued]:
    """This user's jobs that are not over, tasks of arrays one by one.

    Raises:
        SlurmError: the scheduler does not answer.
    """
    form = _SEPARATOR.join(("%i", "%j", "%T", "%r"))
    lines = _run("squeue", "--noheader", "--array", f"--user={getpass.getuser()}", f"--format={form}")
    # A name may hold anything, so it is what is left between the others.
    found = []
    for line in lines.splitlines():
        ident, _, rest = line.strip().partition(_SEPARATOR)
        name, state, reason = rest.rsplit(_SEPARATOR, 2)
        found.append(Queued(ident, name, state, reason))
    return found


def describe(job_id: str) -> dict[str, str]:
    """What ``scontrol show job`` says of a job, by its own names; empty when SLURM has forgotten it.

    Raises:
        SlurmError: the scheduler does not answer.
    """
    try:
        text = _run("scontrol", "show", "job", "--oneliner", job_id)
    except SlurmError as error:
        # The latter of a task of an array.
        if "Invalid job id" in str(error) or f"Job {job_id} not found" in str(error):
            return {}
        raise
    return dict(part.split("=", 1) for part in text.split() if "=" in part)


def last_state(job_id: str) -> str | None:
    """The state a job is in or ended with: from the controller, or else from accounting if there is any.

    Raises:
        SlurmError: the scheduler does not answer.
    """
    state = describe(job_id).get("JobState")
    if state is None and shutil.which("sacct") is not None:
        try:
            words = _run("sacct", "--noheader", "--parsable2", "-X", "--format=State", "-j", job_id).split()
        except SlurmError:
            return None  # sacct is there, and accounting is not
        state = words[0] if words else None  # CANCELLED by 1000
    return state


def requeue(job_id: str) -> None:
    """Puts a running job back into the queue, under its id; SLURM ends its processes.

    Raises:
        SlurmError: it cannot be.
    """
    _run("scontrol", "requeue", job_id)


def cancel(job_ids: Iterable[str]) -> None:
    """Ends jobs, waiting or running.

    Raises:
        SlurmError: one of them cannot be.
    """
    for job_id in job_ids:
        try:
            _run("scancel", job_id)
        except SlurmError as error:
            if "Invalid job id" not in str(error):  # or else it has just ended by itself
                raise


def _run(*command: str) -> str:
    # What the user has set for looking at the queue would hide jobs from us.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=COMMAND_SECONDS
        )
    except FileNotFoundError:
        raise SlurmError(f"{command[0]}: not found; is this a login node of the cluster?") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]}: no answer within {COMMAND_SECONDS} s") from None
    if done.returncode != 0:
        # scontrol says on its stdout that it does not know a task of an array.
        said = " ".join((done.stderr.strip() or done.stdout).split()) or f"exit code {done.returncode}"
        raise SlurmError(f"{' '.join(command)}: {said}")
    return done.stdout
