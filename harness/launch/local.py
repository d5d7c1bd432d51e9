"""Run a job on this machine: start its ranks, or be a rank that torchrun has started."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Any, NoReturn

from harness.checkpoint.resume import is_finished, show_finished
from harness.compose.length import note
from harness.config.cluster import count_gpus
from harness.config.job import Job
from harness.launch.begin import begin
from harness.launch.faults import RankDied, count_memory_kills, record_dead, record_left
from harness.launch.losses import Loss, go_on, lost_ranks
from harness.run.folder import RunFolder
from harness.train.finish import finish_run, ranks_in_words
from harness.train.process import (
    CONTROLLER,
    StopRequest,
    ignore_stop_signals,
    importing_torch,
    openmp_environment,
    rank_environment,
    rendezvous_store,
    stop_signals_end,
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
    UserError,
)

if TYPE_CHECKING:
    import torch.distributed as dist

POLL_SECONDS = 0.05
STOP_SECONDS = 300
"""Time that ranks have after ^C or SIGTERM to finish their step and save, before they are
killed."""
# Time that ranks have after one has failed, to notice it and to record their progress. A rank that
# hangs in a collective never notices.
LEAVING_SECONDS = 2.0
# The same where ranks that run out of memory write a snapshot of it, which takes seconds.
SNAPSHOT_SECONDS = 60.0
_LOAD = Path("/proc/loadavg")  # of Linux


def start(job: Job, folder: RunFolder, overrides: list[str]) -> int:
    """Run a job as the work of this process; return the exit code."""
    begin(folder, job, overrides, adopt=True)
    return launch(job, folder, ends_process=True)


def launch(job: Job, folder: RunFolder, *, apart: bool = False, ends_process: bool = False) -> int:
    """Run the job to its end, record how it ended, and return the exit code.

    A single rank runs in this process, where a debugger can attach. Several ranks run as children
    that end together, and with this process.

    Args:
        apart: run a single rank as a child too, so that this process keeps no state of it.
        ends_process: this process ends with the run's exit code, so ignore stop signals once the
            ranks have ended.
    """
    started = time.monotonic()
    try:
        if job.world_size == 1 and not apart:
            from harness.train.rank import run_rank

            note_busy_cores(job)
            os.environ.update(openmp_environment(job))
            with stop_signals_interrupt():
                code = run_rank(job, folder, started=started)
        else:
            with StopRequest(raises=False) as stop:
                code, loss = _run_ranks(job, folder, started, stop)
                while loss is not None and (smaller := go_on(job, folder, code, loss)) is not None:
                    job = smaller
                    code, loss = _run_ranks(job, folder, time.monotonic(), stop)
    except BaseException as error:
        # An error of launching; ranks record their own errors.
        code = folder.errors.record(None, error)["exit_code"]
    if ends_process:
        ignore_stop_signals()
    try:
        with stop_signals_ignored():
            return finish_run(job, folder, code)
    finally:
        folder.release()


def note_busy_cores(job: Job) -> None:
    """Say so if other processes want all cores, unless the user has chosen the threads.

    The threads stay as many: the order of a sum, and so its last bits, depends on their number.
    """
    is_chosen = "OMP_NUM_THREADS" in os.environ or job.cluster.threads_per_rank
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0]
    is_busy = load >= cores and _running_threads() > cores
    if not is_chosen and is_busy and (job.cluster.device == "cpu" or not count_gpus()):
        note(
            f"other processes use this machine (load {load:.1f} on {cores} cores), so steps are slow; "
            "cluster.threads_per_rank=1 may be faster"
        )


def _running_threads() -> float:
    """Return how many threads of all processes run now; infinite if the system does not say.

    The load is a mean over minutes, in which a run that has just ended still counts.
    """
    try:
        return int(_LOAD.read_text().split()[3].partition("/")[0])
    except OSError:
        return inf


def _run_ranks(
    job: Job, folder: RunFolder, started: float, stop: StopRequest
) -> tuple[int, Loss | None]:
    """Run an attempt; return its exit code, and what it has lost if the run may go on without."""
    kills_before = count_memory_kills()
    with rendezvous_store() as port:
        environment = {CONTROLLER: str(os.getpid()), **rank_environment(job, port, started)}
        with _started(job.world_size, folder.path, environment) as processes:
            ended = _supervise(job, processes, stop)
    asked = stop.signal is not None
    # Until its loop begins, a stop signal kills a rank.
    obeyed = (-signal.SIGTERM, -signal.SIGINT) if asked else ()
    kills = count_memory_kills() - kills_before
    logs = folder.path / "logs"
    dead = [
        (rank, RankDied.by_code(rank, code, kills, logs))
        for rank, code in ended.items()
        if code not in (EXIT_OK, *STOPPED, *obeyed)
    ]
    record_dead(folder, dead)
    if EXIT_RESUMABLE in ended.values():
        return EXIT_RESUMABLE, None  # all ranks have saved, or none has
    if asked or EXIT_INTERRUPTED in ended.values():
        return EXIT_INTERRUPTED, None
    left = record_left(folder, [rank for rank, code in ended.items() if code == EXIT_OK])
    code = next(
        (code if code > 0 else EXIT_MACHINE for code in ended.values() if code),
        EXIT_MACHINE if left else EXIT_OK,
    )
    if job.cluster.on_node_loss != "continue":
        return code, None
    ranks, how = lost_ranks(folder, dead)
    words = f"{ranks_in_words(ranks)} {'were' if ranks[1:] else 'was'} lost: {how}"
    lost = Loss(words, len(ranks), job.world_size - len(ranks))
    return code, lost if ranks else None


def _supervise(
    job: Job, processes: Mapping[int, Popen[bytes]], stop: StopRequest
) -> dict[int, int]:
    """Wait until all ranks have ended, or one has failed and the time for the others to end is over."""
    snapshots = job.profiling.enable and job.profiling.memory_snapshot
    leaving_seconds = SNAPSHOT_SECONDS if snapshots else LEAVING_SECONDS
    deadline = float("inf")
    asked = False
    while True:
        codes = {rank: process.poll() for rank, process in processes.items()}
        ended = {rank: code for rank, code in codes.items() if code is not None}
        if len(ended) == job.world_size:
            return ended
        now = time.monotonic()
        if stop.signal is not None and not asked:
            asked = True
            deadline = min(deadline, now + STOP_SECONDS)
            for process in processes.values():
                process.send_signal(
                    signal.SIGTERM
                )  # not to workers in its process group, which it needs
        if any(code not in (EXIT_OK, *STOPPED) for code in ended.values()):
            deadline = min(deadline, now + leaving_seconds)
        if stop.insists or now >= deadline:
            return ended
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _started(
    world_size: int, run_dir: Path, environment: dict[str, str]
) -> Iterator[dict[int, Popen[bytes]]]:
    """Start the ranks, each with its process group; yield their processes, and kill what is left at the end.

    Rank 0 writes to the terminal, the others into ``logs``. torchrun's agent would give the other
    ranks of a failed one 30 seconds to end, and send them the signal that asks for an orderly stop.
    """
    command = [sys.executable, "-u", "-m", "harness.train.rank", str(run_dir)]
    processes: dict[int, Popen[bytes]] = {}
    try:
        for rank in range(world_size):
            own = {**os.environ, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with contextlib.ExitStack() as files:
                streams: dict[str, Any] = {}
                for name in ("out", "err") if rank else ():
                    log = (run_dir / "logs" / f"rank{rank}.{name}").open("wb")
                    streams[f"std{name}"] = files.enter_context(log)
                processes[rank] = Popen(command, env=own, start_new_session=True, **streams)
        yield processes
    finally:
        for process in processes.values():
            # Also for a rank that has ended: workers it started may remain in its process group.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes.values():
            process.wait()


GRACE_SECONDS = 0.5
ROW_SECONDS = 3.0


def run_launched_rank(job: Job, folder: RunFolder, overrides: list[str]) -> NoReturn:
    """Run this rank and end the process with its exit code."""
    from harness.train.rank import end_with_launcher, leave, run_rank

    started = time.monotonic()
    rank = int(os.environ["RANK"])
    os.environ.update(openmp_environment(job))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Only if the parent is known to be the launcher: a shell in between may end earlier.
        end_with_launcher(job, folder, os.getppid())
    else:
        variables = f"RANK={rank} and WORLD_SIZE={job.world_size}"
        sys.stderr.write(
            f"this is rank {rank} of {job.world_size}, because a launcher set {variables}\n"
        )
    with stop_signals_interrupt():
        store = None
        if job.world_size > 1:
            with importing_torch():
                from harness.train.setup import rendezvous

            store = rendezvous(job)
        ended = _begin_on_rank_0(job, folder, overrides, rank, store)
        if ended:
            leave(int(ended))
        code = run_rank(job, folder, started=started, store=store)
        if code not in (EXIT_OK, *STOPPED):
            # Errors are written at about the same time: the cause may be written after its
            # consequences.
            time.sleep(GRACE_SECONDS)
            try:
                (folder.path / "errors" / "told").open("x").close()
            except OSError:  # another rank tells it
                pass
            else:
                finish_run(job, folder, code, row_seconds=0.0 if rank == 0 else ROW_SECONDS)
    # The lock on the folder is released when the process ends.
    leave(code)


def _begin_on_rank_0(
    job: Job, folder: RunFolder, overrides: list[str], rank: int, store: dist.Store | None
) -> str:
    """Begin the run; return the exit code of all ranks as a text, which is empty if they train."""
    # The other ranks wait: none may write into an earlier attempt.
    if rank != 0 and store is not None:
        with stop_signals_end():
            return store.get("folder").decode()
    ended = ""
    try:
        if is_finished(job, folder.path):
            ended = str(show_finished(job, folder.path))
        else:
            begin(folder, job, overrides, adopt=True)
    except UserError as error:
        # Show it before the other ranks receive the decision: torchrun ends all ranks when the
        # first ends.
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
        ended = str(EXIT_USER)
    if store is not None:
        store.set("folder", ended)
    return ended
