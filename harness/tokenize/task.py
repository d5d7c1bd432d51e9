"""A task of a SLURM array of ``harness.tokenize``: tokenizes a shard, and writes the shards that are ready.

The task that finds all shards tokenized writes the manifest.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import NoReturn

from harness.app import guarded
from harness.cluster.batch import folder_of_task, parse_task
from harness.config import from_dict
from harness.data.build_lock import only_builder
from harness.data.corpus import MANIFEST
from harness.errors import EXIT_OK, UserError
from harness.metrics.encoding import read_object
from harness.tokenize.__main__ import writer_of
from harness.tokenize.config import TokenizeJob
from harness.tokenize.slurm import JOB


def main() -> NoReturn:
    """Run the task, and exit."""
    # SLURM sends it before the time limit; the task works until it is killed, and finished units are kept.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    sys.exit(guarded(lambda: run(parse_task("python -m harness.tokenize.task"))))


def run(options: argparse.Namespace) -> int:
    """Tokenize the shard; return the exit code.

    Raises:
        UserError: a line of cluster.setup failed, or the source has changed since the array was submitted.
    """
    if options.setup_failed is not None:
        raise UserError(f"cluster.setup={options.line.strip()}: ended with exit code {options.setup_failed}")
    folder = Path(options.folder or folder_of_task(options.list))
    plain = read_object(folder / JOB)
    job: TokenizeJob = from_dict(TokenizeJob, {name: value for name, value in plain.items() if name != "id"})
    writer, shard = writer_of(job), int(folder.name)
    if (writer.target / MANIFEST).exists():
        return EXIT_OK
    if not writer.is_same_source:
        raise UserError(
            f"{writer.source_name}: has changed since the tasks were submitted, or this node sees other "
            "files; would work: the harness.tokenize command once more"
        )
    with only_builder(folder, lambda: not writer.missing(shard)) as building:
        if building is not None:
            writer.tokenize([shard], job.tokenize.workers)
    manifest = writer.finish()
    if manifest is not None:
        writer.remove_unfinished()
    sys.stdout.write(f"shard {shard} is tokenized{'' if manifest is None else '; the corpus is complete'}\n")
    return EXIT_OK


if __name__ == "__main__":
    main()
