"""Kills training runs with SIGKILL at random moments, resumes them, and compares them with one left alone.

    python experiments/checkpoint/soak.py --runs 40 --seed 0

Runs of four ranks, as a user starts them, on several layouts, with checkpoints written while training waits
and in the background. Each is killed one to three times: at a moment drawn from its whole life, or as soon as
a checkpoint is seen half-written or half-removed; what is killed is the controller, one rank, or every
process. Then the same command is run again until it has come to its end. A run that differs in anything from
the uninterrupted one (losses and norms compared bit by bit) makes the exit code 1, and its folder is kept.

Writes a Markdown table. What is drawn depends on the seed alone; what a kill hits depends on the machine too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.checkpoint.catalog import MANIFEST, CheckpointFolder
from harness.errors import EXIT_OK
from harness.metrics.jsonl import Row, read_metrics

ROOT = Path(__file__).resolve().parents[2]
STEPS, INTERVAL, KEEP = 18, 3, 2
TINY = [
    *("model=llama3_tiny", "model.n_layers=2", "data=synthetic", "tokenizer=bytes", "training.seq_len=32"),
    *("training.global_batch_size=4", "schedule.warmup_steps=2", "cluster.device=cpu"),
    *("metrics.console=plain", "metrics.log_interval=1"),
]
OFTEN = [
    f"training.steps={STEPS}",
    f"checkpoint.interval={INTERVAL}",
    f"checkpoint.keep_latest_k={KEEP}",
]
LAYOUTS = {
    "fsdp 4": ["parallelism=fsdp", "parallelism.dp_shard=4"],
    "fsdp 2 x tp 2": ["parallelism=fsdp_tp"],
    "tp 2 x pp 2": ["parallelism=tp_pp"],
    "hsdp 2 x 2": ["parallelism=hsdp"],
}
MODES = {"sync": "checkpoint.async_mode=disabled", "async": "checkpoint.async_mode=async"}
# Intervals that a kill may cost. In the background the checkpoint of one interval may still be in flight when
# that of the next is due.
ALLOWED = {"sync": 1, "async": 2}
# What has to be the same in every row, to the last bit.
COMPARED = ("step", "loss", "loss_max", "grad_norm", "lr", "tokens", "valid_tokens", "skipped_steps")
PHASES = ("startup", "training", "saving", "purging")
VICTIMS = ("controller", "rank", "all")
# For the slowest machine with the most on it: nothing is decided by it but that something is stuck.
PATIENCE = 900.0


class Attempt:
    """One process of ``python -m harness.train`` with its ranks, in a session of its own.

    Args:
        folder: where it runs and writes; the same for all attempts of a run.
        overrides: what is typed.
        patch: source that every Python process of it runs when it starts.
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
        """Everything it has printed."""
        return self.output.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        """Whether the controller is there."""
        return self.process.poll() is None

    def processes(self) -> list[int]:
        """All its processes, controller and ranks; those of one run alone have this working directory."""
        found = []
        for entry in os.listdir("/proc"):
            # A zombie has no working directory.
            with contextlib.suppress(OSError):
                if entry.isdigit() and os.readlink(f"/proc/{entry}/cwd") == str(self.folder):
                    found.append(int(entry))
        return found

    def ranks(self) -> list[int]:
        """The ranks that the controller has started."""
        return [pid for pid in self.processes() if b"harness.rank" in _command(pid)]

    def kill(self, victim: str, draw: random.Random) -> str:
        """Kills the controller, one rank, or all.

        Returns:
            which it was: the controller, where there were no ranks yet.
        """
        ranks = self.ranks() if victim == "rank" else []
        victim = "controller" if victim == "rank" and not ranks else victim
        pids = {"controller": [self.process.pid], "rank": [draw.choice(ranks)] if ranks else []}
        for pid in pids[victim] if victim in pids else self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return victim

    def end(self) -> int:
        """Waits until nothing of it is left; returns the exit code of the controller.

        Raises:
            TimeoutError: something stays.
        """
        deadline = time.monotonic() + PATIENCE
        while self.is_running or self.processes():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self.processes())} processes are left after {PATIENCE:.0f} s")
            time.sleep(0.02)
        return self.process.returncode

    def clear(self) -> None:
        """Leaves no process behind, whatever has happened."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def environment(folder: Path, patch: str = "") -> dict[str, str]:
    """Variables of an attempt: nothing of a surrounding launch, and the patch where Python looks for it."""
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
    """What the attempts of one run have written; empty until there is a run folder."""

    folder: Path
    _run_dir: Path | None = None

    @property
    def run_dir(self) -> Path | None:
        """The only run folder below."""
        if self._run_dir is None:
            self._run_dir = next((p.parent for p in self.folder.glob("runs/*/*/job.json")), None)
        return self._run_dir

    def rows(self) -> list[Row]:
        """What was measured so far."""
        try:
            return [] if self.run_dir is None else read_metrics(self.run_dir / "metrics.jsonl")
        except FileNotFoundError:
            return []

    @property
    def checkpoints(self) -> CheckpointFolder:
        """Its checkpoints."""
        return CheckpointFolder(str((self.run_dir or self.folder) / "checkpoints"))

    def newest(self) -> int:
        """Step of the newest complete checkpoint, 0 if there is none."""
        return next((each.step for each in self.checkpoints.complete()[0]), 0)

    def unfinished(self, since: float = 0.0) -> tuple[list[int], list[int]]:
        """Checkpoints without a manifest that were touched since a time: half-written, and half-removed.

        Looked at many times a second, so without the catalog, which reads what it finds.
        """
        if self.run_dir is None:
            return [], []
        whole, half = [0], []
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.run_dir / "checkpoints"):
                if entry.name.startswith("step-"):
                    step = int(entry.name[5:])
                    if os.path.exists(f"{entry.path}/{MANIFEST}"):
                        whole.append(step)
                    elif os.stat(entry.path).st_mtime >= since:
                        half.append(step)
        return sorted(s for s in half if s > max(whole)), sorted(s for s in half if s < max(whole))


@dataclass(frozen=True)
class Kill:
    """When and what to kill.

    Attributes:
        kind: ``moment``; ``saving``, ``purging``: when a checkpoint is seen half-written, half-removed.
        fraction: the moment, in lives of an uninterrupted run.
        ordinal: at which checkpoint that is seen so.
        delay: seconds to wait then.
        victim: controller, rank, or all.
    """

    kind: str
    fraction: float
    ordinal: int
    delay: float
    victim: str


def draw_kills(draw: random.Random) -> list[Kill]:
    """One to three kills."""
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
    """The uninterrupted run: what has to come out, and how long it takes."""

    rows: list[tuple[Any, ...]]
    seconds: float


@dataclass
class Report:
    """What became of one run.

    Attributes:
        kills: the phase and the victim of each.
        half_written: checkpoints that kills left half-written, newer than the newest complete one.
        half_removed: those that they left half-removed.
        named: half-written ones that the next attempt named when it resumed.
        lost: steps that had to be done again, by kill.
        problems: what is not as it has to be.
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
        """The run in a line."""
        kills = ", ".join(f"{victim} in {phase}" for phase, victim in self.kills)
        verdict = "; ".join(self.problems) or "equal"
        lost = "+".join(map(str, self.lost))
        what = f"{number:3} {self.layout:14} {self.mode:5} {self.seconds:5.1f} s"
        return f"{what}  lost {lost:6} {verdict}  ({kills})"


