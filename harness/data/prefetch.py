"""Batches made ready behind the loop's back: read, tokenized, counted and on their way to the device.

The thread's lead is its own affair: what the loader says of its state is where the batch last handed out
has left it, so a run that is resumed reads just the batches that this one would have trained on.
"""

from __future__ import annotations

import queue
import threading
from contextlib import nullcontext
from typing import Any

import torch

from harness.data.loader import IGNORE_INDEX, Batch, Loader

# How long the end of a run waits for a read that does not come back.
LEAVING_SECONDS = 5.0
_LOOK_SECONDS = 0.05


class PlacedBatch(Batch):
    """A batch whose valid labels were counted before it left the host's memory."""

    num_valid: int


def count_valid(batch: Batch) -> int:
    """Number of labels that the loss counts."""
    if isinstance(batch, PlacedBatch):
        return batch.num_valid
    return int((batch.labels_BT != IGNORE_INDEX).sum())


def place(batch: Batch, device: torch.device) -> PlacedBatch:
    """Counts a batch's labels and copies it to the device, through pinned memory and without waiting."""
    if isinstance(batch, PlacedBatch):
        return batch
    on_device = batch
    if device.type != "cpu":
        on_device = batch.each(lambda tensor: tensor.pin_memory().to(device, non_blocking=True))
    placed = PlacedBatch(*on_device)
    placed.num_valid = count_valid(batch)
    return placed


class Prefetcher(Loader):
    """A loader that is ahead of the loop by some batches, in a thread that starts with the first one.

    Args:
        loader: where batches come from; nobody else may use it.
        depth: batches to be ahead.
        device: where they go.
    """

    def __init__(self, loader: Loader, depth: int, device: torch.device) -> None:
        self._loader, self._depth, self._device = loader, depth, device
        self.samples_per_epoch, self.damaged_documents = loader.samples_per_epoch, loader.damaged_documents
        self._state = loader.state_dict()
        self._lead: _Lead | None = None

    def next(self) -> Batch:
        """The batch of the next step; waits for it if the thread is behind.

        Raises:
            Exception: what the thread has met, with its traceback there.
        """
        if self._lead is None:
            self._lead = _Lead(self._loader, self._depth, self._device)
        batch, self._state = self._lead.take()
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._end_lead()
        self._loader.load_state_dict(state)
        self._state = self._loader.state_dict()

    def reset(self) -> None:
        self._end_lead()
        self._loader.reset()
        self._state = self._loader.state_dict()

    def close(self) -> None:
        """Ends the thread; one that waits for a read that does not come back is left behind."""
        self._end_lead(LEAVING_SECONDS)

    def _end_lead(self, patience: float | None = None) -> None:
        lead, self._lead = self._lead, None
        if lead is not None and lead.end(patience):
            # What was read ahead and not handed out is to be read again.
            self._loader.load_state_dict(self._state)


class _Lead:
    """One life of the thread, and the queue between it and the loop."""

    def __init__(self, loader: Loader, depth: int, device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._queue: queue.Queue[Any] = queue.Queue(depth)
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        # A daemon: a read that never comes back must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def take(self) -> tuple[Batch, dict[str, Any]]:
        """The next batch and the loader's state after it."""
        if self._failure is not None:
            raise self._failure
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._failure = item
            raise item
        batch, state, copied = item
        if copied is not None:
            # On the device, and not here: what is queued from now on waits for the copy.
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            for tensor in batch:
                # Its memory belongs to the thread's stream, which must not use it anew before this one has.
                if tensor is not None:
                    tensor.record_stream(stream)
        return batch, state

    def end(self, patience: float | None) -> bool:
        """Ends the thread; whether it has come to its end within so many seconds."""
        self._ended.set()
        self._thread.join(patience)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            stream = None
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a matter of the thread
                stream = torch.cuda.Stream(self._device)
            while not self._ended.is_set():
                batch, copied = self._loader.next(), None
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    placed = place(batch, self._device)
                    if stream is not None:
                        copied = stream.record_event()
                self._put((placed, self._loader.state_dict(), copied))
        except BaseException as error:  # of whatever kind: it is the loop that has to hear of it
            self._put(error)

    def _put(self, item: Any) -> None:
        """Waits for room, or for the end."""
        while not self._ended.is_set():
            try:
                return self._queue.put(item, timeout=_LOOK_SECONDS)
            except queue.Full:
                continue
