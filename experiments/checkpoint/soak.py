"""Kill training runs with SIGKILL at random moments, resume them, and compare them with uninterrupted runs.

    python experiments/checkpoint/soak.py --runs 40 --seed 0

Runs have four ranks and several layouts, and write checkpoints at once or in the background. Each is killed
one to three times: at a random moment, or as soon as a checkpoint is seen half-written or half-removed. The
victim is the controller, one rank, or every process. Then the same command is run to its end. If a run
differs from the uninterrupted one (losses and norms are compared bitwise), the exit code is 1 and its folder
is kept.

Writes a Markdown table. Random choices depend on the seed only; what a kill hits depends on the machine too.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from attempts import COMPARED, LAYOUTS, MODES, ROOT, TINY, Attempt, Files, compared, run_processes

from harness.util.errors import EXIT_OK

STEPS, INTERVAL, KEEP = 18, 3, 2
OFTEN = [
    f"training.steps={STEPS}",
    f"checkpoint.interval={INTERVAL}",
    f"checkpoint.keep_latest_k={KEEP}",
]
# Intervals that a kill may cost. In the background, one checkpoint can be in flight when the next is due.
ALLOWED = {"sync": 1, "async": 2}
PHASES = ("startup", "training", "saving", "purging")
VICTIMS = ("controller", "rank", "all")


@dataclass(frozen=True)
class Kill:
    """When and what to kill.

    Attributes:
        kind: ``moment``; ``saving``, ``purging``: when a checkpoint is seen half-written, half-removed.
        fraction: the moment, as a fraction of the duration of an uninterrupted run.
        ordinal: number of the half-written or half-removed checkpoint.
        delay: seconds from then to the kill.
        victim: controller, rank, or all.
    """

    kind: str
    fraction: float
    ordinal: int
    delay: float
    victim: str


def draw_kills(draw: random.Random) -> list[Kill]:
    """Return one to three random kills."""
    number = draw.choices([1, 2, 3], [0.7, 0.2, 0.1])[0]
    return [
        Kill(
            kind=draw.choices(["moment", "saving", "purging"], [0.45, 0.45, 0.1])[0],
            fraction=draw.random(),
            ordinal=draw.randint(1, 3),
            delay=draw.choice([0.0, draw.uniform(0, 0.005), draw.uniform(0, 0.08)]),
            victim=draw.choice(VICTIMS),
        )
        for _ in range(number)
    ]


@dataclass
class Reference:
    """The compared rows and the duration of an uninterrupted run."""

    rows: list[tuple[Any, ...]]
    seconds: float


@dataclass
class Report:
    """Result of one run.

    Attributes:
        kills: the phase and the victim of each.
        half_written: checkpoints left half-written, newer than the newest complete one.
        half_removed: checkpoints left half-removed.
        named: half-written checkpoints that the next attempt named when it resumed.
        lost: repeated steps, by kill.
        problems: differences from the expected result.
    """

    layout: str
    mode: str
    kills: list[tuple[str, str]] = field(default_factory=list)
    half_written: int = 0
    half_removed: int = 0
    named: int = 0
    lost: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def line(self, number: int) -> str:
        """Return one line of text."""
        kills = ", ".join(f"{victim} in {phase}" for phase, victim in self.kills)
        verdict = "; ".join(self.problems) or "equal"
        lost = "+".join(map(str, self.lost))
        what = f"{number:3} {self.layout:14} {self.mode:5} {self.seconds:5.1f} s"
        return f"{what}  lost {lost:6} {verdict}  ({kills})"


class Soak:
    """One run: killed, resumed to its end, compared.

    Args:
        folder: an empty folder for it.
        layout: one of LAYOUTS.
        mode: one of MODES.
        reference: the uninterrupted run.
    """

    def __init__(self, folder: Path, layout: str, mode: str, reference: Reference) -> None:
        self.folder, self.reference = folder, reference
        self.overrides = overrides_of(layout, mode)
        self.report = Report(layout, mode)
        self.allowed = ALLOWED[mode] * INTERVAL
        self._owed: set[int] = set()

    def run(self, kills: list[Kill], draw: random.Random) -> Report:
        """Kill, resume and compare."""
        started = time.monotonic()
        try:
            for kill in kills:
                if not self._attempt_until(kill, draw):
                    break
            if not self.report.problems:
                self._finish()
        except Exception as error:
            self.report.problems.append(f"{type(error).__name__}: {error}")
        self.report.seconds = time.monotonic() - started
        return self.report

    def _attempt_until(self, kill: Kill, draw: random.Random) -> bool:
        """Kill one attempt; return False if it ended before."""
        files = Files(self.folder)
        attempt = Attempt(self.folder, self.overrides)
        try:
            if not wait_for(attempt, files, kill, self.reference.seconds):
                self._require(attempt.end() == EXIT_OK, f"ended by itself: {_tail(attempt.said)}")
                if self.report.kills or self.report.problems:
                    return False
                # Every run must be killed: start over, and kill earlier.
                shutil.rmtree(self.folder)
                sooner = Kill("moment", kill.fraction / 2, 1, 0.0, kill.victim)
                return self._attempt_until(sooner, draw)
            phase = phase_of(attempt, files)
            self.report.kills.append((phase, attempt.kill(kill.victim, draw)))
            attempt.end()
            self._check_names(attempt.said, attempt.started, files)
            self._check_loss(files, attempt.started)
            return not self.report.problems
        finally:
            attempt.clear()

    def _check_loss(self, files: Files, since: float) -> None:
        """Require that a kill costs only the steps since the last checkpoint."""
        half_written, _ = files.unfinished()
        self.report.half_written += len(set(half_written) - self._owed)
        self.report.half_removed += len(files.unfinished(since)[1])
        self._owed |= set(half_written)
        last, newest = max((row["step"] for row in files.rows()), default=0), files.newest()
        self.report.lost.append(last - newest)
        within = 0 <= last - newest <= self.allowed
        self._require(within, f"newest complete checkpoint {newest} after step {last} was done")

    def _check_names(self, said: str, started: float, files: Files) -> None:
        """Require that an attempt that loaded a checkpoint named the half-written ones."""
        if "resumed from" not in said and not any(row["time"] > started for row in files.rows()):
            return
        for step in self._owed:
            named = f"step-{step} cannot be used: it was not finished" in said
            self.report.named += named
            self._require(named, f"half-written step-{step} was not named")
        self._owed.clear()

    def _finish(self) -> None:
        """Run the last attempt to its end, and check its files."""
        started, files = time.time(), Files(self.folder)
        ended = run_processes(self.folder, self.overrides)
        self._require(ended.code == EXIT_OK, f"exit code {ended.code}: {_tail(ended.said)}")
        self._check_names(ended.said, started, files)
        rows = compared(files.rows())
        self._require(rows == self.reference.rows, _difference(rows, self.reference.rows))
        half_written, half_removed = files.unfinished()
        self._require(not half_written + half_removed, f"left half: {half_written + half_removed}")
        self._require(files.newest() == STEPS, f"the newest checkpoint is {files.newest()}")

    def _require(self, holds: bool, problem: str) -> None:
        if not holds:
            self.report.problems.append(problem)


def wait_for(attempt: Attempt, files: Files, kill: Kill, life: float) -> bool:
    """Wait for the moment of a kill; return False if the attempt ends before."""
    deadline = attempt.started + kill.fraction * life
    seen: set[int] = set()
    while attempt.is_running:
        if kill.kind == "moment":
            if time.time() >= deadline:
                return True
        else:
            half_written, half_removed = files.unfinished(attempt.started)
            seen |= set(half_written if kill.kind == "saving" else half_removed)
            if len(seen) >= kill.ordinal:
                time.sleep(kill.delay)
                return attempt.is_running
        time.sleep(0.001 if files.run_dir else 0.01)
    return False


def phase_of(attempt: Attempt, files: Files) -> str:
    """Return the current phase of an attempt, as seen from outside."""
    half_written, half_removed = files.unfinished(attempt.started)
    if half_written or half_removed:
        return "saving" if half_written else "purging"
    trains = any(row["time"] > attempt.started for row in files.rows()[-1:])
    return "training" if trains else "startup"


def overrides_of(layout: str, mode: str) -> list[str]:
    """Return the overrides of a run."""
    return [*TINY, *OFTEN, *LAYOUTS[layout], MODES[mode]]


def _difference(rows: list[tuple[Any, ...]], wanted: list[tuple[Any, ...]]) -> str:
    if [row[0] for row in rows] != [row[0] for row in wanted]:
        return f"steps {[row[0] for row in rows]}"
    return next((f"{a} instead of {b}" for a, b in zip(rows, wanted, strict=True) if a != b), "")


def _tail(said: str) -> str:
    return " | ".join(said.strip().splitlines()[-4:])


def make_reference(folder: Path, layout: str, mode: str) -> Reference:
    """Run a command to its end.

    Raises:
        RuntimeError: the run fails.
    """
    started = time.monotonic()
    ended = run_processes(folder, overrides_of(layout, mode))
    rows = compared(Files(folder).rows())
    if ended.code != EXIT_OK or [row[0] for row in rows] != list(range(1, STEPS + 1)):
        raise RuntimeError(f"the uninterrupted run of {layout}, {mode} failed: {ended.said}")
    return Reference(rows, time.monotonic() - started)


def soak(folder: Path, runs: int, seed: int, at_once: int, say: Callable[[str], None]) -> list[Report]:
    """Run the references, then the killed runs.

    Args:
        folder: where they run; folders of equal runs are removed.
        runs: number of killed runs; layouts and modes take turns.
        seed: seed of the random choices.
        at_once: number of runs at the same time.
        say: called with a line for each run.
    """
    kinds = [(layout, mode) for mode in MODES for layout in LAYOUTS]
    used = kinds[:runs]
    with ThreadPoolExecutor(at_once) as workers:
        made = workers.map(lambda n: make_reference(folder / f"reference-{n}", *used[n]), range(len(used)))
        references = dict(zip(used, made, strict=True))
        for (layout, mode), reference in references.items():
            say(f"reference {layout:14} {mode:5} {reference.seconds:5.1f} s")

        def one(number: int) -> Report:
            draw = random.Random(f"{seed}/{number}")
            kind, place = kinds[number % len(kinds)], folder / f"run-{number}"
            report = Soak(place, *kind, references[kind]).run(draw_kills(draw), draw)
            say(report.line(number))
            if not report.problems:
                shutil.rmtree(place)
            return report

        reports = list(workers.map(one, range(runs)))
    for number, (layout, mode) in enumerate(used):
        # The way that checkpoints are written must not change numbers.
        if references[layout, mode].rows != references[layout, "sync"].rows:
            reports[number].problems.append("the reference differs from that of sync")
    return reports


def table(reports: list[Report]) -> str:
    """Return counts by layout and mode, as Markdown."""
    lines = [
        "| layout | checkpoints | runs | kills | at startup | in training | inside saving | inside purging "
        "| half-written left, named at resume | half-removed left | steps lost: most, mean "
        "| all losses equal |",
        "|" + "---|" * 12,
    ]
    kinds = sorted({(each.layout, each.mode) for each in reports}, key=lambda kind: (kind[1], kind[0]))
    for layout, mode in [*kinds, ("all", "")]:
        own = [each for each in reports if layout == "all" or (each.layout, each.mode) == (layout, mode)]
        lines.append(_table_row(layout, mode, own))
    return "\n".join(lines)


def _table_row(layout: str, mode: str, own: list[Report]) -> str:
    kills = [phase for each in own for phase, _ in each.kills]
    lost = [steps for each in own for steps in each.lost]
    equal = sum(not each.problems for each in own)
    cells = [
        *(layout, mode, len(own), len(kills), *(kills.count(phase) for phase in PHASES)),
        f"{sum(each.half_written for each in own)}, {sum(each.named for each in own)}",
        sum(each.half_removed for each in own),
        f"{max(lost, default=0)}, {statistics.mean(lost or [0]):.1f}",
        "yes" if equal == len(own) else f"**no**: {len(own) - equal} of {len(own)}",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def document(reports: list[Report], seed: int, at_once: int, seconds: float) -> str:
    """Return the table and its explanation."""
    victims = [victim for each in reports for _, victim in each.kills]
    killed = ", ".join(f"{victims.count(name)} x {name}" for name in VICTIMS)
    problems = [
        f"* {each.layout}, {each.mode}: {'; '.join(each.problems)}\n" for each in reports if each.problems
    ]
    columns = ", ".join(f"`{name}`" for name in COMPARED)
    return f"""# Runs killed at random and resumed

