"""What is left of a collective that somebody did not come to: which one it was, and where every rank stood.

    flight_recorder/stacks-rank<r>.txt   the step, the last collective and the stacks of all threads
    flight_recorder/gloo_<r>             collectives of gloo, for ``torchfrtrace --prefix gloo_``
    flight_recorder/rank_<r>             collectives of NCCL, written by its own watchdog (``--prefix rank_``)

The rank that waits is told by its timeout. The one that does not come is told by nothing, so every rank looks
at its own clock.
"""

from __future__ import annotations

import faulthandler
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch._C._distributed_c10d as c10d

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
                with (self._folder / f"stacks-rank{self._rank}.txt").open("w") as file:
                    file.write(f"rank {self._rank}, step {self._step}: {why}\n{last_collective()}\n\n")
                    file.flush()
                    faulthandler.dump_traceback(file, all_threads=True)
                (self._folder / f"gloo_{self._rank}").write_bytes(_gloo_trace())
            except OSError as error:
                sys.stderr.write(f"WARNING {self._folder}: cannot be written: {error}\n")


def _gloo_trace() -> bytes:
    """torch's recorder, pickled as its own tools read it."""
    return c10d._dump_fr_trace()  # type: ignore[attr-defined]


def last_collective() -> str:
    """The collective that this rank was the last to begin, as gloo's recorder knows it."""
    entries: list[dict[str, Any]] = pickle.loads(_gloo_trace()).get("entries", [])
    if not entries:
        return "no collective of gloo is on record"
    last = entries[-1]
    group, number = last["process_group"], last["collective_seq_id"] or last["p2p_seq_id"]
    return (
        f"last collective begun: {last['profiling_name']}, number {number} of group {group[0]} ({group[1]}), "
        f"sizes {last['input_sizes']}, {', '.join(last['input_dtypes'])}"
    )
