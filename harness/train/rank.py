"""One rank of a job: ``python -m harness.train.rank RUN_DIR``, started by the controller or by srun.

A rank reads the resolved ``job.json`` and does not import Hydra.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from harness.config.job import Job
from harness.config.parallelism import degrees_in_words
from harness.model.accounting import account
from harness.run.folder import RunFolder
from harness.run.record import RunRecord, reason_of
from harness.train import process
from harness.train.finish import finish_run
from harness.train.process import (
    CONTROLLER,
    STARTED,
    ignore_stop_signals,
    stop_signals_ignored,
    stop_signals_interrupt,
)
from harness.util.errors import (
    EXIT_INTERRUPTED,
    EXIT_MACHINE,
    EXIT_OK,
    EXIT_RESUMABLE,
    EXIT_USER,
    STOPPED,
    MachineError,
    UserError,
)
from harness.util.lifeline import end_with_parent
from harness.util.words import plural

if TYPE_CHECKING:
    import torch.distributed as dist

    from harness.metrics.recorder import Recorder
    from harness.train.trainer import Trainer

ROW_SECONDS = 2.0


def main() -> None:
    """Entry point of a rank."""
    if (
        len(sys.argv) != 2
        or not {CONTROLLER, "SLURM_PROCID"} & set(os.environ)
        or STARTED not in os.environ
    ):
        sys.stderr.write("error: the harness starts its ranks itself; would work: harness train\n")
        sys.exit(EXIT_USER)
    folder = RunFolder(Path(sys.argv[1]))
    try:
        job = folder.attempt_job()
    except UserError as error:
        folder.errors.record(
            int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))), error
        )
        leave(error.exit_code)
    if CONTROLLER not in os.environ:
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
        with stop_signals_interrupt():
            code = run_rank(job, folder, started=float(os.environ[STARTED]))
        # srun treats other exit codes as failures, and would kill rank 0 while it writes the run's
        # row.
        leave(EXIT_OK if code in STOPPED else code)
    # Until the loop handles signals there is nothing to save; Python's SIGINT handler prints a
    # traceback.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_launcher(job, folder, int(os.environ[CONTROLLER]))
    leave(run_rank(job, folder, started=float(os.environ[STARTED])))


def end_with_launcher(job: Job, folder: RunFolder, launcher: int) -> None:
    """End this rank when the process that started it is gone; rank 0 writes the run's row first."""

    def write_row() -> None:
        if not folder.has_result:
            gone = LauncherGone(f"the process that started the ranks (pid {launcher}) is gone")
            finish_run(job, folder, folder.errors.record(None, gone)["exit_code"], quiet=True)

    # Otherwise rank 0 would see a peer disappear and record that as the cause.
    others = folder.wait_for_result
    end_with_parent(
        launcher, write_row if os.environ["RANK"] == "0" else lambda: others(ROW_SECONDS)
    )


class LauncherGone(MachineError):
    """Recorded when the launcher was killed, which ends its ranks too."""


