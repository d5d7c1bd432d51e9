"""Prefetching in a thread: same batches in the same order, and the thread ends."""

from __future__ import annotations

import threading
import time
import traceback
from typing import Any

import pytest
import torch

from harness.data.loader import IGNORE_INDEX, Batch, Loader
from harness.data.prefetch import DeviceBatch, Prefetcher, count_valid
from harness.util.errors import DataError

CPU = torch.device("cpu")


class Numbers(Loader):
    """Batch n holds n everywhere, with n masked labels of eight."""

    samples_per_epoch = None

    def __init__(self, seconds: float = 0.0, breaks_at: int | None = None) -> None:
        self.step, self.seconds, self.breaks_at = 0, seconds, breaks_at

    def next(self) -> Batch:
        time.sleep(self.seconds)
        if self.step == self.breaks_at:
            raise DataError(f"there is no batch {self.step}")
        labels = torch.full((2, 4), self.step)
        labels.view(-1)[: self.step] = IGNORE_INDEX
        self.step += 1
        return Batch(torch.full((2, 4), self.step - 1), labels)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def reset(self) -> None:
        self.step = 0


def numbers_of(loader: Loader, count: int) -> list[int]:
    return [int(loader.next().inputs_BT[0, 0]) for _ in range(count)]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.fixture(autouse=True)
def no_thread_left() -> Any:
    yield
    assert not threads()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_batches_are_in_order_and_the_state_ignores_prefetched_ones(depth: int) -> None:
    inner = Numbers()
    loader = Prefetcher(inner, depth, CPU)
    assert loader.state_dict() == {"step": 0}
    for number in range(6):
        assert numbers_of(loader, 1) == [number]
        assert loader.state_dict() == {"step": number + 1}
    time.sleep(0.1)
    assert inner.step > 6, "nothing was prefetched"
    assert inner.step <= 6 + depth + 1, "more than `depth` batches were prefetched"
    assert loader.state_dict() == {"step": 6}
    loader.close()
    assert numbers_of(loader, 2) == [6, 7], "prefetched batches are lost"
    loader.close()


def test_it_continues_from_a_state_and_from_the_beginning() -> None:
    loader = Prefetcher(Numbers(), 2, CPU)
    numbers_of(loader, 3)
    loader.load_state_dict({"step": 40})
    assert loader.state_dict() == {"step": 40}
    assert numbers_of(loader, 2) == [40, 41]
    loader.reset()
    assert numbers_of(loader, 2) == [0, 1]
    assert len(threads()) == 1
    loader.close()


def test_labels_are_counted_in_the_thread() -> None:
    loader = Prefetcher(Numbers(), 2, CPU)
    batches = [loader.next() for _ in range(4)]
    loader.close()
    assert all(isinstance(batch, DeviceBatch) for batch in batches)
    assert [count_valid(batch) for batch in batches] == [8, 7, 6, 5]
    assert [count_valid(Batch(*batch)) for batch in batches] == [8, 7, 6, 5]


def test_an_exception_of_the_thread_is_raised_in_the_loop_after_earlier_batches() -> None:
    loader = Prefetcher(Numbers(breaks_at=3), 2, CPU)
    assert numbers_of(loader, 3) == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(DataError, match="there is no batch 3") as raised:
            loader.next()
    frames = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert "_run" in frames and frames[-1] == "next", "the traceback is lost"
    loader.close()


def test_the_loop_does_not_wait_for_a_source_that_is_faster_than_a_step_nor_for_the_thread() -> None:
    """Without the thread, ten batches take 0.2 seconds."""
    loader = Prefetcher(Numbers(seconds=0.02), 2, CPU)
    loader.next()
    waited = 0.0
    for _ in range(10):
        time.sleep(0.04)  # the step
        started = time.monotonic()
        loader.next()
        waited += time.monotonic() - started
    started = time.monotonic()
    loader.close()
    assert waited < 0.1 and time.monotonic() - started < 1
