"""Run a job whose ranks torchrun started: each composes the same job, and rank 0 creates the run folder."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from harness.checkpoint.resume import is_finished, show_finished
from harness.config.job import Job
from harness.launch.begin import begin
from harness.run.folder import RunFolder
from harness.train.finish import finish_run
from harness.train.process import importing_torch, openmp_environment, stop_signals_interrupt
from harness.train.rank import end_with_launcher, leave, run_rank
from harness.util.errors import EXIT_OK, EXIT_USER, STOPPED, MachineError, UserError

if TYPE_CHECKING:
    import torch.distributed as dist

GRACE_SECONDS = 0.5
ROW_SECONDS = 3.0
_BEGUN, _REFUSED, _FINISHED = "begun", "refused", "finished"


def run_launched_rank(job: Job, folder: RunFolder, overrides: list[str]) -> NoReturn:
    """Run this rank and end the process with its exit code."""
    started, rank = time.monotonic(), int(os.environ["RANK"])
    os.environ.update(openmp_environment(job))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Only if the parent is known to be the launcher: a shell in between may end earlier.
        end_with_launcher(job, folder, os.getppid())
    with stop_signals_interrupt():
        store = _rendezvous(job) if job.world_size > 1 else None
        outcome = _begin_on_rank_0(job, folder, overrides, rank, store)
        if outcome != _BEGUN:
            leave(EXIT_OK if outcome == _FINISHED else EXIT_USER)
        code = run_rank(job, folder, started=started, store=store)
        _report_failure(job, folder, code, rank)
    # The lock on the folder is released when the process ends.
    leave(code)


def _rendezvous(job: Job) -> dist.Store:
    """Return the store that all ranks share before there is a process group.

    Raises:
        MachineError: this rank cannot connect to the store, or rank 0 cannot open it.
    """
    with importing_torch():
        import torch.distributed as dist

    timeout = timedelta(seconds=job.cluster.start_timeout_seconds)
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    except dist.DistError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise MachineError(
            f"rank {os.environ['RANK']} cannot connect to the store at {address} (MASTER_ADDR, MASTER_PORT): "
            f"{str(error).splitlines()[0]}"
        ) from error
    store.set_timeout(timeout)
    # torchrun may restart the ranks, and its store keeps their keys.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"harness-{attempt}", store)


def _begin_on_rank_0(
    job: Job, folder: RunFolder, overrides: list[str], rank: int, store: dist.Store | None
) -> str:
    """Begin the run folder on rank 0 while the others wait, so that no rank writes into an earlier attempt.

    Returns:
        rank 0's decision: ``_BEGUN``, ``_REFUSED`` or ``_FINISHED``.
    """
    if rank != 0 and store is not None:
        return store.get("folder").decode()
    outcome = _BEGUN
    try:
        if is_finished(job, folder.path):
            show_finished(job, folder.path)
            outcome = _FINISHED
        else:
            begin(folder, job, overrides, adopt=True)
    except UserError as error:
        # Show it before the other ranks receive the decision: torchrun ends all ranks when the first ends.
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
        outcome = _REFUSED
    if store is not None:
        store.set("folder", outcome)
    return outcome


def _report_failure(job: Job, folder: RunFolder, code: int, rank: int) -> None:
    """On one of the failed ranks, show the cause and complete the run's row, as the controller would."""
    if code in (EXIT_OK, *STOPPED):
        return
    # Errors are written at about the same time: the cause may be written after its consequences.
    time.sleep(GRACE_SECONDS)
    try:
        (folder.path / "errors" / "told").open("x").close()
    except OSError:
        return
    finish_run(job, folder, code, row_seconds=0.0 if rank == 0 else ROW_SECONDS)
