"""Damages checkpoints, fills and locks disks, kills removals: what the user reads, and what the run comes to.

    python experiments/checkpoint/faults.py

A small run is finished once on one rank and once on four. For every fault its folder is copied, its
``result.json`` removed so that it does not count as finished, the fault injected, and the same command run
again. Each fault states what has to happen: the step that is resumed from, the exit code, words that have to
be read, and that the run ends with the losses of the undisturbed one. Writes a Markdown table; exit code 1
if anything is otherwise.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from soak import LAYOUTS, MODES, ROOT, TINY, Attempt, Files, compared

from harness.checkpoint.catalog import MANIFEST, METADATA, reading
from harness.errors import EXIT_MACHINE, EXIT_OK, EXIT_USER

STEPS, INTERVAL = 8, 2
COMMAND = [
    *TINY,
    f"training.steps={STEPS}",
    f"checkpoint.interval={INTERVAL}",
    "checkpoint.keep_latest_k=0",
]
RANKS = {1: ["parallelism=single"], 4: LAYOUTS["fsdp 4"]}
WEIGHT, MOMENT = "layers.0.attention.wq.weight", "optimizer.state.layers.1.feed_forward.w1.weight.exp_avg"
ROOM = 1 << 20


@dataclass
class Ended:
    """How a command ended, and everything it printed."""

    code: int
    said: str


class Runner(Protocol):
    """Runs the command in a folder; ``patch`` is source that its processes run when they start."""

    def __call__(self, folder: Path, overrides: Iterable[str], patch: str = "") -> Ended: ...


def run_processes(folder: Path, overrides: Iterable[str], patch: str = "") -> Ended:
    """Runs the command as a user does."""
    attempt = Attempt(folder, overrides, patch)
    try:
        return Ended(attempt.end(), attempt.said)
    finally:
        attempt.clear()


@dataclass(frozen=True)
class Expected:
    """What has to become of a command.

    Attributes:
        resumed: the step it resumes from; None if it starts from the beginning, or not at all.
        code: its exit code.
        reads: regular expressions, each of which has to be found in one line of what it prints.
        equal: whether it ends with the losses of the undisturbed run.
    """

    resumed: int | None
    code: int = EXIT_OK
    reads: tuple[str, ...] = ()
    equal: bool = True


@dataclass
class Bench:
    """A copy of a finished run to do something to.

    Attributes:
        folder: where it lies.
        ranks: how many ranks it has.
        run: what runs the command.
        rows: of metrics.jsonl, what the undisturbed run had.
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
        """The folder of its checkpoints."""
        return self.run_dir / "checkpoints"

    def step(self, step: int) -> Path:
        """The checkpoint of a step."""
        return self.checkpoints / f"step-{step}"

    def data_file(self, step: int, rank: int = 0) -> Path:
        """What a rank wrote."""
        return self.step(step) / f"__{rank}_0.distcp"

    def keep(self, *steps: int) -> None:
        """Removes all checkpoints but some, as if the run had come only so far."""
        for path in self.checkpoints.glob("step-*"):
            if path.name not in {f"step-{step}" for step in steps}:
                shutil.rmtree(path)

    def whole(self) -> list[int]:
        """Steps of the checkpoints that are complete."""
        return sorted(each.step for each in Files(self.folder).checkpoints.complete()[0])

    def steps(self) -> list[int]:
        """Steps that there are folders for."""
        return Files(self.folder).checkpoints.steps()

    def command(self, expected: Expected, *more: str, patch: str = "") -> None:
        """Runs the command and compares it with what has to become of it."""
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
        """Keeps the lines that tell of the fault; nothing else may look like one."""
        telling = [line for line in ended.said.splitlines() if _TELLING.search(line)]
        for pattern in patterns:
            self.require(any(re.search(pattern, line) for line in telling), f"no line has {pattern!r}")
        if not patterns:
            self.require(not telling, f"unexpected: {telling}")
        if ended.code == EXIT_USER:
            self.require(len(telling) == 1, f"{len(telling)} lines for a mistake")
        self.lines += [shortened(line, self.folder) for line in telling]

    def require(self, holds: bool, problem: str) -> None:
        """Notes what is not as it has to be."""
        if not holds:
            self.problems.append(problem)


