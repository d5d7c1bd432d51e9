"""What is left of a collective that somebody did not come to: which one it was, and where every rank stood.

    flight_recorder/stacks-rank<r>.txt   the step, the last collective and the stacks of all threads
    flight_recorder/place-rank<r>.json   what ``harness.cluster.absent`` finds the cause from
    flight_recorder/gloo_<r>             collectives of gloo, for ``torchfrtrace --prefix gloo_``; no sends
    flight_recorder/rank_<r>             collectives of NCCL, written by its own watchdog (``--prefix rank_``)

The rank that waits is told by its timeout. The one that does not come is told by nothing, so every rank looks
at its own clock.
"""

from __future__ import annotations

import faulthandler
import json
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from harness.loop.process import FLIGHT_RECORDER

# Before a collective of the step can have timed out, so that whoever waits in one is still seen there.
_SHARE = 0.9
_LOOK_SECONDS = 1.0


class StepWatch:
    """Writes down where this rank stands when a step takes longer than a collective may.

    Args:
        run_dir: the run folder.
        rank: this rank.
        enabled: whether there is anybody to wait for.
    """

    def __init__(self, run_dir: Path, rank: int, *, enabled: bool) -> None:
        self._folder, self._rank = run_dir / FLIGHT_RECORDER, rank
        self._deadline = float("inf")
        self._step = 0
        self._written: int | None = None
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        if enabled:
            self._thread = threading.Thread(target=self._run, name="step watch", daemon=True)
            self._thread.start()

    def begin(self, step: int, limit_seconds: float) -> None:
        """A step begins, in which a collective may take so long."""
        self._step, self._deadline = step, time.monotonic() + _SHARE * limit_seconds

    def end(self) -> None:
        """The step is done."""
        self._deadline = float("inf")

    def timed_out(self) -> None:
        """A collective has timed out; what is known of it is written, if that has not been done."""
        if self._thread is not None:
            self._write("a collective has timed out")

    def close(self) -> None:
        """Ends."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(min(_LOOK_SECONDS, max(0.0, self._deadline - time.monotonic()))):
            if time.monotonic() >= self._deadline:
                self._deadline = float("inf")
                self._write("a collective of this step is about to time out, here or elsewhere")

    def _write(self, why: str) -> None:
        with self._lock:
            if self._written == self._step:
                return
            self._written = self._step
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                place = {"rank": self._rank, "step": self._step, "time": time.time(), **_place()}
                (self._folder / f"place-rank{self._rank}.json").write_text(json.dumps(place) + "\n")
                with (self._folder / f"stacks-rank{self._rank}.txt").open("w") as file:
                    file.write(f"rank {self._rank}, step {self._step}: {why}\n{last_collective()}\n\n")
                    file.flush()
                    faulthandler.dump_traceback(file, all_threads=True)
                (self._folder / f"gloo_{self._rank}").write_bytes(pickle.dumps(readable_trace(self._rank)))
            except OSError as error:
                sys.stderr.write(f"WARNING {self._folder}: cannot be written: {error}\n")


def _gloo_trace() -> dict[str, Any]:
    """What torch's recorder holds of gloo."""
    return pickle.loads(c10d._dump_fr_trace())  # type: ignore[attr-defined,no-any-return]


def readable_trace(rank: int) -> dict[str, Any]:
    """The trace as torch's analysis (``torchfrtrace``) can read it.

    torch does not record the groups of gloo, and its analysis looks every entry's group up. Entries of sends
    and receives are left out: gloo does not record the other rank, and the analysis stops without it.
    """
    trace = _gloo_trace()
    entries = [entry for entry in trace.get("entries", []) if _is_collective(entry)]
    groups = {
        name: (group.group_desc, dist.get_process_group_ranks(group)) for group, name in _named_groups()
    }
    for name, description in (entry["process_group"] for entry in entries):
        groups.setdefault(name, (description, [rank]))  # a group that is gone
    return {
        **trace,
        "entries": entries,
        "pg_config": {
            name: {"name": name, "desc": description, "ranks": str(ranks)}
            for name, (description, ranks) in groups.items()
        },
    }


def _named_groups() -> list[tuple[Any, str]]:
    return list(dist.distributed_c10d._world.pg_names.items())


def _is_collective(entry: dict[str, Any]) -> bool:
    return not entry["profiling_name"].startswith(("gloo:send", "gloo:recv"))


def _entries() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = _gloo_trace().get("entries", [])
    return entries


def _place() -> dict[str, Any]:
    """The last collective that this rank began, and how many it has begun in each group.

    A message to one rank (of a pipeline, of a ring) is no collective: its sender does not wait.
    """
    begun: dict[str, int] = {}
    last = None
    for last in (entry for entry in _entries() if not entry["is_p2p"]):
        begun[last["process_group"][0]] = last["collective_seq_id"]
    group = None if last is None else last["process_group"][0]
    members = [
        rank
        for each in dist.distributed_c10d._world.pg_map
        if each.group_name == group
        for rank in dist.get_process_group_ranks(each)
    ]
    return {"group": group, "number": begun.get(group or "", 0), "members": members, "begun": begun}


def last_collective() -> str:
    """The collective that this rank was the last to begin, as gloo's recorder knows it."""
    entries = _entries()
    if not entries:
        return "no collective of gloo is on record"
    last = entries[-1]
    group, number = last["process_group"], last["collective_seq_id"] or last["p2p_seq_id"]
    return (
        f"last collective begun: {last['profiling_name']}, number {number} of group {group[0]} ({group[1]}), "
        f"sizes {last['input_sizes']}, {', '.join(last['input_dtypes'])}"
    )
