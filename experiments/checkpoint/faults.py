"""Damage checkpoints, fill and lock disks, kill removals, and check messages, exit codes and losses.

    python experiments/checkpoint/faults.py

A small run is finished once on one rank and once on four. For every fault its folder is copied, its
``result.json`` removed so that it does not count as finished, the fault injected, and the same command run
again. Each fault states the expected step to resume from, the exit code, and words of the output; the run
must end with the losses of the undisturbed one. Writes a Markdown table; the exit code is 1 if any result
differs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from attempts import MODES, ROOT
from bench import INTERVAL, STEPS, Bench, Expected, Fault, Faults, Row
from damages import DAMAGES, NOWHERE

from harness.checkpoint.catalog import MANIFEST, reading
from harness.util.errors import EXIT_MACHINE, EXIT_USER

ROOM = 1 << 20

# Faults of the disk.


def can_mount() -> bool:
    """Whether small file systems can be mounted here."""
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
    """Put the checkpoints on a file system with too little room for one more."""
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


def remounting(bench: Bench, options: str) -> list[str]:
    """Return the command that changes that file system."""
    return ["mount", "-o", f"remount,{options}", str(bench.checkpoints)]


def remount(bench: Bench, options: str) -> None:
    """Change that file system."""
    subprocess.run(remounting(bench, options), check=True)


def before_step(step: int, *commands: list[str], wait: float = 0) -> str:
    """Return source code that runs commands on rank 0 before a step of a run that resumes from step 4."""
    return f"""
import os
if os.environ.get("RANK", "0") == "0":
    import importlib.abc, importlib.util, subprocess, sys, time
    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "harness.train.engine":
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
                        time.sleep({wait})
                        for command in {list(commands)}:
                            subprocess.run(command, check=True)
                    return original(self, *args, **kwargs)
                module.Engine.gradients = gradients
            spec.loader.exec_module = exec_module
            return spec
    sys.meta_path.insert(0, Finder())
