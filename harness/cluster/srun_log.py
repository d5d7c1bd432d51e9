"""Parse srun's messages about ranks that have ended. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

from harness.cluster.outcome import RankDied
from harness.failures import VICTIMS, kind_of_text

# srun: error: node2: tasks 2-3: Killed; also Exited with exit code 1, Segmentation fault, Out Of Memory.
_TASKS = re.compile(r"srun: error: \S+: tasks? ([\d,-]+): (.+)")


# srun's messages when it ends the remaining ranks, because one has failed or the job is cancelled.
_ENDING = re.compile(r"Terminating StepId|CANCELLED AT|Job step aborted|Force Terminated")


def dead_ranks(output: str, logs: Path) -> list[tuple[int, RankDied]]:
    """Return the ranks that failed by themselves, in the order in which they ended.

    Args:
        output: srun's output.
        logs: folder of the ranks' logs.
    """
    memory = "out_of_memory" if kind_of_text(output) == "out_of_memory" else None
    ending = _ENDING.search(output)
    found: list[tuple[int, RankDied]] = []
    for match in _TASKS.finditer(output):
        tasks, how = match.groups()
        is_ended = ending is not None and match.start() > ending.start()
        hint = ": killed from outside, or out of memory" if how == "Killed" and not memory else ""
        for part in tasks.split(","):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                died = RankDied(rank, f"'{how}'", logs, hint=hint, kind=memory)
                # SLURM may announce the end of a step before it names the rank that ran out of memory; the
                # rank's own log has the reason.
                has_reason = died.kind not in ("unknown", *VICTIMS)
                if not is_ended or has_reason or not how.startswith(("Killed", "Terminated", "Exited")):
                    found.append((rank, died))
    return found
