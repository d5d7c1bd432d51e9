"""One rank of a job: ``python -m harness.rank RUN_DIR``, started by the controller or by srun.

A rank reads the resolved ``job.json``; it composes nothing and does not import Hydra.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from harness.cluster.lifeline import end_with_parent
from harness.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_RESUMABLE,
    EXIT_USER,
    STOPPED,
    MachineError,
    UserError,
)
from harness.job import Job
from harness.loop import process
from harness.loop.signals import ignore_stop_signals, stop_signals_ignored, stop_signals_interrupt
from harness.model.accounting import account
from harness.run_folder import RunFolder

if TYPE_CHECKING:
    import torch.distributed as dist

    from harness.loop.trainer import Trainer
    from harness.metrics.recorder import Recorder

CONTROLLER = "HARNESS_CONTROLLER"
STARTED = "HARNESS_STARTED"
ROW_SECONDS = 2.0


def main() -> None:
    """Entry point of a rank."""
    if len(sys.argv) != 2 or not {CONTROLLER, "SLURM_PROCID"} & set(os.environ) or STARTED not in os.environ:
        sys.stderr.write("error: the harness starts its ranks itself; would work: python -m harness.train\n")
        sys.exit(EXIT_USER)
    folder = RunFolder(Path(sys.argv[1]))
    try:
        job = folder.read_job()
    except UserError as error:
        folder.record_error(int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))), error)
        leave(error.exit_code)
    if CONTROLLER not in os.environ:
        _run_srun_task(job, folder)
    # Until the loop takes signals there is nothing to save; Python's own answer to SIGINT is a traceback.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_launcher(job, folder, int(os.environ[CONTROLLER]))
    leave(run_rank(job, folder, started=float(os.environ[STARTED])))


def _run_srun_task(job: Job, folder: RunFolder) -> NoReturn:
    """Runs a rank that is a task of srun, which knows its place and ends it with the others."""
    os.environ["RANK"], os.environ["LOCAL_RANK"] = os.environ["SLURM_PROCID"], os.environ["SLURM_LOCALID"]
    with stop_signals_interrupt():
        code = run_rank(job, folder, started=float(os.environ[STARTED]))
    # srun takes any other code for a failure, and would kill rank 0 while it writes the run's row.
    leave(EXIT_OK if code in STOPPED else code)


def end_with_launcher(job: Job, folder: RunFolder, launcher: int) -> None:
    """Makes this rank end when the process that started it is gone; rank 0 still writes the run's row."""

    def write_row() -> None:
        if not folder.is_concluded:
            gone = LauncherGone(f"the process that started the ranks (pid {launcher}) is gone")
            folder.record_error(None, gone)
            folder.settle(job, "failed", gone.exit_code)

    def wait_for_row() -> None:
        # Or else rank 0 would see a peer disappear, and take that for the cause.
        deadline = time.monotonic() + ROW_SECONDS
        while not folder.is_concluded and time.monotonic() < deadline:
            time.sleep(0.05)

    end_with_parent(launcher, write_row if os.environ["RANK"] == "0" else wait_for_row)


class LauncherGone(MachineError):
    """The launcher was killed; its ranks end too."""


class Run:
    """What of a run there is so far, for the account of how it ended.

    Attributes:
        trainer: the trainer, once there is one.
        recorder: takes the metrics, on rank 0 once there is one.
    """

    trainer: Trainer | None = None
    recorder: Recorder | None = None

    @property
    def step(self) -> int | None:
        """The last step finished."""
        return None if self.trainer is None else self.trainer.progress.step

    def facts(self) -> dict[str, Any]:
        """How far it came; empty if that cannot be said."""
        try:
            return {} if self.trainer is None else self.trainer.result()
        except Exception:
            traceback.print_exc()
            return {}


def run_rank(job: Job, folder: RunFolder, *, started: float, store: dist.Store | None = None) -> int:
    """Trains one rank's part of the job and writes what became of it; returns the exit code.

    Args:
        job: the resolved job.
        folder: its run folder, begun.
        started: time.time() at which the job was started.
        store: where the ranks meet; None means where torchrun's variables say.
    """
    rank, run = int(os.environ.get("RANK", "0")), Run()
    try:
        return _train(job, folder, rank, run, started, store)
    except BaseException as error:
        if "RANK" in os.environ:
            ignore_stop_signals()
        with stop_signals_ignored():
            return _end_failed_rank(job, folder, rank, run, error)


