"""A job whose ranks torchrun started: they compose the same job, and rank 0 makes the run folder."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from harness.checkpoint.resume import is_finished, tell_finished
from harness.cluster.local import openmp_environment
from harness.cluster.outcome import account_of
from harness.errors import EXIT_OK, EXIT_USER, STOPPED, MachineError, UserError
from harness.job import Job
from harness.loop.signals import stop_signals_interrupt
from harness.rank import end_with_launcher, leave, run_rank
from harness.run_folder import RunFolder

if TYPE_CHECKING:
    import torch.distributed as dist

HEARING_SECONDS = 0.5
ROW_SECONDS = 3.0
_BEGUN, _REFUSED, _FINISHED = "begun", "refused", "finished"


def run_launched_rank(job: Job, folder: RunFolder, overrides: list[str]) -> NoReturn:
    """Runs this rank and ends the process with its exit code."""
    started, rank = time.time(), int(os.environ["RANK"])
    os.environ.update(openmp_environment(job))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Only where the parent is known to be the launcher and not some shell that may go its own way.
        end_with_launcher(job, folder, os.getppid())
    with stop_signals_interrupt():
        store = _meet(job) if job.world_size > 1 else None
        begun = _begin_together(job, folder, overrides, rank, store)
        if begun != _BEGUN:
            leave(EXIT_OK if begun == _FINISHED else EXIT_USER)
        code = run_rank(job, folder, started=started, store=store)
        _tell_failure(job, folder, code, rank)
    # The lock on the folder ends with the process.
    leave(code)


def _meet(job: Job) -> dist.Store:
    """Return the store that all ranks reach, before there is a process group.

    Raises:
        MachineError: this rank does not reach it, or rank 0 cannot open it.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=job.cluster.start_timeout_seconds)
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    except dist.DistError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise MachineError(
            f"rank {os.environ['RANK']} cannot meet the others at {address} (MASTER_ADDR, MASTER_PORT): "
            f"{str(error).splitlines()[0]}"
        ) from error
    store.set_timeout(timeout)
    # torchrun may restart the ranks, and keeps what they wrote into its store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"harness-{attempt}", store)


def _begin_together(
    job: Job, folder: RunFolder, overrides: list[str], rank: int, store: dist.Store | None
) -> str:
    """Rank 0 begins the folder while the others wait, so that nobody writes into an earlier attempt.

    Returns:
        whether the job may run in it, may not, or is done; rank 0 has said which.
    """
    if rank != 0 and store is not None:
        return store.get("folder").decode()
    begun = _BEGUN
    try:
        if is_finished(job, folder.path):
            tell_finished(job, folder.path)
            begun = _FINISHED
        else:
            folder.begin(job, overrides, adopt=True)
    except UserError as error:
        # Said before the others hear of it: torchrun ends all when the first ends.
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
        begun = _REFUSED
    if store is not None:
        store.set("folder", begun)
    return begun


def _tell_failure(job: Job, folder: RunFolder, code: int, rank: int) -> None:
    """One of the ranks that failed shows the cause and sees to the run's row, as the controller would."""
    if code in (EXIT_OK, *STOPPED):
        return
    # Errors are written at about the same time: the cause may come after its consequences.
    time.sleep(HEARING_SECONDS)
    try:
        (folder.path / "errors" / "told").open("x").close()
    except OSError:
        return
    error = folder.first_error()
    if error is None:
        return
    sys.stderr.write(account_of(error, job.world_size, folder))
    sys.stderr.flush()
    deadline = time.monotonic() + (0.0 if rank == 0 else ROW_SECONDS)
    while not folder.is_concluded and time.monotonic() < deadline:
        time.sleep(0.05)
    folder.settle(job, "failed", error["exit_code"])
