"""One rank of a job: ``python -m harness.rank RUN_DIR``, started with torchrun's variables in its environment.

A rank reads the resolved ``job.json``; it composes nothing and does not import Hydra.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from harness.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, HarnessError
from harness.job import Job
from harness.model.accounting import account
from harness.run_folder import RunFolder


def main() -> None:
    """Entry point of a rank that the controller started."""
    end_with_parent()
    folder = RunFolder(Path(sys.argv[1]))
    job = Job.from_json((folder.path / "job.json").read_text())
    code = run_rank(job, folder)
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is written and closed. Destructors of communication threads, run at interpreter exit while
    # peers are gone or going, abort or hang.
    os._exit(code)


def run_rank(job: Job, folder: RunFolder) -> int:
    """Trains one rank's part of the job and writes what became of it; returns the exit code."""
    rank = int(os.environ.get("RANK", "0"))
    state: dict[str, Any] = {}
    try:
        reason = _train(job, folder, rank, state)
    except BaseException as error:
        folder.record_error(rank, error)
        code = error.exit_code if isinstance(error, HarnessError) else EXIT_BUG
        if rank == 0:
            _conclude(job, folder, "failed", state)
        return code
    return EXIT_OK if reason == "completed" else EXIT_INTERRUPTED


def _train(job: Job, folder: RunFolder, rank: int, state: dict[str, Any]) -> str:
    """Sets the process up, trains, and tears it down."""
    from harness.loop.setup import pick_device, process_group, set_up_process

    started = float(os.environ.get("HARNESS_STARTED", time.time()))
    device = pick_device(job)
    set_up_process(job, device)
    with process_group(job, device):
        from harness.loop.engine import Engine
        from harness.loop.trainer import Trainer
        from harness.metrics.recorder import Recorder

        recorder = None
        if rank == 0:
            folder.set_status("running")
            recorder = Recorder(
                job.metrics,
                folder.path,
                run_id=job.id,
                name=job.name,
                job=job.to_dict(),
                total_steps=job.training.steps,
                start_step=0,
            )
            recorder.message(describe(job, folder, device))
        try:
            trainer = Trainer(job, folder, Engine(job, device), recorder, started)
            state["trainer"] = trainer
            reason = trainer.train()
        except BaseException:
            if recorder is not None:
                recorder.close({})
            raise
        facts = trainer.result()
        if recorder is not None:
            folder.conclude(job, reason, EXIT_OK if reason == "completed" else EXIT_INTERRUPTED, facts)
            recorder.close({**trainer.shown_summary(), "run folder": str(folder.path)})
        return reason


def _conclude(job: Job, folder: RunFolder, reason: str, state: dict[str, Any]) -> None:
    """Writes the row of a run that failed, with what it had reached."""
    error = folder.first_error()
    trainer = state.get("trainer")
    facts = trainer.result() if trainer is not None else {}
    folder.conclude(job, reason, error["exit_code"] if error else EXIT_BUG, facts)


def describe(job: Job, folder: RunFolder, device: Any) -> str:
    """The lines a run starts with: what, on what, where."""
    layout = job.parallelism
    degrees = " x ".join(f"{axis} {degree}" for axis, degree in layout.degrees.items() if degree > 1) or "one rank"
    counted = account(job.model, job.training.seq_len)
    return (
        f"{job.name}: {counted.parameters:,} parameters, {degrees} on {device.type}, "
        f"{job.global_batch_size} x {job.training.seq_len} tokens a step, {job.training.steps} steps\n"
        f"run folder {folder.path}"
    )


def end_with_parent(poll_seconds: float = 0.5) -> None:
    """Ends this process when its parent is gone, so that a killed controller leaves no orphans.

    A daemon thread watches, because the main thread may be inside a collective that never returns.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll_seconds)
        os._exit(EXIT_BUG)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


if __name__ == "__main__":
    main()
