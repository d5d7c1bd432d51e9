"""The verb ``train``."""

from dataclasses import replace
from functools import partial

from harness.checkpoint.resume import is_finished, show_finished
from harness.compose.composer import Composed
from harness.compose.verb import Verb
from harness.config.cluster import CLUSTERS
from harness.config.job import Job
from harness.launch.inputs import require_inputs, require_tokenized, require_vocabulary
from harness.run.folder import RunFolder
from harness.train.process import launched_ranks, refuse_launched
from harness.util.errors import ConfigError, UserError

HELP = """`harness train`: train the job that the overrides describe.

    harness train experiment=quickstart                                  a small Llama, on this machine
    harness train model=llama3_8b parallelism=fsdp_tp parallelism.tp=4   another model and layout
    harness train ... cluster=slurm_h100 cluster.nodes=4                 on SLURM
    harness train ... -m parallelism=fsdp,hsdp training.seed=1,2         a job for each combination
    harness train ... --cfg job                                          print the composed job
    torchrun --nproc-per-node 8 -m harness train ...                     as ranks of torchrun

Without a launcher it checks the job and starts the ranks. The same command resumes a run.
"""
_ONE_JOB = "a multirun (-m) starts the ranks of all its jobs; start it without torchrun"


def train(job: Job, overrides: list[str]) -> int:
    """Train a job, as its controller or as one of its ranks; return the exit code."""
    folder = RunFolder(job.run_dir)
    is_launched = launched_ranks() is not None
    if job.cluster.on_node_loss == "continue" and is_launched:
        rule = "a job has one number of ranks, and torchrun chooses another when it goes on"
        works = "requeue, or cluster=local without torchrun"
        raise ConfigError("cluster.on_node_loss", "continue", rule, works)
    if is_launched:
        from harness.launch.local import run_launched_rank

        if job.cluster.kind != "local":
            refuse_launched(
                f"so the job would train here, and not by cluster.kind={job.cluster.kind}"
            )
        run_launched_rank(job, folder, overrides)
    if is_finished(job, folder.path):
        return show_finished(job, folder.path)
    require_inputs(job)
    require_vocabulary(job)
    require_tokenized(job)
    return CLUSTERS[job.cluster.kind].load()(job, folder, overrides)


def train_sweep(points: list[Composed]) -> int:
    """Train the points of a multirun; return the exit code."""
    from harness.launch.sweep.run import sweep

    refuse_launched(_ONE_JOB)
    passed: set[str] = set()
    return sweep([_checked(point, passed) for point in points])


def train_study(overrides: list[str], config_name: str) -> int:
    """Train points that Optuna chooses by their results; return the exit code."""
    from harness.launch.sweep.optuna import run_study

    refuse_launched(_ONE_JOB)
    return run_study(overrides, config_name=config_name, check=partial(_checked, passed=set()))


def _checked(point: Composed, passed: set[str]) -> Composed:
    # Without its job if its data cannot be used as it is.
    try:
        if point.job is not None:
            require_inputs(point.job)
            require_vocabulary(point.job)
            require_tokenized(point.job, passed)
    except UserError as error:
        return replace(point, job=None, reason=str(error))
    return point


VERB = Verb("train", train, help=HELP, job=Job, sweep=train_sweep, study=train_study)
