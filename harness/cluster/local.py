"""Starts a job's ranks on this machine through torch elastic and tells what became of them."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import fields
from typing import Any

from harness.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK
from harness.job import Job
from harness.run_folder import RunFolder


def launch(job: Job, folder: RunFolder) -> int:
    """Runs the job to its end; returns the exit code. The run folder has been begun.

    A single rank runs in this process, where a debugger can follow it; several run as children that end
    together, and with this process.
    """
    os.environ.setdefault("HARNESS_STARTED", str(time.time()))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(job)))
    if job.world_size == 1:
        from harness.rank import run_rank

        code = run_rank(job, folder)
    else:
        code = _launch_ranks(job, folder)
    return _report(job, folder, code)


def threads_per_rank(job: Job) -> int:
    """Threads of each rank: the cores this process may use, shared out evenly."""
    if job.cluster.threads_per_rank is not None:
        return job.cluster.threads_per_rank
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // job.world_size)


def _launch_ranks(job: Job, folder: RunFolder) -> int:
    """Starts the ranks and waits; whatever ends one of them ends all."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What elastic says of a failure, the run folder's error files say better.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # Rank 0 speaks for all on the terminal; what the others print lies in logs/.
    silent = {rank: Std.ALL for rank in range(1, job.world_size)}
    options: dict[str, Any] = {}
    if "shutdown_timeout" in {field.name for field in fields(LaunchConfig)}:
        options["shutdown_timeout"] = job.cluster.stop_timeout_seconds
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.world_size,
        run_id=job.id,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder.path / "logs"), redirects=silent),
        **options,
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "harness.rank", str(folder.path))
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if folder.first_error() is None and first.exitcode != EXIT_INTERRUPTED:
            folder.record_error(first.local_rank, RankDied(first.local_rank, first.exitcode))
        return EXIT_INTERRUPTED if first.exitcode == EXIT_INTERRUPTED else EXIT_BUG
    except SignalException:
        return EXIT_INTERRUPTED
    return EXIT_OK


class RankDied(Exception):
    """A rank ended without a word: killed from outside, or by the kernel for want of memory."""

    def __init__(self, rank: int, exit_code: int) -> None:
        how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        hint = " (killed from outside, or by the kernel for want of memory)" if exit_code == -9 else ""
        super().__init__(f"rank {rank} ended with {how}{hint}")


def _report(job: Job, folder: RunFolder, code: int) -> int:
    """Shows the first failure, completes the run's row where no rank could, and settles the exit code."""
    if code in (EXIT_OK, EXIT_INTERRUPTED):
        if not folder.is_concluded:
            folder.conclude(job, "completed" if code == EXIT_OK else "interrupted", code, {})
        return code
    error = folder.first_error()
    if error is None:
        return code
    if not folder.is_concluded:
        folder.conclude(job, "failed", error["exit_code"], {})
    if error["kind"] == "user":
        sys.stderr.write(f"error: {error['message']}\n")
    else:
        if error["kind"] == "bug":
            sys.stderr.write(error["traceback"])
        sys.stderr.write(f"error: rank {error['rank']} failed ({error['kind']}): {error['message']}\n")
        sys.stderr.write(f"run folder {folder.path}: errors/ and logs/ hold the rest\n")
    return error["exit_code"] or EXIT_BUG


