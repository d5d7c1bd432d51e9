"""Record where each rank is when a collective is about to time out.

    flight_recorder/stacks-rank<r>.txt   the step, the last collective and the stacks of all threads
    flight_recorder/place-rank<r>.json   input of ``absent_ranks``, which names the missing rank
    flight_recorder/rank_<r>             collectives of NCCL, for ``torchfrtrace``

A rank that waits in a collective gets a timeout. The rank that never reaches it gets none, so every
rank checks its own clock.
"""

import faulthandler
import json
import pickle
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from harness.config.failures import describe_failure
from harness.train.observer import Observer, Run
from harness.train.process import FLIGHT_RECORDER

# Fraction of the timeout after which ranks write, so that a rank that waits in a collective is
# still in it.
_SHARE = 0.9
_POLL_SECONDS = 1.0
# A rank that writes later than this after the timeout was stopped; others may have ended meanwhile.
_LATE_SECONDS = 0.5


class FlightRecorder(Observer):
    """Write this rank's last collective and stacks when a step takes nearly as long as the timeout."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._folder = run.folder / FLIGHT_RECORDER
        self._rank = run.ranks.rank
        self._last_second = self._too_late = float("inf")
        self._step = 0
        self._written: int | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="flight recorder", daemon=True)
        self._thread.start()

    def begin_step(self, step: int) -> Sequence[float]:
        now = time.monotonic()
        limit = self.run.limit_seconds(step)
        self._last_second = now + _SHARE * limit
        self._too_late = now + limit + _LATE_SECONDS
        self._step = step
        return ()

    def close(self, error: BaseException | None) -> None:
        if error is not None and describe_failure(error)["kind"] == "collective_timeout":
            self._write("a collective has timed out", timed_out=True)
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(
            min(_POLL_SECONDS, max(0.0, self._deadline - time.monotonic()))
        ):
            if time.monotonic() >= self._deadline:
                self._write(
                    "a collective of this step is about to time out, on this rank or another"
                )
                self._last_second = float("inf")

    @property
    def _deadline(self) -> float:
        return self._last_second if self._is_in_step else float("inf")

    @property
    def _is_in_step(self) -> bool:
        return self.run.progress.running == self._step

    def _write(self, why: str, *, timed_out: bool = False) -> None:
        with self._lock:
            if self._written == self._step:
                return
            self._written = self._step
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                trace = pickle.loads(c10d._dump_fr_trace())  # type: ignore[attr-defined]
                place = {
                    "rank": self._rank,
                    "step": self._step,
                    "time": time.time(),
                    **_place(trace),
                }
                # By this rank's clock, because clocks of nodes differ.
                place["late"] = self._is_in_step and time.monotonic() > self._too_late
                place["timed_out"] = timed_out
                (self._folder / f"place-rank{self._rank}.json").write_text(json.dumps(place) + "\n")
                with (self._folder / f"stacks-rank{self._rank}.txt").open("w") as file:
                    file.write(
                        f"rank {self._rank}, step {self._step}: {why}\n{last_collective(trace)}\n\n"
                    )
                    file.flush()
                    faulthandler.dump_traceback(file, all_threads=True)
            except OSError as error:
                sys.stderr.write(f"WARNING {self._folder}: cannot write: {error}\n")


def _place(trace: dict[str, Any]) -> dict[str, Any]:
    """Return the last collective that this rank began, and how many it began in each group.

    Point-to-point messages (pipeline, ring) do not count: their sender does not wait.
    """
    begun: dict[str, int] = {}
    last = None
    for last in (entry for entry in trace.get("entries", []) if not entry["is_p2p"]):
        begun[last["process_group"][0]] = last["collective_seq_id"]
    group = None if last is None else last["process_group"][0]
    members: list[int] = []
    for each, name in dist.distributed_c10d._world.pg_names.items():
        if name == group:
            members = dist.get_process_group_ranks(each)
    return {"group": group, "number": begun.get(group or "", 0), "members": members, "begun": begun}


def last_collective(trace: dict[str, Any]) -> str:
    """Describe the last collective that this rank began, from gloo's recorder."""
    entries = trace.get("entries")
    if not entries:
        return "no collective of gloo recorded"
    last = entries[-1]
    group = last["process_group"]
    number = last["collective_seq_id"] or last["p2p_seq_id"]
    return (
        f"last collective begun: {last['profiling_name']}, number {number} of group {group[0]} ({group[1]}), "
        f"sizes {last['input_sizes']}, {', '.join(last['input_dtypes'])}"
    )
