"""Run a function on the ranks of a job: this process, one that torchrun started, or new ones."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from harness.compose.verb import prepare_process
from harness.config.failures import describe_failure
from harness.config.job import Job
from harness.train.process import importing_torch, keep_freed_memory, launched_ranks, openmp_environment
from harness.util.errors import HarnessError, MachineError, UserError, one_line


def run_on_ranks(job: Job, function: str, *arguments: Any) -> Any:
    """Call ``function(job, device, *arguments)`` on every rank; return rank 0's result.

    Under torchrun, the call is this rank's, and so is the result.

    Args:
        job: the resolved job.
        function: ``module:name`` of a function, imported after torch's environment is set.
        arguments: picklable, like the result.

    Raises:
        UserError, MachineError: those of the function on any rank. Out of memory is a MachineError.
    """
    if launched_ranks() is not None or job.world_size == 1:
        os.environ.update(openmp_environment(job))
        try:
            return _in_this_process(job, function, *arguments)
        except Exception as error:
            described = describe_failure(error)
            if described["kind"] != "out_of_memory":
                raise
            raise _out_of_memory(described["message"]) from error
    from harness.launch.pool import RankFailed, RankPool

    with RankPool(job.world_size, timeout_seconds=float("inf"), on_gpus=_on_gpus(job)) as pool:
        try:
            return pool.run(job.world_size, _on_rank, job, function, *arguments)[0]
        except RankFailed as error:
            failure = error.failure
            if failure is None or failure.kind in (None, HarnessError.kind):
                raise
            if failure.kind == "out_of_memory":
                raise _out_of_memory(failure.message) from error
            raise (UserError if failure.kind == UserError.kind else MachineError)(failure.message) from error


def _out_of_memory(message: str) -> MachineError:
    works = "a smaller batch_size, or more ranks that share the weights"
    return MachineError(f"out of memory: {one_line(message)}; would work: {works}")


def is_first() -> bool:
    """Whether this process prints and writes: under torchrun, rank 0 does."""
    return launched_ranks() is None or os.environ["RANK"] == "0"


def _on_rank(job: Job, function: str, *arguments: Any) -> Any:
    import torch

    from harness.train.process import threads_per_rank
    from harness.train.setup import pick_device, set_up_process

    prepare_process()
    device = pick_device(job)
    set_up_process(job)
    torch.set_num_threads(threads_per_rank(job))
    return _imported(function)(job, device, *arguments)


def _in_this_process(job: Job, function: str, *arguments: Any) -> Any:
    with importing_torch():
        from harness.train.setup import pick_device, process_group, set_up_process

    device = pick_device(job)
    set_up_process(job)
    if device.type == "cpu":
        keep_freed_memory()
    with process_group(job, device):
        return _imported(function)(job, device, *arguments)


def _imported(function: str) -> Callable[..., Any]:
    module, name = function.split(":")
    with importing_torch():
        return getattr(importlib.import_module(module), name)


def _on_gpus(job: Job) -> bool:
    from harness.config.cluster import count_gpus

    return job.cluster.device != "cpu" and count_gpus() > 0
