"""Write a folder in shards by the tasks of a SLURM array: submit them, and run one of them."""

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from harness.compose.verb import guarded
from harness.config.fields import from_dict, with_value
from harness.config.job import Job
from harness.data.shards import ShardWriter
from harness.launch.batch import folder_of_task, parse_task
from harness.launch.queue import jobs, largest_array, require_slurm
from harness.launch.slurm import Submission
from harness.launch.state import SlurmJobRecord
from harness.launch.submit import confirm, cost_in_words
from harness.util.encoding import read_object
from harness.util.errors import EXIT_OK, ConfigError, UserError
from harness.util.files import write_atomically
from harness.util.store import only_builder
from harness.util.words import plural

TASKS = "tasks"
JOB = "job.json"
J = TypeVar("J", bound=Job)


def submit(job: J, writer: ShardWriter, module: str, workers: int) -> int:
    """Submit a task for each shard that is not finished, or show the script; return the exit code.

    Args:
        job: the job, with the part ``writer.verb``.
        module: of a task, which gets a folder whose name is its shard.
        workers: processes of a task.
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
    submission = Submission(tasks, folders, home, name, module=module)
    cost = f"{plural(len(shards), 'task')} with {plural(workers, 'worker')} each, {cost_in_words(tasks)}"
    if job.cluster.dry_run:
        sys.stdout.write(f"{submission.script(planned=True)}\n# {cost}\n")
        return EXIT_OK
    require_slurm()
    if len(tasks) > largest_array():
        rule = f"{len(tasks)} tasks, and this SLURM takes arrays of at most {largest_array()}"
        raise ConfigError(f"{writer.verb}.shards", len(writer.shards), rule, [largest_array()])
    listed = jobs()
    records = [SlurmJobRecord.read(folder) for folder in folders]
    found = [None if record is None else record.find(listed) for record in records]
    if busy := [f"job {each.id} ({each.state})" for each in found if each is not None]:
        sys.stdout.write(
            f"{home}: already submitted, {', '.join(busy)}; the same command continues later\n"
        )
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
    sys.stdout.write(
        f"{home}: submitted as job {ids[0].partition('_')[0]}, {cost}\nlogs {home / 'slurm'}\n"
    )
    return EXIT_OK


def run_task(module: str, job_class: type, writer_of: Callable[[Any], ShardWriter]) -> NoReturn:
    """Run the task of this process' command line, and exit."""
    # SLURM sends it before the time limit; the task works until it is killed, and finished units
    # are kept.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    sys.exit(guarded(lambda: _run(parse_task(f"python -m {module}"), job_class, writer_of)))


def _run(
    options: argparse.Namespace, job_class: type, writer_of: Callable[[Any], ShardWriter]
) -> int:
    if options.setup_failed is not None:
        raise UserError(
            f"cluster.setup={options.line.strip()}: ended with exit code {options.setup_failed}"
        )
    folder = Path(options.folder or folder_of_task(options.list))
    plain = read_object(folder / JOB)
    job = from_dict(job_class, {name: value for name, value in plain.items() if name != "id"})
    writer = writer_of(job)
    shard = int(folder.name)
    if writer.is_complete:
        return EXIT_OK
    if not writer.is_same_source:
        raise UserError(
            f"{writer.source_name}: has changed since the tasks were submitted, or this node sees other "
            f"files; would work: the harness {writer.verb} command once more"
        )
    with only_builder(folder, lambda: not writer.missing(shard)) as building:
        if building is not None:
            writer.write([shard], getattr(job, writer.verb).workers)
    manifest = writer.finish()
    if manifest is not None:
        writer.remove_unfinished()
    sys.stdout.write(
        f"shard {shard} is finished{'' if manifest is None else f'; the {writer.noun} is complete'}\n"
    )
    return EXIT_OK