class Soak:
    """One run: killed as planned, resumed to its end, compared.

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
        """Goes through it all."""
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
        """One attempt that is killed; False if it came to its end before."""
        files = Files(self.folder)
        attempt = Attempt(self.folder, self.overrides)
        try:
            if not wait_for(attempt, files, kill, self.reference.seconds):
                self._require(attempt.end() == EXIT_OK, f"ended by itself: {_tail(attempt.said)}")
                if self.report.kills or self.report.problems:
                    return False
                # No run counts that was not killed: from the start, and earlier.
                shutil.rmtree(self.folder)
                sooner = Kill("moment", kill.fraction / 2, 1, 0.0, kill.victim)
                return self._attempt_until(sooner, draw)
            phase = phase_of(attempt, files)
            self.report.kills.append((phase, attempt.kill(kill.victim, draw)))
            attempt.end()
            self._check_names(attempt, files)
            self._look_at_what_is_left(files, attempt.started)
            return not self.report.problems
        finally:
            attempt.clear()

    def _look_at_what_is_left(self, files: Files, since: float) -> None:
        """After a kill: nothing is lost but the steps since the last checkpoint."""
        half_written, _ = files.unfinished()
        self.report.half_written += len(set(half_written) - self._owed)
        self.report.half_removed += len(files.unfinished(since)[1])
        self._owed |= set(half_written)
        last, newest = max((row["step"] for row in files.rows()), default=0), files.newest()
        self.report.lost.append(last - newest)
        within = 0 <= last - newest <= self.allowed
        self._require(within, f"newest complete checkpoint {newest} after step {last} was done")

    def _check_names(self, attempt: Attempt, files: Files) -> None:
        """An attempt that came to loading has to name the half-written checkpoints that it passed over."""
        said = attempt.said
        if "resumed from" not in said and not any(row["time"] > attempt.started for row in files.rows()):
            return
        for step in self._owed:
            named = f"step-{step} cannot be used: it was not finished" in said
            self.report.named += named
            self._require(named, f"half-written step-{step} was not named")
        self._owed.clear()

    def _finish(self) -> None:
        """The last attempt, and what has to be there after it."""
        attempt, files = Attempt(self.folder, self.overrides), Files(self.folder)
        try:
            code = attempt.end()
        finally:
            attempt.clear()
        self._require(code == EXIT_OK, f"exit code {code}: {_tail(attempt.said)}")
        self._check_names(attempt, files)
        rows = compared(files.rows())
        self._require(rows == self.reference.rows, _difference(rows, self.reference.rows))
        half_written, half_removed = files.unfinished()
        self._require(not half_written + half_removed, f"left half: {half_written + half_removed}")
        self._require(files.newest() == STEPS, f"the newest checkpoint is {files.newest()}")

    def _require(self, holds: bool, problem: str) -> None:
        if not holds:
            self.report.problems.append(problem)


def wait_for(attempt: Attempt, files: Files, kill: Kill, life: float) -> bool:
    """Waits for the moment of a kill; False if the attempt ends before."""
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
    """What an attempt is at right now, seen from outside."""
    half_written, half_removed = files.unfinished(attempt.started)
    if half_written or half_removed:
        return "saving" if half_written else "purging"
    trains = any(row["time"] > attempt.started for row in files.rows()[-1:])
    return "training" if trains else "startup"


def overrides_of(layout: str, mode: str) -> list[str]:
    """The command of a run."""
    return [*TINY, *OFTEN, *LAYOUTS[layout], MODES[mode]]


def compared(rows: list[Row]) -> list[tuple[Any, ...]]:
    """What of each row has to be the same."""
    return [tuple(row[name] for name in COMPARED) for row in rows]


def _difference(rows: list[tuple[Any, ...]], wanted: list[tuple[Any, ...]]) -> str:
    if [row[0] for row in rows] != [row[0] for row in wanted]:
        return f"steps {[row[0] for row in rows]}"
    return next((f"{a} instead of {b}" for a, b in zip(rows, wanted, strict=True) if a != b), "")


def _tail(said: str) -> str:
    return " | ".join(said.strip().splitlines()[-4:])


def make_reference(folder: Path, layout: str, mode: str) -> Reference:
    """Runs a command to its end, undisturbed.

    Raises:
        RuntimeError: it does not get there.
    """
    started = time.monotonic()
    attempt = Attempt(folder, overrides_of(layout, mode))
    try:
        code = attempt.end()
    finally:
        attempt.clear()
    rows = compared(Files(folder).rows())
    if code != EXIT_OK or [row[0] for row in rows] != list(range(1, STEPS + 1)):
        raise RuntimeError(f"the uninterrupted run of {layout}, {mode} failed: {attempt.said}")
    return Reference(rows, time.monotonic() - started)


def soak(folder: Path, runs: int, seed: int, at_once: int, say: Callable[[str], None]) -> list[Report]:
    """Makes the references, then the runs.

    Args:
        folder: where they run; what was equal is removed.
        runs: how many; layouts and modes take turns.
        seed: of what is drawn.
        at_once: runs that go on side by side.
        say: takes a line per run.
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
        # How checkpoints are written must not show in the numbers.
        if references[layout, mode].rows != references[layout, "sync"].rows:
            reports[number].problems.append("the reference differs from that of sync")
    return reports


def table(reports: list[Report]) -> str:
    """Counts by layout and mode, Markdown."""
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
    """The table with what has to be known to read it."""
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
is there once and is, bit by bit, that of the uninterrupted run; and nothing half-written or half-removed is
left in the end. A half-written checkpoint is "named" when the attempt that goes on says that it passed it
over.

{table(reports)}
""" + "".join(["\n## What went wrong\n\n", *problems] if problems else [])


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "soak", help="where runs lie meanwhile"
    )
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
