"""``python -m harness.train``: train the job that the overrides describe.

Without a launcher it is the controller: it checks the job, makes the run folder, and starts the ranks or
submits them to SLURM. Under torchrun it is one rank, and all ranks compose the same job. With ``-m`` it is
the controller of a sweep.

    python -m harness.train model=llama3_8b parallelism=fsdp_tp parallelism.tp=4
    python -m harness.train experiment=NAME training.steps=100
    python -m harness.train --cfg job                 print the composed job and run nothing
    eval "$(harness-train -sc install=bash)"          <TAB> completes arguments of harness-train
"""

from __future__ import annotations

from dataclasses import replace

from harness.app import Verb
from harness.checkpoint.resume import is_finished, show_finished
from harness.cluster.inputs import require_tokenized
from harness.compose import Composed
from harness.data.vocabulary import require_vocabulary
from harness.errors import ConfigError, UserError
from harness.job import Job
from harness.launched import launched_ranks
from harness.run.folder import RunFolder


def train(job: Job, overrides: list[str]) -> int:
    """Train a job, as its controller or as one of its ranks; return the exit code."""
    folder = RunFolder(job.run_dir)
    if launched_ranks() is not None:
        from harness.cluster.torchrun import run_launched_rank

        run_launched_rank(job, folder, overrides)
    if is_finished(job, folder.path):
        return show_finished(job, folder.path)
    require_vocabulary(job)
    require_tokenized(job)
    if job.cluster.kind == "slurm":
        from harness.cluster.submit import submit_one

        return submit_one(job, folder, overrides)
    if job.cluster.dry_run:
        rule = "shows a job for SLURM, and cluster.kind is local"
        raise ConfigError("cluster.dry_run", True, rule, "cluster=slurm, or false with --cfg job")
    from harness.cluster.local import launch

    folder.begin(job, overrides, adopt=True)
    return launch(job, folder, ends_process=True)


def train_sweep(points: list[Composed]) -> int:
    """Train the points of a multirun; return the exit code."""
    from harness.sweep.run import sweep

    if launched_ranks() is not None:
        raise UserError("torchrun starts the ranks of one job; start a multirun (-m) without it")
    return sweep([_checked(point) for point in points])


def _checked(point: Composed) -> Composed:
    """Return the point, without its job if its data cannot be used as it is."""
    try:
        if point.job is not None:
            require_vocabulary(point.job)
            require_tokenized(point.job)
    except UserError as error:
        return replace(point, job=None, reason=str(error))
    return point


VERB = Verb("train", train, job=Job, sweep=train_sweep)
main = VERB.main

if __name__ == "__main__":
    main()
