"""What ends a run from outside: ranks that died, and nodes that are unfit.

A rank that ended without recording an error is found by its exit code or by srun's messages.

Nodes are checked before the ranks start (``cluster.node_check``): srun starts this module once on
every node. Each process prints its node's faults: GPUs that are missing, in use by others or have
errors, memory that is not free, a run folder that cannot be written.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from harness.config.cluster import node_name
from harness.config.failures import VICTIMS, kind_of_text
from harness.config.job import Job
from harness.launch import queue
from harness.run.folder import RunFolder
from harness.util.errors import EXIT_OK, EXIT_RESUMABLE, MachineError

# srun: error: node2: tasks 2-3: Killed; also Exited with exit code 1, Segmentation fault, Out Of
# Memory.
_TASKS = re.compile(r"srun: error: \S+: tasks? ([\d,-]+): (.+)")
# srun's messages when it ends the remaining ranks, because one has failed or the job is cancelled.
_ENDING = re.compile(r"Terminating StepId|CANCELLED AT|Job step aborted|Force Terminated")

# Of this machine, and in srun's words.
_FROM_OUTSIDE = ("signal 9 ", "signal 15 ", "'Killed'", "'Terminated'")
LOG_LINES_SHOWN = 8


def last_lines(log: Path) -> str:
    """Return the end of a log, formatted to follow a message; empty if there is no log."""
    try:
        tail = log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    except OSError:
        return ""
    return "".join(f"\n  {line}" for line in ["last lines of its log:", *tail]) if tail else ""


class RankDied(MachineError):
    """A rank ended without recording an error: killed from outside, by the kernel, or by a library.

    Without ``kind``, the kind is inferred from the end of its log, or else ``unknown``.
    """

    def __init__(
        self, rank: int, how: str, logs: Path, *, hint: str = "", kind: str | None = None
    ) -> None:
        tail = last_lines(logs / f"rank{rank}.err")
        self.kind = kind or kind_of_text(tail) or "unknown"
        # As shells and containers report SIGKILL.
        hint = (
            ": killed, probably out of memory" if how.strip("'").endswith("exit code 137") else hint
        )
        self.how = how
        super().__init__(f"rank {rank} ended with {how}{hint}{tail}")

    @property
    def has_reason(self) -> bool:
        """Whether the cause of death is known."""
        return self.kind not in ("unknown", *VICTIMS)

    @property
    def is_from_outside(self) -> bool:
        """Whether another process ended the rank, and not for its memory."""
        return self.how.startswith(_FROM_OUTSIDE) and self.kind != "out_of_memory"

    @classmethod
    def by_code(cls, rank: int, exit_code: int, memory_kills: int, logs: Path) -> RankDied:
        """Describe a rank of this machine; a negative exit code is a signal."""
        if exit_code >= 0:
            return cls(rank, f"exit code {exit_code}", logs)
        how = f"signal {-exit_code} ({signal.Signals(-exit_code).name})"
        if exit_code == -signal.SIGKILL and memory_kills:
            hint = f": the kernel's OOM killer killed {memory_kills} process(es) meanwhile"
            return cls(rank, how, logs, hint=hint, kind="out_of_memory")
        hints = {
            -signal.SIGKILL: ": killed from outside, or by the kernel's OOM killer",
            -signal.SIGTERM: ": ended from outside",
        }
        return cls(rank, how, logs, hint=hints.get(exit_code, ""))


def dead_ranks(output: str, logs: Path, *, late: bool = False) -> list[tuple[int, RankDied]]:
    """Return the ranks that failed by themselves, in the order in which they ended.

    ``late``: also those that srun named after it began to end the ranks, unless its signal ended
    them.
    """
    memory = "out_of_memory" if kind_of_text(output) == "out_of_memory" else None
    by_srun = ("Terminated",) if late else ("Killed", "Terminated", "Exited")
    found: list[tuple[int, RankDied]] = []
    for rank, how, is_ended in _named(output):
        hint = ": killed from outside, or out of memory" if how == "Killed" and not memory else ""
        died = RankDied(rank, f"'{how}'", logs, hint=hint, kind=memory)
        # SLURM may announce the end of a step before it names the rank that ran out of memory; the
        # rank's own log has the reason.
        if not is_ended or died.has_reason or not how.startswith(by_srun):
            found.append((rank, died))
    return found


def unnamed_ranks(output: str, ranks: int) -> list[int]:
    """Return the ranks that srun does not name: they ended with exit code 0."""
    return sorted(set(range(ranks)) - {rank for rank, _, _ in _named(output)})


def _named(output: str) -> Iterator[tuple[int, str, bool]]:
    ending = _ENDING.search(output)
    for match in _TASKS.finditer(output):
        tasks, how = match.groups()
        is_ended = ending is not None and match.start() > ending.start()
        for part in tasks.split(","):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                yield rank, how, is_ended


def record_dead(folder: RunFolder, dead: Iterable[tuple[int, RankDied]]) -> list[RankDied]:
    """Record the ranks that have not recorded an error themselves; return these errors, the cause first.

    It is that of the rank that ended first, unless the log of another one gives a reason.
    """
    silent = [(rank, died) for rank, died in dead if not folder.errors.has(rank)]
    silent.sort(key=lambda each: not each[1].has_reason)
    for rank, died in silent:
        folder.errors.record(rank, died)
    return [died for _, died in silent]


def only_victims(folder: RunFolder) -> bool:
    """Whether ranks have recorded that they lost a peer, and none has recorded a cause."""
    error = folder.errors.first()
    return error is not None and error["kind"] in ("peer", "collective")


def record_left(folder: RunFolder, left: Iterable[int]) -> list[RankDied]:
    """Record ranks that left without an error before the run was at its end; return these errors."""
    if folder.row.get("exit_code") in (EXIT_OK, EXIT_RESUMABLE):
        return []
    if not only_victims(folder) and (folder.has_result or folder.errors.first() is not None):
        return []
    logs = folder.path / "logs"
    how = "exit code 0 in the middle of the run"
    return record_dead(folder, [(rank, RankDied(rank, how, logs)) for rank in left])


def count_memory_kills() -> int:
    """Count the kernel's out-of-memory kills on this machine since it was started; 0 if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


