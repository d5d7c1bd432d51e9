"""Submit the shards of a folder as tasks of a SLURM array."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from harness.config.fields import with_value
from harness.config.job import Job
from harness.data.shards import ShardWriter
from harness.launch.queue import jobs, require_slurm
from harness.launch.slurm import Submission
from harness.launch.state import SlurmJobRecord
from harness.launch.submit import confirm, cost_in_words
from harness.util.errors import EXIT_OK, ConfigError
from harness.util.files import write_atomically

TASKS, JOB = "tasks", "job.json"
J = TypeVar("J", bound=Job)


class ShardSubmission(Submission):
    """An array of ``module``; the name of a task's folder is its shard."""

    def __init__(
        self, module: str, jobs: Sequence[Job], folders: Sequence[Path], home: Path, name: str
    ) -> None:
        self.module = module
        super().__init__(jobs, folders, home, name)


def submit(job: J, writer: ShardWriter, module: str, workers: int) -> int:
    """Submit a task for each shard that is not finished, or show the script; return the exit code.

    Args:
        job: the job, with the part ``writer.verb``.
        writer: of the folder.
        module: of a task.
        workers: processes of a task.

    Raises:
        UserError: there is no SLURM here, it refuses the job, or its cost was not confirmed.
    """
    if job.cluster.wait:
        rule = f"follows a training job, and tasks of harness {writer.verb} write shards"
        raise ConfigError("cluster.wait", True, rule, "false, and squeue")
    job = with_value(job, f"{writer.verb}.workers", workers)
    # All tasks have the shards of this process, whatever they can see of the source.
    job = with_value(job, f"{writer.verb}.shards", len(writer.shards))
    job = with_value(job, "cluster.cpus_per_rank", job.cluster.cpus_per_rank or workers)
    home = writer.target.absolute()
    shards = [shard for shard in range(len(writer.shards)) if writer.missing(shard)]
    shards = shards or [len(writer.shards) - 1]  # to write the manifest
    folders = [home / TASKS / f"{shard:05}" for shard in shards]
    tasks: list[Job] = [job] * len(shards)
    name = f"{writer.verb}.{home.name}.{writer.key[:12]}"
    submission = ShardSubmission(module, tasks, folders, home, name)
    cost = f"{len(shards)} tasks with {workers} processes each, {cost_in_words(tasks)}"
    if job.cluster.dry_run:
        sys.stdout.write(f"{submission.script(planned=True)}\n# {cost}\n")
        return EXIT_OK
    require_slurm()
    busy = _queued(folders)
    if busy:
        sys.stdout.write(f"{home}: already submitted, {', '.join(busy)}; the same command continues later\n")
        return EXIT_OK
    confirm(tasks)
    writer.begin()
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / JOB, job.to_json().encode())
    ids = submission.submit()
    if job.cluster.parsable:
        sys.stdout.write("".join(f"{each}\n" for each in ids))
        return EXIT_OK
    sys.stdout.write(f"{home}: submitted as job {ids[0].partition('_')[0]}, {cost}\nlogs {home / 'slurm'}\n")
    return EXIT_OK


def _queued(folders: list[Path]) -> list[str]:
    """Tasks that are in the queue."""
    listed = jobs()
    records = [SlurmJobRecord.read(folder) for folder in folders]
    found = [None if record is None else record.find(listed) for record in records]
    return [f"job {each.id} ({each.state})" for each in found if each is not None]