_TELLING = re.compile(r"cannot be used|could not be|^error:|WARNING|Error|Traceback")


def shortened(line: str, folder: Path) -> str:
    """A line as it was printed, without where this machine keeps its runs."""
    line = re.sub(rf"(?:{re.escape(str(folder))}/)?runs/\w+/\w+/checkpoints", "...", line)
    line = re.sub(rf"{re.escape(str(folder))}/runs/\w+/\w+", "...", line)
    return line.replace(f"{folder}/", "")


@dataclass(frozen=True)
class Fault:
    """One row of the table.

    Attributes:
        name: what is done.
        happen: does it and runs the command, once or more.
        ranks: of the run that it is done to.
        needs_processes: whether it can only be done to processes of their own.
    """

    name: str
    happen: Callable[[Bench], None]
    ranks: int = 1
    needs_processes: bool = True


def damage(
    name: str,
    inject: Callable[[Bench], object],
    resumed: int | None,
    *reads: str,
    ranks: int = 1,
    code: int = EXIT_OK,
) -> Fault:
    """A fault that is there when the command starts."""

    def happen(bench: Bench) -> None:
        inject(bench)
        bench.command(Expected(resumed, code, reads))
        if code == EXIT_OK:
            bench.require(bench.whole()[-1] == STEPS, "the last checkpoint is not whole again")

    return Fault(name, happen, ranks, needs_processes=ranks > 1)


# Faults that lie in files.


def truncate(path: Path, share: float = 0.5) -> None:
    """Cuts a file."""
    os.truncate(path, int(path.stat().st_size * share))


def flip(path: Path, offset: int) -> None:
    """Flips one bit of a file."""
    with path.open("rb+") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def flip_entry(name: str, step: int = STEPS) -> Callable[[Bench], None]:
    """Flips a bit in the middle of a tensor."""

    def inject(bench: Bench) -> None:
        path, offset = place_of(bench.step(step), name)
        flip(path, offset)

    return inject


def place_of(checkpoint: Path, name: str) -> tuple[Path, int]:
    """File and offset of the middle of the last piece of a tensor, or of the last whose name begins so."""
    from torch.distributed.checkpoint import FileSystemReader

    stored = FileSystemReader(checkpoint).read_metadata().storage_data
    places = [(key.fqn, place) for key, place in stored.items() if key.fqn.startswith(name)]
    _, place = max(places, key=lambda each: (each[0], each[1].relative_path))
    return checkpoint / place.relative_path, place.offset + place.length // 2


def make_empty(folder: Path) -> None:
    """Removes what is in a folder."""
    for path in folder.iterdir():
        path.unlink()


def damage_newest_two(bench: Bench) -> None:
    """The newest can be seen to be damaged; the one before only when it is read."""
    truncate(bench.data_file(8))
    flip_entry(WEIGHT, 6)(bench)


def damage_all(bench: Bench) -> None:
    """None of them can be used, and all can be seen to be damaged."""
    for step in bench.steps():
        truncate(bench.data_file(step))


def flip_in_all(bench: Bench) -> None:
    """None of them can be used, which is found when they are read."""
    for step in bench.steps():
        flip_entry(WEIGHT, step)(bench)


def leave_all_unfinished(bench: Bench) -> None:
    """As if the run had never come to the end of its first save."""
    for step in bench.steps():
        (bench.step(step) / MANIFEST).unlink()


def put_unrelated(bench: Bench) -> None:
    """What people and tools leave lying around."""
    (bench.checkpoints / "notes.txt").write_text("do not touch")
    (bench.checkpoints / "step-best").mkdir()
    (bench.checkpoints / ".nfs0001").write_bytes(b"x")
    (bench.checkpoints / "superseded").mkdir()
    (bench.step(8) / "README").write_text("the good one")