CHECK_SECONDS = 120
# Fractions of a node's free memory and of a GPU's used memory. A driver uses less than 1 % of a
# GPU's memory.
LEAST_FREE = 0.05
MOST_USED = 0.05
_QUERY = "index,memory.used,memory.total,ecc.errors.uncorrected.volatile.total"


class UnfitNodes(MachineError):
    """Nodes that failed the check."""

    kind = "node"

    def __init__(self, faults: dict[str, list[str]]) -> None:
        self.nodes = sorted(faults)
        super().__init__("; ".join(f"{node}: {', '.join(faults[node])}" for node in self.nodes))


class LostNodes(MachineError):
    """Nodes that failed while ranks ran on them, in words."""

    kind = "node"


def check_nodes(job: Job, run_dir: Path, nodes: Sequence[str]) -> None:
    """Check nodes of this allocation."""
    _, ranks = job.cluster.nodes_for(job.world_size)
    count = len(nodes)
    command = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--wait=0"]
    command += [f"--nodelist={','.join(nodes)}", "--mpi=none", "--export=ALL"]
    command += [sys.executable, "-m", "harness.launch.faults", str(run_dir)]
    command += ["--gpus", str(ranks if job.cluster.device == "cuda" else 0)]
    complaint = answers = ""

    def ask() -> str:
        nonlocal complaint, answers
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS)
        except subprocess.TimeoutExpired as error:
            answers = error.stdout.decode() if isinstance(error.stdout, bytes) else ""
            return ""
        complaint = done.stderr
        answers = done.stdout
        return "" if answers else complaint

    queue.until_answered(ask)
    found: dict[str, list[str]] = {}
    for line in answers.splitlines():
        if line.startswith("{"):
            found.update(json.loads(line))
    silent = [node for node in nodes if node not in found]
    fault = " ".join(complaint.split()) or f"gave no answer within {CHECK_SECONDS} s"
    faults = {node: own for node, own in found.items() if own} | {node: [fault] for node in silent}
    if faults:
        raise UnfitNodes(faults)


def faults_here(run_dir: Path, gpus: int) -> list[str]:
    """Return this node's faults; empty if it is fit."""
    faults = [*_folder_faults(run_dir), *_memory_faults(Path("/proc/meminfo"))]
    return [*faults, *gpu_faults(gpus)] if gpus else faults


def _folder_faults(run_dir: Path) -> list[str]:
    try:
        with tempfile.NamedTemporaryFile(dir=run_dir / "logs", prefix=".node_check-") as file:
            file.write(b"written\n")
            file.flush()
    except OSError as error:
        return [f"cannot write into {run_dir}: {error.strerror}"]
    return []


def _memory_faults(meminfo: Path) -> list[str]:
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free, total = (int(lines[name].split()[0]) / 2**20 for name in ("MemAvailable", "MemTotal"))
    if free < LEAST_FREE * total:
        return [f"{free:.1f} GiB of {total:.1f} GiB of memory are free"]
    return []


def gpu_faults(wanted: int) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")  # others may use the rest
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS / 2)
    except FileNotFoundError:
        return ["nvidia-smi not found"]
    except subprocess.TimeoutExpired:
        return [f"nvidia-smi gave no answer within {CHECK_SECONDS // 2} s"]
    if done.returncode != 0:
        return [f"nvidia-smi: {' '.join((done.stdout + done.stderr).split())}"]
    rows = [line.replace(" ", "").split(",") for line in done.stdout.splitlines() if line.strip()]
    faults = [] if len(rows) >= wanted else [f"{len(rows)} of {wanted} GPUs found"]
    for index, used, total, errors in rows:
        if used.isdigit() and total.isdigit() and int(used) > MOST_USED * int(total):
            faults.append(f"GPU {index} has {int(used) / 1024:.1f} GiB of memory in use")
        if errors.isdigit() and int(errors) > 0:  # without error correction there is no number
            faults.append(f"GPU {index} has {errors} uncorrected memory errors")
    return faults


def main() -> None:
    """Entry point of the process on each node."""
    run_dir, _, gpus = sys.argv[1:]
    sys.stdout.write(json.dumps({node_name(): faults_here(Path(run_dir), int(gpus))}) + "\n")


if __name__ == "__main__":
    main()