`python experiments/checkpoint/soak.py --runs {len(reports)} --seed {seed} --at-once {at_once}`:
{seconds / 60:.1f} minutes on {os.cpu_count()} cores ({platform.machine()}), torch {version("torch")}.

`llama3_tiny` with 2 layers on 4 ranks, {STEPS} steps, a checkpoint every {INTERVAL}, the newest {KEEP} kept.
Each run was killed with SIGKILL one to three times ({killed}) and then the same
command was run to the end.

A kill may cost the steps since the newest complete checkpoint: at most one interval ({INTERVAL} steps) with
sync; two ({2 * INTERVAL}) with async, where the checkpoint of one interval can still be in flight when that
of the next is due. "All losses equal" means: every row of `metrics.jsonl` ({columns})
occurs once and is bitwise equal to that of the uninterrupted run, and nothing half-written or half-removed is
left at the end. A half-written checkpoint is "named" when the next attempt reports that it was skipped.

{table(reports)}
""" + "".join(["\n## What went wrong\n\n", *problems] if problems else [])


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2, help="runs at the same time")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "soak", help="folder of the runs")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("SOAK.md"))
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    started = time.monotonic()
    reports = soak(
        arguments.folder,
        arguments.runs,
        arguments.seed,
        arguments.at_once,
        lambda line: print(line, flush=True),
    )
    arguments.output.write_text(
        document(reports, arguments.seed, arguments.at_once, time.monotonic() - started)
    )
    print(table(reports))
    sys.exit(any(each.problems for each in reports))


if __name__ == "__main__":
    main()
