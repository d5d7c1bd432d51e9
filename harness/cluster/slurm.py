"""Jobs as SLURM gets them: resources from the layout, one sbatch script, submitted by submitit.

submitit writes the script, submits it, and calls ``harness.cluster.batch`` in it: one process on the first
node, which starts the ranks by ``srun``, one task for each, and settles what becomes of them.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.cluster.batch import BatchJob
from harness.cluster.queue import SlurmError, require_slurm
from harness.cluster.snapshot import snapshot_path, take_snapshot
from harness.cluster.ticket import Ticket
from harness.errors import UserError
from harness.job import Job

# bash would end at SIGTERM, and SLURM then kills what the script has started, before it has settled anything.
_SURVIVE_TERM = "trap : TERM"


@dataclass(frozen=True)
class Shape:
    """What SLURM is asked for; jobs of one shape make one array.

    Attributes:
        nodes: number of nodes.
        ranks_per_node: ranks on each of them.
        options: the options of sbatch, sorted.
        setup: lines of shell before the job.
        max_running: how many jobs of an array may run at once.
    """

    nodes: int
    ranks_per_node: int
    options: tuple[tuple[str, Any], ...]
    setup: tuple[str, ...]
    max_running: int

    def describe(self) -> str:
        """E.g. ``2 nodes x 8 ranks``."""
        return f"{_count(self.nodes, 'node')} x {_count(self.ranks_per_node, 'rank')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def shape_of(job: Job) -> Shape:
    """What a resolved job takes."""
    config = job.cluster
    nodes, ranks_per_node = config.nodes_for(job.world_size)
    options: dict[str, Any] = {
        "nodes": nodes,
        # srun starts the tasks, but sbatch has to know how many CPUs they need.
        "ntasks-per-node": ranks_per_node,
        "cpus-per-task": config.cpus_per_rank,
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "constraint": config.constraint,
        "exclude": config.exclude,
        "mem": config.mem,
        "time": config.minutes,
        "exclusive": config.exclusive or None,
        "signal": f"USR2@{config.signal_seconds}",
    }
    if config.device == "cuda":
        kind = f"{config.gpu_type}:" if config.gpu_type else ""
        options["gpus-per-node"] = f"{kind}{ranks_per_node}"
    options["requeue" if config.max_requeues else "no-requeue"] = True
    options.update(config.sbatch)
    exports = [f"export {name}={shlex.quote(str(value))}" for name, value in config.env.items()]
    return Shape(
        nodes,
        ranks_per_node,
        tuple(sorted((name, value) for name, value in options.items() if value is not None)),
        (_SURVIVE_TERM, *exports, *config.setup),
        config.max_running,
    )


def device_hours(job: Job) -> float:
    """The most a job may cost until its time limit: its ranks, or whole nodes if it has them for itself."""
    nodes, ranks_per_node = job.cluster.nodes_for(job.world_size)
    if job.cluster.exclusive and job.cluster.ranks_per_node is not None:
        ranks_per_node = job.cluster.ranks_per_node
    return nodes * ranks_per_node * job.cluster.minutes / 60


class Submission:
    """Jobs of one shape, submitted as one: a job array if they are several.

    Args:
        jobs: the resolved jobs.
        run_dirs: their run folders, begun with the state ``submitted`` when ``submit`` is called.
        home: the folder of the run or the sweep, which takes SLURM's logs and the copy of the code.
        name: what SLURM calls it; by it the job is found again if this process dies at the wrong moment.
    """

    def __init__(self, jobs: Sequence[Job], run_dirs: Sequence[Path], home: Path, name: str) -> None:
        shapes = {shape_of(job) for job in jobs}
        assert len(shapes) == 1, "jobs of one array have one shape"
        self.jobs, self.run_dirs = jobs, [path.absolute() for path in run_dirs]
        self.home, self.name, self.shape = home.absolute(), name, shapes.pop()
        # Not a folder for each job: SLURM opens its output before submitit could make it.
        self.folder = self.home / "slurm"

    def script(self) -> str:
        """The sbatch script, as it would be submitted."""
        from submitit.slurm.slurm import _make_sbatch_string

        command = f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(self.folder))}"
        count: dict[str, Any] = {"map_count": len(self.jobs)} if len(self.jobs) > 1 else {}
        return _make_sbatch_string(command=command, folder=self.folder, **count, **self._parameters())

    def submit(self) -> list[str]:
        """Submits; returns the job ids, in the order of the jobs.

        Raises:
            UserError: there is no SLURM here, or it refuses the job.
            SlurmError: SLURM cannot be talked to.
        """
        require_slurm()
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        if self.jobs[0].cluster.snapshot:
            take_snapshot(self.home)
        self.folder.mkdir(parents=True, exist_ok=True)
        tickets = [Ticket(self.name, i if len(self.jobs) > 1 else None) for i in range(len(self.jobs))]
        for run_dir, ticket in zip(self.run_dirs, tickets, strict=True):
            ticket.write(run_dir)
        executor = SlurmExecutor(folder=self.folder)
        executor.update_parameters(**self._parameters())
        try:
            with _environment_for_submitting(self.shape):
                submitted = executor.submit_array([BatchJob(str(path)) for path in self.run_dirs])
        except FailedJobError as error:  # what submitit makes of a command that fails
            raise UserError(f"sbatch refuses the job: {' '.join(str(error).split())}") from error
        except FailedSubmissionError as error:
            raise SlurmError(" ".join(str(error).split())) from error
        ids = [str(each.job_id) for each in submitted]
        for run_dir, ticket, ident in zip(self.run_dirs, tickets, ids, strict=True):
            # The job may have started meanwhile, and says the same and more.
            if (Ticket.read(run_dir) or ticket).job_id is None:
                replace(ticket, job_id=ident).write(run_dir)
        return ids

    def _parameters(self) -> dict[str, Any]:
        config = self.jobs[0].cluster
        setup = list(self.shape.setup)
        if config.snapshot:
            code = shlex.quote(str(snapshot_path(self.home)))
            # PYTHONSAFEPATH, or else `python -m` would look into the working folder first.
            setup.append(f"export PYTHONPATH={code}${{PYTHONPATH:+:$PYTHONPATH}} PYTHONSAFEPATH=1")
        return {
            "job_name": self.name,
            "use_srun": False,
            "stderr_to_stdout": True,
            "array_parallelism": self.shape.max_running,
            "setup": setup,
            # submitit would name a key that clusters without accounting by key refuse.
            "wckey": None,
            "additional_parameters": dict(self.shape.options),
        }


# The user's own defaults for sbatch, which count where the job says nothing.
_DEFAULTS = {
    f"SBATCH_{name.upper()}": name for name in ("account", "partition", "qos", "constraint", "reservation")
}


@contextmanager
def _environment_for_submitting(shape: Shape) -> Iterator[None]:
    """Takes away what would speak for the job: an allocation around us, variables that win over scripts."""
    from submitit.helpers import clean_env

    said = dict(shape.options)
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "SLURM_CONF" or _DEFAULTS.get(name, "") not in ("", *said)
    }
    with clean_env():
        os.environ.update(kept)
        yield
