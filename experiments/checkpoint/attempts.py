"""Training runs of the soak test and of injected faults: their processes, their files, what is compared."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.checkpoint.catalog import MANIFEST, CheckpointFolder
from harness.metrics.jsonl import Row, read_metrics

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    *("model=llama3_tiny", "model.n_layers=2", "data=synthetic", "tokenizer=bytes", "training.seq_len=32"),
    *("training.global_batch_size=4", "schedule.warmup_steps=2", "cluster.device=cpu"),
    *("metrics.console=plain", "metrics.log_interval=1"),
]
LAYOUTS = {
    "fsdp 4": ["parallelism=fsdp", "parallelism.dp_shard=4"],
    "fsdp 2 x tp 2": ["parallelism=fsdp_tp"],
    "tp 2 x pp 2": ["parallelism=tp_pp"],
    "hsdp 2 x 2": ["parallelism=hsdp"],
}
MODES = {"sync": "checkpoint.async_mode=disabled", "async": "checkpoint.async_mode=async"}
# Columns that must be bitwise equal.
COMPARED = ("step", "loss", "loss_max", "grad_norm", "lr", "tokens", "valid_tokens", "skipped_steps")
# Seconds until an attempt counts as stuck, on a slow and busy machine.
PATIENCE = 900.0


class Attempt:
    """One process of ``python -m harness.train`` and its ranks, in a session of its own.

    Args:
        folder: working directory, the same for all attempts of a run.
        overrides: overrides of the command.
        patch: source code that each of its Python processes runs first.
    """

    def __init__(self, folder: Path, overrides: Iterable[str], patch: str = "") -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        number = len(list(self.folder.glob("output-*.txt")))
        self.output = self.folder / f"output-{number}.txt"
        self.started = time.time()
        with self.output.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "harness.train", *overrides],
                cwd=self.folder,
                env=environment(self.folder, patch),
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        """The output so far."""
        return self.output.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        """Whether the controller is running."""
        return self.process.poll() is None

    def processes(self) -> list[int]:
        """Return the controller and the ranks: the processes with this working directory."""
        found = []
        for entry in os.listdir("/proc"):
            # A zombie has no working directory.
            with contextlib.suppress(OSError):
                if entry.isdigit() and os.readlink(f"/proc/{entry}/cwd") == str(self.folder):
                    found.append(int(entry))
        return found

    def ranks(self) -> list[int]:
        """Return the ranks that the controller has started."""
        return [pid for pid in self.processes() if b"harness.train.rank" in _command(pid)]

    def kill(self, victim: str, draw: random.Random) -> str:
        """Kill the controller, one rank, or all.

        Returns:
            The victim: the controller if there are no ranks yet.
        """
        ranks = self.ranks() if victim == "rank" else []
        victim = "controller" if victim == "rank" and not ranks else victim
        pids = {"controller": [self.process.pid], "rank": [draw.choice(ranks)] if ranks else []}
        for pid in pids[victim] if victim in pids else self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return victim

    def end(self) -> int:
        """Wait for all its processes; return the exit code of the controller.

        Raises:
            TimeoutError: a process is still running.
        """
        deadline = time.monotonic() + PATIENCE
        while self.is_running or self.processes():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self.processes())} processes are left after {PATIENCE:.0f} s")
            time.sleep(0.02)
        return self.process.returncode

    def clear(self) -> None:
        """Kill all its processes."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Ended:
    """Exit code and output of a command."""

    code: int
    said: str


def run_processes(folder: Path, overrides: Iterable[str], patch: str = "") -> Ended:
    """Run the command as a user does, to its end."""
    attempt = Attempt(folder, overrides, patch)
    try:
        return Ended(attempt.end(), attempt.said)
    finally:
        attempt.clear()


def environment(folder: Path, patch: str = "") -> dict[str, str]:
    """Return an attempt's variables: none of a surrounding launch, and the patch on Python's path."""
    hidden = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "PYTHONPATH")
    paths = [str(ROOT)]
    if patch:
        place = folder / "patch"
        place.mkdir(exist_ok=True)
        (place / "sitecustomize.py").write_text(patch)
        paths.insert(0, str(place))
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@dataclass
class Files:
    """Files of the attempts of one run; none until there is a run folder."""

    folder: Path
    _run_dir: Path | None = None

    @property
    def run_dir(self) -> Path | None:
        """The only run folder."""
        if self._run_dir is None:
            self._run_dir = next((p.parent for p in self.folder.glob("runs/*/*/job.json")), None)
        return self._run_dir

    def rows(self) -> list[Row]:
        """Return the rows of metrics.jsonl so far."""
        try:
            return [] if self.run_dir is None else read_metrics(self.run_dir / "metrics.jsonl")
        except FileNotFoundError:
            return []

    @property
    def checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(str((self.run_dir or self.folder) / "checkpoints"))

    def newest(self) -> int:
        """Return the step of the newest complete checkpoint, 0 if there is none."""
        return next((each.step for each in self.checkpoints.complete()[0]), 0)

    def unfinished(self, since: float = 0.0) -> tuple[list[int], list[int]]:
        """Return steps without a manifest that changed since a time: half-written, and half-removed.

        It is called many times a second, so it does not use the catalog, which reads files.
        """
        if self.run_dir is None:
            return [], []
        complete, half = [0], []
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.run_dir / "checkpoints"):
                if entry.name.startswith("step-"):
                    step = int(entry.name[5:])
                    if os.path.exists(f"{entry.path}/{MANIFEST}"):
                        complete.append(step)
                    elif os.stat(entry.path).st_mtime >= since:
                        half.append(step)
        return sorted(s for s in half if s > max(complete)), sorted(s for s in half if s < max(complete))


def compared(rows: list[Row]) -> list[tuple[Any, ...]]:
    """Return the columns of each row that must be equal."""
    return [tuple(row[name] for name in COMPARED) for row in rows]