"""


def not_written(step: int, why: str) -> str:
    """Return a pattern of the message about a failed save."""
    return rf"the checkpoint of step {step} could not be written.*{why}"


FULL = r"No space left on device"
READ_ONLY = r"Read-only file system"


def full_then_room(bench: Bench, mode: str, allowed: int) -> None:
    """Fail at the first save that is not allowed to fail; make room, and run the command again."""
    options = (MODES[mode], f"checkpoint.max_failed_saves={allowed}")
    bench.keep(2, 4)
    with small_disk(bench):
        before = bench.contents(2, 4)
        reads = (
            (r"WARNING " + not_written(6, FULL), not_written(8, FULL)) if allowed else (not_written(6, FULL),)
        )
        bench.command(Expected(4, EXIT_MACHINE, reads), *options)
        bench.require(bench.contents(2, 4) == before, "earlier checkpoints were changed")
        bench.require(allowed > 0 or bench.steps() == [2, 4], f"left: {bench.steps()}")
        remount(bench, "size=64m")
        bench.command(Expected(4), *options)


def full_for_a_step(bench: Bench, mode: str) -> None:
    """Make room while the run continues."""
    bench.keep(2, 4)
    with small_disk(bench):
        # In the background, step 6 is saved during step 7; that save fails within the two seconds.
        makes_room = before_step(7, remounting(bench, "size=64m"), wait=2)
        warned = Expected(4, reads=(r"WARNING " + not_written(6, FULL),))
        bench.command(warned, MODES[mode], "checkpoint.max_failed_saves=1", patch=makes_room)
        bench.require(bench.complete() == [2, 4, 8], f"complete: {bench.complete()}")


def full_disk(mode: str, ranks: int = 1) -> list[Fault]:
    """Return the faults of a full disk."""
    on = f"{mode}, {ranks} ranks" if ranks > 1 else mode
    return [
        *(
            Fault(
                f"disk full, {on}, `max_failed_saves={allowed}`; room made, again",
                partial(full_then_room, mode=mode, allowed=allowed),
                ranks,
            )
            for allowed in (0, 1)
        ),
        Fault(
            f"disk full at step 6, room at step 7, {on}, `max_failed_saves=1`",
            partial(full_for_a_step, mode=mode),
            ranks,
        ),
    ]


def read_only_from_the_start(bench: Bench) -> None:
    """Refuse the folder at the start; otherwise the first save would fail hours later."""
    bench.keep(2, 4)
    with small_disk(bench):
        remount(bench, "ro")
        refused = Expected(None, EXIT_USER, (r"^error: checkpoint\.folder=.*cannot be written.*would work",))
        bench.command(refused)
        remount(bench, "rw,size=64m")
        bench.command(Expected(4))


def read_only_in_the_middle(bench: Bench) -> None:
    """Make the file system read-only during the run, and writable for the next command."""
    bench.keep(2, 4)
    with small_disk(bench):
        reads = (r"WARNING " + not_written(6, READ_ONLY), not_written(8, READ_ONLY))
        # A file system with open files, such as the lock, cannot be made read-only. A bind mount can.
        place = str(bench.checkpoints)
        mounts = [["mount", "--bind", place, place], ["mount", "-o", "remount,bind,ro", place]]
        bench.command(Expected(4, EXIT_MACHINE, reads), patch=before_step(5, *mounts))
        subprocess.run(["umount", place], check=True)
        remount(bench, "rw,size=64m")
        bench.require(bench.complete() == [2, 4], f"complete: {bench.complete()}")
        bench.command(Expected(4))


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
    """Kill the run when half of the oldest checkpoint is removed."""
    bench.keep(2, 4)
    killed = -signal.SIGKILL if bench.ranks == 1 else EXIT_MACHINE
    reads = () if bench.ranks == 1 else (r"rank 0 ended with signal 9",)
    bench.command(Expected(4, killed, reads), "checkpoint.keep_latest_k=2", patch=DIES_IN_PURGE)
    left = f"{bench.steps()}, complete {bench.complete()}"
    bench.require(bench.complete() == [4, 6] and 2 in bench.steps(), left)
    shutil.rmtree(bench.folder / "patch")
    bench.command(Expected(6), "checkpoint.keep_latest_k=2")
    bench.require(bench.steps() == bench.complete() == [6, 8], f"left: {bench.steps()}")


def read_while_purged(bench: Bench) -> None:
    """Read the oldest checkpoint while it is due to be removed; the next command removes it."""
    bench.keep(2, 4)
    before = bench.contents(2)
    with reading(str(bench.step(2))):
        bench.command(Expected(4), "checkpoint.keep_latest_k=2")
        bench.require(bench.complete() == [2, 6, 8], f"complete while it is read: {bench.complete()}")
        bench.require(bench.contents(2) == before, "it was changed while it was read")
    shutil.rmtree(bench.step(8))
    bench.command(Expected(6), "checkpoint.keep_latest_k=2")
    bench.require(bench.steps() == [6, 8], f"left when it is no longer read: {bench.steps()}")


PURGE = [
    Fault("killed while the oldest is being removed; again", killed_in_purge),
    Fault("killed while the oldest is being removed, 4 ranks; again", killed_in_purge, ranks=4),
    Fault(
        "oldest is being read when its turn to be removed comes; again",
        read_while_purged,
        needs_processes=False,
    ),
]


def document(rows: list[Row], left_out: list[str]) -> str:
    """Return the table and its explanation."""
    failed = [row for row in rows if row.bench.problems]
    notes = [f"* {row.name}: {row.bench.problems[0]}\n" for row in failed]
    missing = f"\nLeft out, because nothing can be mounted here: {'; '.join(left_out)}.\n" if left_out else ""
    lines = "\n".join(row.cells() for row in rows)
    return f"""# Injected faults

`python experiments/checkpoint/faults.py`. A run of {STEPS} steps with a checkpoint every {INTERVAL}, all
kept, is finished. Each fault is injected into a copy of it, and the same command is run again. Faults of
files are in `step-{STEPS}`, the newest checkpoint, unless the name of the fault names another; for faults of
the disk and of removing, the copy ends at step 4. "; again" means that the command is run once more
afterwards, and both results are shown. Exit codes: 0 completed, 2 a mistake for the user to correct, 3 the
machine, -9 killed. "Losses equal": every row of `metrics.jsonl` is bitwise equal. Disks are small tmpfs.

| fault | what the user reads | resumed from step | exit code | losses equal |
|---|---|---|---|---|
{lines}
{missing}""" + "".join(["\n## Unexpected results\n\n", *notes] if notes else [])


def happen(chosen: list[Fault], faults: Faults, at_once: int) -> list[Row]:
    """Inject faults, some at the same time, and print each result."""

    def one(fault: Fault) -> Row:
        row = faults.happen(fault)
        verdict = "; ".join(row.bench.problems) or "as expected"
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
    parser.add_argument("--only", default="", help="a regular expression: names of faults")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "faults", help="folder of the runs")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("FAULTS.md"))
    parser.add_argument("--at-once", type=int, default=2, help="faults at the same time")
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
