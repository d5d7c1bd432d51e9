"""The user's command after each save (``checkpoint.on_save``), which runs beside the training.

Rank 0 starts it. It is a process of its own that no rank waits for while the run trains.
"""

import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

from harness.checkpoint.catalog import DamagedCheckpoint, reading
from harness.config.checkpoint import CheckpointConfig

PREFIXES = ("TORCHELASTIC_", "HARNESS_", "PMI")
LAUNCHED = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GLOO_SOCKET_IFNAME",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
)
"""Variables that would make a command believe that it is a rank."""


class SaveCommands:
    """Runs ``checkpoint.on_save`` for one checkpoint after another, in the order of the saves.

    Args:
        folder: the run folder.
        say: shows a line to the user.
    """

    def __init__(self, config: CheckpointConfig, folder: Path, say: Callable[[str], None]) -> None:
        self.command = config.on_save
        self.limit_seconds = config.on_save_timeout_seconds
        self.folder = folder
        self.say = say
        self.unfinished: list[int] = []
        self._running: subprocess.Popen[bytes] | None = None
        self._is_ended = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="on_save")

    def start(self, path: str, step: int) -> None:
        """Run the command for the checkpoint ``path`` when those before it have ended."""
        if self.command is None:
            return
        held = ExitStack()
        try:
            # Until the command has ended the checkpoint is not removed.
            held.enter_context(reading(path))
        except DamagedCheckpoint as error:
            self._warn(step, f"did not run: {error}")
            return
        self.unfinished.append(step)
        self._worker.submit(self._run, path, step, held)

    def finish(self) -> None:
        """Wait for all commands, and name those that ``end`` ended."""
        self._worker.shutdown(wait=True)
        for step in self.unfinished:
            self._warn(step, "was ended, because the run ends")

    def end(self) -> None:
        """End the command that runs, and start no other; does not wait."""
        self._is_ended = True
        self._worker.shutdown(wait=False, cancel_futures=True)
        if self._running is not None:
            _kill(self._running)

    def _run(self, path: str, step: int, held: ExitStack) -> None:
        log = self.folder / "logs" / f"on_save-step-{step}.log"
        with held:
            try:
                problem = self._problem(path, step, log)
            except OSError as error:
                problem = f"cannot run: {error}"
        if self._is_ended:
            return
        self.unfinished.remove(step)
        if problem:
            self._warn(step, f"{problem}; its output: {log}")

    def _problem(self, path: str, step: int, log: Path) -> str:
        """Run the command; return how it failed, empty if it did not."""
        assert self.command is not None
        own = {"CHECKPOINT": path, "STEP": str(step), "RUN_FOLDER": str(self.folder)}
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in LAUNCHED and not name.startswith(PREFIXES)
        }
        log.parent.mkdir(exist_ok=True)
        with log.open("wb") as output:
            # A session of its own: Ctrl-C at the run's terminal is not for the command.
            process = subprocess.Popen(
                ["nice", "-n", "19", "sh", "-c", self.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**inherited, **own},
                start_new_session=True,
            )
        self._running = process
        if self._is_ended:
            _kill(process)
        try:
            code = process.wait(self.limit_seconds)
        except subprocess.TimeoutExpired:
            return f"was ended after on_save_timeout_seconds={self.limit_seconds}"
        finally:
            _kill(process)
            process.wait()
            self._running = None
        return f"failed with exit code {code}" if code else ""

    def _warn(self, step: int, what: str) -> None:
        self.say(f"WARNING checkpoint.on_save of step {step} {what}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a command and whatever it started in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
