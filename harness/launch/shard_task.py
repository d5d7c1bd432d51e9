"""A task of a SLURM array that writes a folder in shards.

The task that finds all units finished writes the manifest.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from harness.compose.verb import guarded
from harness.config.fields import from_dict
from harness.data.shards import ShardWriter
from harness.launch.batch import folder_of_task, parse_task
from harness.launch.shard_array import JOB
from harness.util.encoding import read_object
from harness.util.errors import EXIT_OK, UserError
from harness.util.store import only_builder


def run_task(module: str, job_class: type, writer_of: Callable[[Any], ShardWriter]) -> NoReturn:
    """Run the task of this process' command line, and exit.

    Args:
        module: of the task.
        job_class: of its job.
        writer_of: returns the writer of a job.
    """
    # SLURM sends it before the time limit; the task works until it is killed, and finished units are kept.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    sys.exit(guarded(lambda: _run(parse_task(f"python -m {module}"), job_class, writer_of)))


def _run(options: argparse.Namespace, job_class: type, writer_of: Callable[[Any], ShardWriter]) -> int:
    """Write the shard; return the exit code.

    Raises:
        UserError: a line of cluster.setup failed, or the source has changed since the array was submitted.
    """
    if options.setup_failed is not None:
        raise UserError(f"cluster.setup={options.line.strip()}: ended with exit code {options.setup_failed}")
    folder = Path(options.folder or folder_of_task(options.list))
    plain = read_object(folder / JOB)
    job = from_dict(job_class, {name: value for name, value in plain.items() if name != "id"})
    writer, shard = writer_of(job), int(folder.name)
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