def _end_failed_rank(job: Job, folder: RunFolder, rank: int, run: Run, error: BaseException) -> int:
    """Records the error, and on rank 0 the run's row; returns the exit code."""
    # First of all the cause: what follows can fail or take long.
    failure = folder.record_error(rank, error, step=run.step)
    if run.trainer is not None and failure["kind"] == "collective_timeout":
        run.trainer.watch.timed_out()
    if rank == 0:
        _end_failed_run(job, folder, run, failure["exit_code"])
    return int(failure["exit_code"])


def _train(job: Job, folder: RunFolder, rank: int, run: Run, started: float, store: dist.Store | None) -> int:
    """Sets the process up, trains, and tears it down; returns the exit code."""
    process.set_environment(job, folder.path)
    from harness.loop.setup import pick_device, process_group, set_up_process

    device = pick_device(job)
    set_up_process(job)
    kept = device.type == "cpu" and process.keep_freed_memory()
    if device.type == "cuda" and job.world_size > 1:
        # NCCL writes its recorder's file there from C++, which makes no folders.
        (folder.path / process.FLIGHT_RECORDER).mkdir(exist_ok=True)
    with process_group(job, device, store):
        from harness.loop.engine import Engine
        from harness.loop.trainer import Trainer

        if rank == 0:
            folder.set_status("running")
            run.recorder = _open_recorder(job, folder)
            run.recorder.message(describe(job, folder, device))
            run.recorder.message(process.describe(job, device.type, keeps_memory=kept))
        run.trainer = Trainer(job, folder, Engine(job, device), run.recorder, started)
        reason = run.trainer.train()
        if "RANK" in os.environ:
            ignore_stop_signals()
        stopped = EXIT_RESUMABLE if run.trainer.is_resumable else EXIT_INTERRUPTED
        code = EXIT_OK if reason == "completed" else stopped
        if run.recorder is not None:
            with stop_signals_ignored():
                folder.conclude(job, reason, code, run.trainer.result())
                run.recorder.close({**run.trainer.shown_summary(), "run folder": str(folder.path)})
        return code


def _open_recorder(job: Job, folder: RunFolder) -> Recorder:
    from harness.metrics.recorder import Recorder

    return Recorder(
        job.metrics,
        folder.path,
        run_id=job.id,
        name=job.name,
        job=job.to_dict(),
        total_steps=job.training.steps,
    )


def _end_failed_run(job: Job, folder: RunFolder, run: Run, code: int) -> None:
    """Writes the row of a run that did not end well, with what it had reached, and closes the metrics.

    The error is already recorded; whatever goes wrong here must not take its place.
    """
    try:
        error = folder.first_error()
        # torchrun asks the peers of a rank that has failed to stop: a consequence, and not the cause.
        if code == EXIT_INTERRUPTED and (error is None or error["exit_code"] == EXIT_INTERRUPTED):
            folder.conclude(job, "interrupted", code, run.facts())
        else:
            folder.conclude(job, "failed", error["exit_code"] if error else code, run.facts())
    except Exception:
        traceback.print_exc()
    if run.recorder is not None:
        with contextlib.suppress(Exception):
            run.recorder.close({})


def describe(job: Job, folder: RunFolder, device: Any) -> str:
    """The lines a run starts with: what, on what, where."""
    layout = job.parallelism
    degrees = (
        " x ".join(f"{axis} {degree}" for axis, degree in layout.degrees.items() if degree > 1) or "one rank"
    )
    counted = account(job.model, job.training.seq_len)
    return (
        f"{job.name}: {counted.parameters:,} parameters, {degrees} on {device.type}, "
        f"{job.global_batch_size} x {job.training.seq_len} tokens a step, {job.training.steps} steps\n"
        f"run folder {folder.path}"
    )


def leave(code: int) -> NoReturn:
    """Ends a rank's process without taking the interpreter down.

    Everything is written and closed. Destructors of communication threads, run at interpreter exit while
    peers are gone or going, abort ("terminate called without an active exception") or hang.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # Nobody may be reading any more.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
