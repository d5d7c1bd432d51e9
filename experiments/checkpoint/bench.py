"""Copies of a finished run that faults are injected into, and the check of each command's result."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from attempts import LAYOUTS, TINY, Ended, Files, compared, run_processes

from harness.util.errors import EXIT_OK, EXIT_USER

STEPS, INTERVAL = 8, 2
COMMAND = [
    *TINY,
    f"training.steps={STEPS}",
    f"checkpoint.interval={INTERVAL}",
    "checkpoint.keep_latest_k=0",
]
RANKS = {1: ["parallelism=single"], 4: LAYOUTS["fsdp 4"]}
# Output lines about a fault.
_TELLING = re.compile(r"cannot be used|could not be|^error:|WARNING|Error|Traceback")


class Runner(Protocol):
    """Run the command in a folder; ``patch`` is source code that each of its processes runs first."""

    def __call__(self, folder: Path, overrides: Iterable[str], patch: str = "") -> Ended: ...


@dataclass(frozen=True)
class Expected:
    """Expected result of a command.

    Attributes:
        resumed: step it resumes from; None if it starts from the beginning, or not at all.
        code: exit code.
        reads: regular expressions, each of which must match in one line of the output.
        equal: whether it ends with the losses of the undisturbed run.
    """

    resumed: int | None
    code: int = EXIT_OK
    reads: tuple[str, ...] = ()
    equal: bool = True


@dataclass
class Bench:
    """A copy of a finished run.

    Attributes:
        folder: folder of the copy.
        ranks: number of ranks.
        run: runs the command.
        rows: compared rows of the undisturbed run.
    """

    folder: Path
    ranks: int
    run: Runner
    rows: list[tuple[Any, ...]]
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)
    equal: str = "-"

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        found = Files(self.folder).run_dir
        assert found is not None
        return found

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.run_dir / "checkpoints"

    def step(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.checkpoints / f"step-{step}"

    def data_file(self, step: int, rank: int = 0) -> Path:
        """Return the file that a rank wrote."""
        return self.step(step) / f"__{rank}_0.distcp"

    def keep(self, *steps: int) -> None:
        """Remove all other checkpoints, as if the run had stopped earlier."""
        for path in self.checkpoints.glob("step-*"):
            if path.name not in {f"step-{step}" for step in steps}:
                shutil.rmtree(path)

    def complete(self) -> list[int]:
        """Return the steps of complete checkpoints."""
        return sorted(each.step for each in Files(self.folder).checkpoints.complete()[0])

    def steps(self) -> list[int]:
        """Return the steps that have a folder."""
        return Files(self.folder).checkpoints.steps()

    def contents(self, *steps: int) -> dict[str, bytes]:
        """Return all files of some checkpoints."""
        return {str(p): p.read_bytes() for step in steps for p in self.step(step).iterdir()}

    def command(self, expected: Expected, *more: str, patch: str = "") -> None:
        """Run the command and compare its result with the expected one."""
        (self.run_dir / "result.json").unlink(missing_ok=True)
        ended = self.run(self.folder, [*COMMAND, *RANKS[self.ranks], *more], patch)
        match = re.search(r"resumed from \S*step-(\d+)", ended.said)
        resumed = int(match[1]) if match else None
        self.codes.append(str(ended.code))
        self.resumed.append("-" if resumed is None else str(resumed))
        self.require(ended.code == expected.code, f"exit code {ended.code} instead of {expected.code}")
        self.require(resumed == expected.resumed, f"resumed from {resumed} instead of {expected.resumed}")
        self.require("Traceback" not in ended.said, "a traceback")
        self._read(ended, expected.reads)
        if expected.equal and ended.code == EXIT_OK:
            rows = compared(Files(self.folder).rows())
            self.equal = "yes" if rows == self.rows else "**no**"
            self.require(rows == self.rows, "other losses than the undisturbed run")
        if self.problems:
            self.problems.append(f"it printed:\n{ended.said}")

    def _read(self, ended: Ended, patterns: tuple[str, ...]) -> None:
        """Keep the lines about the fault; without patterns there must be none."""
        telling = [line for line in ended.said.splitlines() if _TELLING.search(line)]
        for pattern in patterns:
            self.require(any(re.search(pattern, line) for line in telling), f"no line has {pattern!r}")
        if not patterns:
            self.require(not telling, f"unexpected: {telling}")
        if ended.code == EXIT_USER:
            self.require(len(telling) == 1, f"{len(telling)} lines for a mistake")
        self.lines += [shortened(line, self.folder) for line in telling]

    def require(self, holds: bool, problem: str) -> None:
        """Record a problem unless a condition holds."""
        if not holds:
            self.problems.append(problem)


def shortened(line: str, folder: Path) -> str:
    """Return a line without the paths of this machine."""
    line = re.sub(rf"(?:{re.escape(str(folder))}/)?runs/\w+/\w+/checkpoints", "...", line)
    line = re.sub(rf"{re.escape(str(folder))}/runs/\w+/\w+", "...", line)
    return line.replace(f"{folder}/", "")


@dataclass(frozen=True)
class Fault:
    """One row of the table.

    Attributes:
        name: description of the fault.
        happen: injects it and runs the command, once or more.
        ranks: ranks of the run.
        needs_processes: whether the command must run in processes of its own.
    """

    name: str
    happen: Callable[[Bench], None]
    ranks: int = 1
    needs_processes: bool = True


@dataclass
class Row:
    """Result of one fault."""

    name: str
    bench: Bench
    seconds: float

    def cells(self) -> str:
        """Return its line of the table."""
        read = "<br>".join(f"`{line.replace('|', chr(92) + '|')}`" for line in self.bench.lines) or "-"
        bench = self.bench
        cells = (self.name, read, ", ".join(bench.resumed), ", ".join(bench.codes), bench.equal)
        return "| " + " | ".join(cells) + " |"


class Faults:
    """Run the undisturbed runs, and inject faults into copies of them.

    Args:
        folder: folder of all runs.
        run: runs the command.
    """

    def __init__(self, folder: Path, run: Runner = run_processes) -> None:
        self.folder, self.run = folder, run
        self._finished: dict[int, list[tuple[Any, ...]]] = {}

    def happen(self, fault: Fault) -> Row:
        """Inject one fault.

        Raises:
            RuntimeError: the undisturbed run fails.
        """
        self.prepare(fault.ranks)
        folder = self.folder / re.sub(r"\W+", "-", fault.name).strip("-")
        shutil.copytree(self.folder / f"finished-{fault.ranks}", folder)
        bench = Bench(folder.resolve(), fault.ranks, self.run, self._finished[fault.ranks])
        started = time.monotonic()
        try:
            fault.happen(bench)
        except Exception as error:
            bench.problems.append(f"{type(error).__name__}: {error}")
        if not bench.problems:
            shutil.rmtree(bench.folder)
        return Row(fault.name, bench, time.monotonic() - started)

    def prepare(self, ranks: int) -> None:
        """Run the undisturbed run once for each number of ranks.

        Raises:
            RuntimeError: it fails.
        """
        if ranks not in self._finished:
            finished = self.folder / f"finished-{ranks}"
            ended = self.run(finished, [*COMMAND, *RANKS[ranks]])
            if ended.code != EXIT_OK:
                raise RuntimeError(f"the undisturbed run on {ranks} ranks failed: {ended.said}")
            self._finished[ranks] = compared(Files(finished).rows())