class Rank:
    """One rank of a job."""

    trainer: Trainer | None = None
    recorder: Recorder | None = None

    def __init__(self, job: Job, folder: RunFolder) -> None:
        self.folder = folder
        self.record = RunRecord(job, folder)
        self.number = int(os.environ.get("RANK", "0"))
        self.attempt = folder.started

    def end(self, trainer: Trainer, reason: str) -> int:
        """Write the run's row on rank 0, and return the exit code."""
        from harness.train.rows import shown_summary

        if "RANK" in os.environ:
            ignore_stop_signals()
        stopped = EXIT_RESUMABLE if trainer.is_resumable else EXIT_INTERRUPTED
        code = EXIT_OK if reason == "completed" else stopped
        if self.recorder is not None:
            with stop_signals_ignored():
                row = trainer.result()
                self.record.end(reason, code, row)
                stopped_by = {} if code == EXIT_OK else {"exit_reason": reason}
                resumes = {"resume": "the same command"} if code == EXIT_RESUMABLE else {}
                path = self.folder.path
                where = {"run folder": str(path), "report": f"harness report {path.parent}"}
                self.recorder.close({**shown_summary(row), **stopped_by, **where, **resumes})
        return code

    def fail(self, error: BaseException) -> int:
        """Record an error, and on rank 0 the run's row with its results so far; return the exit code.

        Nothing is recorded if another attempt has begun: the node of this rank was given up, and is back.
        """
        if self.folder.started not in (None, self.attempt):
            return EXIT_MACHINE
        # Record the cause first: the next calls can fail or take long, and must not replace it.
        step = None if self.trainer is None else self.trainer.progress.step
        code = int(self.folder.errors.record(self.number, error, step=step)["exit_code"])
        if self.number != 0:
            return code
        facts: dict[str, Any] = {}
        try:
            facts = {} if self.trainer is None else self.trainer.result()
        except Exception:
            traceback.print_exc()
        of_run = code
        try:
            # torchrun stops the peers of a failed rank: their interruption is a consequence, not
            # the cause.
            first = self.folder.errors.first()
            of_run = code if first is None else first["exit_code"]
            self.record.end(reason_of(of_run), of_run, facts)
        except Exception:
            traceback.print_exc()
        if self.recorder is not None:
            with contextlib.suppress(Exception):
                self.recorder.close({"exit_code": of_run})
        return code


def run_rank(
    job: Job, folder: RunFolder, *, started: float, store: dist.Store | None = None
) -> int:
    """Train as one rank, record how the run ended, and return the exit code.

    Args:
        store: the rendezvous store; None means the one that torchrun's variables name.
    """
    rank = Rank(job, folder)
    try:
        process.set_environment(job, folder.path)
        with process.importing_torch():
            from harness.metrics.recorder import Recorder
            from harness.metrics.views import ShownRun
            from harness.train.graphed import build_engine
            from harness.train.setup import pick_device, process_group, set_up_process
            from harness.train.trainer import Trainer

        device = pick_device(job)
        set_up_process(job)
        if device.type == "cpu":
            process.keep_freed_memory()
        if device.type == "cuda" and job.world_size > 1:
            # NCCL's flight recorder writes its file there from C++, and does not create the folder.
            (folder.path / process.FLIGHT_RECORDER).mkdir(exist_ok=True)
        with process_group(job, device, store):
            if rank.number == 0:
                folder.set_status("running")
                shown = ShownRun(
                    job.metrics, folder.path, folder.path.name, job.name, job.to_dict()
                )
                rank.recorder = Recorder(shown, job.steps)
                rank.recorder.message(describe(job, folder, device))
                if job.empty_in_words is not None:
                    rank.recorder.message(job.empty_in_words)
                if device.type == "cuda" and job.precision.param_dtype == "float32":
                    rank.recorder.message(
                        f"all products in float32, {job.training.matmul_precision} precision "
                        "(precision=bf16 is several times as fast)"
                    )
            rank.trainer = Trainer(job, folder, build_engine(job, device), rank.recorder, started)
            code = rank.end(rank.trainer, rank.trainer.train())
    except BaseException as error:
        if "RANK" in os.environ:
            ignore_stop_signals()
        with stop_signals_ignored():
            code = rank.fail(error)
    if rank.trainer is not None:
        rank.trainer.end_commands(finished=code == EXIT_OK)
    return code


def describe(job: Job, folder: RunFolder, device: Any) -> str:
    """Return the first lines of a run's output: its model, layout, batch and run folder."""
    degrees = degrees_in_words(job.parallelism.degrees)
    counted = account(job.model, job.training.seq_len)
    phases = job.sizes.phases
    sizes = [f"{phase.batch_size} x {phase.seq_len}" for phase in (phases[0], phases[-1])]
    return (
        f"{job.name}: {counted.parameters:,} parameters, {degrees} on {device.type}, "
        f"{' to '.join(dict.fromkeys(sizes))} tokens per step, {plural(job.steps, 'step')}\n"
        f"run folder {folder.path}"
    )


def leave(code: int) -> NoReturn:
    """End a rank's process by ``os._exit``, without the interpreter's shutdown.

    All files are written and closed. At interpreter exit, destructors of communication threads
    whose peers are gone abort ("terminate called without an active exception") or hang.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # The reader of the stream may be gone.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