def put_file_named_like_a_checkpoint(bench: Bench) -> None:
    """A file where a checkpoint's folder would be."""
    (bench.checkpoints / "step-99").write_text("not a folder")


def put_backup(bench: Bench) -> None:
    """A copy that somebody made by hand, of a step that the run has not come to."""
    shutil.copytree(bench.step(8), bench.checkpoints / "backup-of-step-12")


NOT_FINISHED = r"step-8 cannot be used: it was not finished: there is no manifest\.json; using .*step-6"
SAID_AT_SIZE = r"step-8 cannot be used: {} has \d+ bytes instead of \d+; using .*step-6"
SAID_AT_CHECKSUM = r"WARNING .*step-8 cannot be used: {}.* checksum .*\(found by rank {}\); using .*step-6"
IN_DATA = r"__\d_0\.distcp: bytes \d+ to \d+ do not have the"

DAMAGES = [
    damage(
        "data file truncated",
        lambda b: truncate(b.data_file(8)),
        6,
        SAID_AT_SIZE.format("__0_0.distcp"),
    ),
    damage("bit flipped in a weight", flip_entry(WEIGHT), 6, SAID_AT_CHECKSUM.format(IN_DATA, 0)),
    damage("bit flipped in optimizer state", flip_entry(MOMENT), 6, SAID_AT_CHECKSUM.format(IN_DATA, 0)),
    damage("bit flipped in random states", flip_entry("rng."), 6, SAID_AT_CHECKSUM.format(IN_DATA, 0)),
    damage(
        "first bit of a data file flipped",
        lambda b: flip(b.data_file(8), 0),
        6,
        SAID_AT_CHECKSUM.format(IN_DATA, 0),
    ),
    damage(
        "last bit of a data file flipped",
        lambda b: flip(b.data_file(8), b.data_file(8).stat().st_size - 1),
        6,
        SAID_AT_CHECKSUM.format(IN_DATA, 0),
    ),
    damage(
        "bit flipped in `.metadata`",
        lambda b: flip(b.step(8) / METADATA, (b.step(8) / METADATA).stat().st_size // 2),
        6,
        r"step-8 cannot be used: \.metadata does not have the checksum .*using .*step-6",
    ),
    damage(
        "`.metadata` deleted",
        lambda b: (b.step(8) / METADATA).unlink(),
        6,
        r"step-8 cannot be used: \.metadata is missing; using .*step-6",
    ),
    damage(
        "manifest truncated",
        lambda b: truncate(b.step(8) / MANIFEST),
        6,
        r"step-8 cannot be used: manifest\.json is damaged: .*; using .*step-6",
    ),
    damage(
        "manifest empty",
        lambda b: truncate(b.step(8) / MANIFEST, 0.0),
        6,
        r"step-8 cannot be used: manifest\.json is damaged: .*; using .*step-6",
    ),
    damage(
        "bit flipped in the manifest",
        lambda b: flip(b.step(8) / MANIFEST, (b.step(8) / MANIFEST).read_bytes().index(b'"step": 8') + 8),
        6,
        r"step-8 cannot be used: manifest\.json is damaged: .*checksum.*; using .*step-6",
    ),
    damage(
        "manifest overwritten with other JSON",
        lambda b: (b.step(8) / MANIFEST).write_text("[]"),
        6,
        r"step-8 cannot be used: manifest\.json is damaged: .*; using .*step-6",
    ),
    damage(
        "manifest deleted (half-written)",
        lambda b: (b.step(8) / MANIFEST).unlink(),
        6,
        NOT_FINISHED,
    ),
    damage(
        "data file deleted",
        lambda b: b.data_file(8).unlink(),
        6,
        r"step-8 cannot be used: __0_0\.distcp is missing; using .*step-6",
    ),
    damage("step folder empty", lambda b: make_empty(b.step(8)), 6, NOT_FINISHED),
    damage(
        "newest truncated, a bit flipped in the one before",
        damage_newest_two,
        4,
        r"step-8 cannot be used: .* bytes instead of",
        r"step-6 cannot be used: .* checksum .*using .*step-4",
    ),
    damage(
        "all truncated",
        damage_all,
        None,
        r"^error: .*no checkpoint can be used \(step-8: .*step-2: .*would work: checkpoint\.resume=false",
        code=EXIT_USER,
    ),
    damage(
        "a bit flipped in all",
        flip_in_all,
        None,
        r"^error: .*no checkpoint can be used \(.*step-8 .*step-2 .*would work: checkpoint\.resume=false",
        code=EXIT_USER,
    ),
    damage(
        "no manifest in any",
        leave_all_unfinished,
        None,
        r"step-8 cannot be used: it was not finished",
    ),
    damage("unrelated files and folders beside and in it", put_unrelated, 8),
    damage(
        "a file called `step-99` beside it",
        put_file_named_like_a_checkpoint,
        8,
        r"step-99 cannot be used: it was not finished: there is no manifest\.json; using .*step-8",
    ),
    damage("a copy called `backup-of-step-12` beside it", put_backup, 8),
    damage(
        "one rank's file deleted",
        lambda b: b.data_file(8, 2).unlink(),
        6,
        r"step-8 cannot be used: __2_0\.distcp is missing; using .*step-6",
        ranks=4,
    ),
    damage(
        "bit flipped in one rank's random states",
        flip_entry("rng.dp_shard3of4"),
        6,
        SAID_AT_CHECKSUM.format(IN_DATA, 3),
        ranks=4,
    ),
    damage(
        "bit flipped in `.metadata`, 4 ranks",
        lambda b: flip(b.step(8) / METADATA, (b.step(8) / METADATA).stat().st_size // 2),
        6,
        r"step-8 cannot be used: \.metadata does not have the checksum .*using .*step-6",
        ranks=4,
    ),
    damage(
        "a bit flipped in all, 4 ranks",
        flip_in_all,
        None,
        r"^error: .*no checkpoint can be used \(.*step-8 .*step-2 .*would work: checkpoint\.resume=false",
        ranks=4,
        code=EXIT_USER,
    ),
]

# Faults of the disk.


def can_mount() -> bool:
    """Whether small file systems can be made here."""
    return shutil.which("mount") is not None and os.geteuid() == 0 and _mounts_work()


def _mounts_work() -> bool:
    place = ROOT / "runs" / ".mount-probe"
    place.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if made.returncode == 0:
        subprocess.run(["umount", str(place)], check=True)
    place.rmdir()
    return made.returncode == 0


@contextmanager
def small_disk(bench: Bench) -> Iterator[None]:
    """A file system of its own under the checkpoints, with room for less than one more."""
    kept, place = bench.folder / "kept", bench.checkpoints
    place.rename(kept)
    place.mkdir()
    used = sum(4096 + path.stat().st_size for path in kept.rglob("*"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={used + ROOM}", "tmpfs", str(place)], check=True)
    try:
        shutil.copytree(kept, place, dirs_exist_ok=True)
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def remount(bench: Bench, options: str) -> None:
    """Changes that file system."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(bench.checkpoints)], check=True)


def before_step(step: int, body: str) -> str:
    """Source that does something on rank 0 before a step, the first after a resume from 4 being 5."""
    return f"""
import os
if os.environ.get("RANK", "0") == "0":
    import importlib.abc, importlib.util, sys
    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "harness.loop.engine":
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            load = spec.loader.exec_module
            def exec_module(module):
                load(module)
                original, calls = module.Engine.gradients, []
                def gradients(self, *args, **kwargs):
                    calls.append(0)
                    if len(calls) == {step} - 4:
                        {body}
                    return original(self, *args, **kwargs)
                module.Engine.gradients = gradients
            spec.loader.exec_module = exec_module
            return spec
    sys.meta_path.insert(0, Finder())
"""


def mounting(bench: Bench, options: str) -> str:
    """A statement that changes the file system from inside the run."""
    command = ["mount", "-o", f"remount,{options}", str(bench.checkpoints)]
    return f"import subprocess; subprocess.run({command}, check=True)"


def contents(bench: Bench, *steps: int) -> dict[str, bytes]:
    """All files of some checkpoints."""
    return {str(p): p.read_bytes() for step in steps for p in bench.step(step).iterdir()}


def not_written(step: int, why: str) -> str:
    """What is read of a save that failed."""
    return rf"the checkpoint of step {step} could not be written.*{why}"


# torch's own writer says less than the system's call.
FULL = r"No space left on device"
READ_ONLY = r"Read-only file system"


def full_disk(mode: str, ranks: int = 1) -> list[Fault]:
    """What becomes of a disk that is full, by what the job allows and what comes after."""
    options = MODES[mode]

    def stops_at_the_first(bench: Bench) -> None:
        bench.keep(2, 4)
        with small_disk(bench):
            before = contents(bench, 2, 4)
            failed = Expected(4, EXIT_MACHINE, (not_written(6, FULL),))
            bench.command(failed, options, "checkpoint.max_failed_saves=0")
            bench.require(contents(bench, 2, 4) == before, "earlier checkpoints were touched")
            bench.require(bench.steps() == [2, 4], f"left: {bench.steps()}")
            remount(bench, "size=64m")
            bench.command(Expected(4), options, "checkpoint.max_failed_saves=0")

    def stops_at_the_last(bench: Bench) -> None:
        bench.keep(2, 4)
        with small_disk(bench):
            before = contents(bench, 2, 4)
            failed = Expected(4, EXIT_MACHINE, (r"WARNING " + not_written(6, FULL), not_written(8, FULL)))
            bench.command(failed, options, "checkpoint.max_failed_saves=1")
            bench.require(contents(bench, 2, 4) == before, "earlier checkpoints were touched")
            remount(bench, "size=64m")
            bench.command(Expected(4), options, "checkpoint.max_failed_saves=1")

    def goes_on(bench: Bench) -> None:
        bench.keep(2, 4)
        with small_disk(bench):
            # In the background the save of step 6 goes on beside step 7: it fails within the two seconds.
            makes_room = before_step(7, f"import time; time.sleep(2); {mounting(bench, 'size=64m')}")
            warned = Expected(4, reads=(r"WARNING " + not_written(6, FULL),))
            bench.command(warned, options, "checkpoint.max_failed_saves=1", patch=makes_room)
            bench.require(bench.whole() == [2, 4, 8], f"whole: {bench.whole()}")

    who = f", {ranks} ranks" if ranks > 1 else ""
    return [
        Fault(f"disk full, {mode}{who}, `max_failed_saves=0`; room made, again", stops_at_the_first, ranks),
        Fault(f"disk full, {mode}{who}, `max_failed_saves=1`; room made, again", stops_at_the_last, ranks),
        Fault(f"disk full at step 6, room at step 7, {mode}{who}, `max_failed_saves=1`", goes_on, ranks),
    ]


def read_only_from_the_start(bench: Bench) -> None:
    """The first save would fail; so would looking for a writable folder hours later."""
    bench.keep(2, 4)
    with small_disk(bench):
        remount(bench, "ro")
        refused = Expected(None, EXIT_USER, (r"^error: checkpoint\.folder=.*cannot be written.*would work",))
        bench.command(refused)
        remount(bench, "rw,size=64m")
        bench.command(Expected(4))


def read_only_in_the_middle(bench: Bench) -> None:
    """The file system goes away under the run, and comes back for the next command."""
    bench.keep(2, 4)
    with small_disk(bench):
        reads = (r"WARNING " + not_written(6, READ_ONLY), not_written(8, READ_ONLY))
        # Over itself: where files are open for writing, as the lock is, nothing is made read-only.
        place = str(bench.checkpoints)
        mounts = [["mount", "--bind", place, place], ["mount", "-o", "remount,bind,ro", place]]
        locks = before_step(5, f"import subprocess; [subprocess.run(m, check=True) for m in {mounts}]")
        bench.command(Expected(4, EXIT_MACHINE, reads), patch=locks)
        subprocess.run(["umount", place], check=True)
        remount(bench, "rw,size=64m")
        bench.require(bench.whole() == [2, 4], f"whole: {bench.whole()}")
        bench.command(Expected(4))


def folder_that_cannot_be(bench: Bench) -> None:
    """A place where nobody can write, whoever they are."""
    reads = (r"^error: checkpoint\.folder=/proc/.*cannot be written.*would work",)
    bench.command(Expected(None, EXIT_USER, reads), "checkpoint.folder=/proc/harness-checkpoints")


DISK = [
    *full_disk("sync"),
    *full_disk("async"),
    full_disk("sync", ranks=4)[1],
    full_disk("async", ranks=4)[2],
    Fault("checkpoint folder read-only at the start; writable, again", read_only_from_the_start),
    Fault("checkpoint folder read-only from step 5 on; writable, again", read_only_in_the_middle),
]

# Faults of removing.

DIES_IN_PURGE = f"""
import os, signal
from fsspec.implementations.local import LocalFileSystem
original = LocalFileSystem.rm
def rm(self, path, recursive=False, maxdepth=None):
    if str(path).endswith("step-2") and not os.path.exists(f"{{path}}/{MANIFEST}"):
        os.remove(f"{{path}}/__0_0.distcp")
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, path, recursive=recursive, maxdepth=maxdepth)
LocalFileSystem.rm = rm
"""


def killed_in_purge(bench: Bench) -> None:
    """Half of the oldest checkpoint is gone; that is no reason to lose anything."""
    bench.keep(2, 4)
    killed = -signal.SIGKILL if bench.ranks == 1 else EXIT_MACHINE
    reads = () if bench.ranks == 1 else (r"rank 0 ended with signal 9",)
    expected = Expected(4, killed, (*reads,))
    bench.command(expected, "checkpoint.keep_latest_k=2", patch=DIES_IN_PURGE)
    bench.require(bench.whole() == [4, 6] and 2 in bench.steps(), f"{bench.steps()}, whole {bench.whole()}")
    shutil.rmtree(bench.folder / "patch")
    bench.command(Expected(6), "checkpoint.keep_latest_k=2")
    bench.require(bench.steps() == bench.whole() == [6, 8], f"left: {bench.steps()}")


def read_while_purged(bench: Bench) -> None:
    """Somebody loads the oldest one while its turn to go comes; it goes when they are done."""
    bench.keep(2, 4)
    before = contents(bench, 2)
    with reading(str(bench.step(2))):
        bench.command(Expected(4), "checkpoint.keep_latest_k=2")
        bench.require(bench.whole() == [2, 6, 8], f"whole while it is read: {bench.whole()}")
        bench.require(contents(bench, 2) == before, "it was changed while it was read")
    shutil.rmtree(bench.step(8))
    bench.command(Expected(6), "checkpoint.keep_latest_k=2")
    bench.require(bench.steps() == [6, 8], f"left when nobody reads it: {bench.steps()}")


PURGE = [
    Fault("killed while the oldest is being removed; again", killed_in_purge),
    Fault("killed while the oldest is being removed, 4 ranks; again", killed_in_purge, ranks=4),
    Fault(
        "oldest is being read when its turn to be removed comes; again",
        read_while_purged,
        needs_processes=False,
    ),
]
NOWHERE = [Fault("`checkpoint.folder=/proc/...`", folder_that_cannot_be, needs_processes=False)]


@dataclass
class Row:
    """What became of one fault."""

    name: str
    bench: Bench
    seconds: float

    def cells(self) -> str:
        """Its line of the table."""
        read = "<br>".join(f"`{line.replace('|', chr(92) + '|')}`" for line in self.bench.lines) or "-"
        bench = self.bench
        cells = (self.name, read, ", ".join(bench.resumed), ", ".join(bench.codes), bench.equal)
        return "| " + " | ".join(cells) + " |"


class Faults:
    """Prepares the finished runs and lets faults happen to copies of them.

    Args:
        folder: where all that lies.
        run: what runs the command.
    """

    def __init__(self, folder: Path, run: Runner = run_processes) -> None:
        self.folder, self.run = folder, run
        self._finished: dict[int, list[tuple[Any, ...]]] = {}

    def happen(self, fault: Fault) -> Row:
        """Lets one fault happen.

        Raises:
            RuntimeError: the undisturbed run fails.
        """
        bench = self._copy(fault)
        started = time.monotonic()
        try:
            fault.happen(bench)
        except Exception as error:
            bench.problems.append(f"{type(error).__name__}: {error}")
        if not bench.problems:
            shutil.rmtree(bench.folder)
        return Row(fault.name, bench, time.monotonic() - started)

    def prepare(self, ranks: int) -> None:
        """Runs the undisturbed run on some ranks, once.

        Raises:
            RuntimeError: it fails.
        """
        if ranks not in self._finished:
            finished = self.folder / f"finished-{ranks}"
            ended = self.run(finished, [*COMMAND, *RANKS[ranks]])
            if ended.code != EXIT_OK:
                raise RuntimeError(f"the undisturbed run on {ranks} ranks failed: {ended.said}")
            self._finished[ranks] = compared(Files(finished).rows())

    def _copy(self, fault: Fault) -> Bench:
        self.prepare(fault.ranks)
        finished = self.folder / f"finished-{fault.ranks}"
        folder = self.folder / re.sub(r"\W+", "-", fault.name).strip("-")
        shutil.copytree(finished, folder)
        return Bench(folder.resolve(), fault.ranks, self.run, self._finished[fault.ranks])


def document(rows: list[Row], left_out: list[str]) -> str:
    """The table with what has to be known to read it."""
    failed = [row for row in rows if row.bench.problems]
    notes = [f"* {row.name}: {row.bench.problems[0]}\n" for row in failed]
    missing = f"\nLeft out, because nothing can be mounted here: {'; '.join(left_out)}.\n" if left_out else ""
    lines = "\n".join(row.cells() for row in rows)
    return f"""# Injected faults

`python experiments/checkpoint/faults.py`. A run of {STEPS} steps with a checkpoint every {INTERVAL}, all
kept, is finished; the fault is done to a copy (to `step-{STEPS}`, the newest, where nothing else is said;
faults of the disk and of removing: to one that has come to step 4), and the same command is run again.
"; again" means that it is run once more afterwards: then both resumed steps and both exit codes are given.
Exit codes: 0 done, 2 a mistake to be settled by a person, 3 the machine, -9 killed. "Losses equal": every row
of `metrics.jsonl`, bit by bit. Disks are small tmpfs.

| fault | what the user reads | resumed from step | exit code | losses equal |
|---|---|---|---|---|
{lines}
{missing}""" + "".join(["\n## What is not as it has to be\n\n", *notes] if notes else [])


def happen(chosen: list[Fault], faults: Faults, at_once: int) -> list[Row]:
    """Lets faults happen, some side by side, and says how each went."""

    def one(fault: Fault) -> Row:
        row = faults.happen(fault)
        verdict = "; ".join(row.bench.problems) or "as it has to be"
        print(f"{row.seconds:5.1f} s  {fault.name}: {verdict}", flush=True)
        return row

    for ranks in sorted({fault.ranks for fault in chosen}):
        faults.prepare(ranks)
    with ThreadPoolExecutor(at_once) as workers:
        return list(workers.map(one, chosen))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a regular expression: faults by name")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "faults", help="where runs lie meanwhile"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("FAULTS.md"))
    parser.add_argument("--at-once", type=int, default=2, help="faults side by side")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    mounts = can_mount()
    known = [*DAMAGES, *(DISK if mounts else []), *NOWHERE, *PURGE]
    rows = happen(
        [fault for fault in known if re.search(arguments.only, fault.name)],
        Faults(arguments.folder),
        arguments.at_once,
    )
    arguments.output.write_text(document(rows, [] if mounts else [fault.name for fault in DISK]))
    sys.exit(any(row.bench.problems for row in rows))


if __name__ == "__main__":
    main()
