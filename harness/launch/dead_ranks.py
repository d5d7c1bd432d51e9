"""Ranks that ended without recording an error, found by their exit codes or by srun's messages."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.config.failures import VICTIMS, kind_of_text
from harness.run.folder import RunFolder, last_lines
from harness.util.errors import EXIT_OK, EXIT_RESUMABLE, MachineError

# srun: error: node2: tasks 2-3: Killed; also Exited with exit code 1, Segmentation fault, Out Of Memory.
_TASKS = re.compile(r"srun: error: \S+: tasks? ([\d,-]+): (.+)")
# srun's messages when it ends the remaining ranks, because one has failed or the job is cancelled.
_ENDING = re.compile(r"Terminating StepId|CANCELLED AT|Job step aborted|Force Terminated")


class RankDied(MachineError):
    """A rank ended without recording an error: killed from outside, by the kernel, or by a library.

    Without ``kind``, the kind is inferred from the end of its log, or else ``unknown``.
    """

    def __init__(self, rank: int, how: str, logs: Path, *, hint: str = "", kind: str | None = None) -> None:
        tail = last_lines(logs / f"rank{rank}.err")
        self.kind = kind or kind_of_text(tail) or "unknown"
        # As shells and containers report SIGKILL.
        hint = ": killed, probably out of memory" if how.strip("'").endswith("exit code 137") else hint
        super().__init__(f"rank {rank} ended with {how}{hint}{tail}")

    @property
    def has_reason(self) -> bool:
        """Whether the cause of death is known."""
        return self.kind not in ("unknown", *VICTIMS)

    @classmethod
    def by_code(cls, rank: int, exit_code: int, memory_kills: int, logs: Path) -> RankDied:
        """Describe a rank of this machine; a negative exit code is a signal."""
        if exit_code >= 0:
            return cls(rank, f"exit code {exit_code}", logs)
        how, hint, kind = f"signal {-exit_code} ({signal.Signals(-exit_code).name})", "", None
        if exit_code == -signal.SIGKILL:
            hint = ": killed from outside, or by the kernel's OOM killer"
            if memory_kills:
                kind = "out_of_memory"
                hint = f": the kernel's OOM killer killed {memory_kills} process(es) meanwhile"
        elif exit_code == -signal.SIGTERM:
            hint = ": ended from outside"
        return cls(rank, how, logs, hint=hint, kind=kind)


def dead_ranks(output: str, logs: Path, *, late: bool = False) -> list[tuple[int, RankDied]]:
    """Return the ranks that failed by themselves, in the order in which they ended.

    ``late``: also those that srun named after it began to end the ranks, unless its signal ended them.
    """
    memory = "out_of_memory" if kind_of_text(output) == "out_of_memory" else None
    by_srun = ("Terminated",) if late else ("Killed", "Terminated", "Exited")
    found: list[tuple[int, RankDied]] = []
    for rank, how, is_ended in _named(output):
        hint = ": killed from outside, or out of memory" if how == "Killed" and not memory else ""
        died = RankDied(rank, f"'{how}'", logs, hint=hint, kind=memory)
        # SLURM may announce the end of a step before it names the rank that ran out of memory; the rank's own
        # log has the reason.
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
    silent = [(rank, died) for rank, died in dead if not folder.has_error_of(rank)]
    silent.sort(key=lambda each: not each[1].has_reason)
    for rank, died in silent:
        folder.record_error(rank, died)
    return [died for _, died in silent]


def only_victims(folder: RunFolder) -> bool:
    """Whether ranks have recorded that they lost a peer, and none has recorded a cause."""
    error = folder.first_error()
    return error is not None and error["kind"] in ("peer", "collective")


def record_left(folder: RunFolder, left: Iterable[int]) -> list[RankDied]:
    """Record ranks that left without an error before the run was at its end; return these errors."""
    if folder.row.get("exit_code") in (EXIT_OK, EXIT_RESUMABLE):
        return []
    if not only_victims(folder) and (folder.has_result or folder.first_error() is not None):
        return []
    logs, how = folder.path / "logs", "exit code 0 in the middle of the run"
    return record_dead(folder, [(rank, RankDied(rank, how, logs)) for rank in left])


def count_memory_kills() -> int:
    """Count the kernel's out-of-memory kills on this machine since it was started; 0 if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
