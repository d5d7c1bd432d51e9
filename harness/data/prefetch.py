"""Prefetching: a thread reads, tokenizes and counts batches and starts their copy to the device.

``state_dict()`` ignores batches that were prefetched but not yet returned by ``next()``, so a
resumed run trains on every batch exactly once.
"""

import queue
import threading
from contextlib import nullcontext
from typing import Any

import torch

from harness.data.batch import Batch, place
from harness.data.loader import Loader

# How long the end of a run waits for a read that does not return.
CLOSE_TIMEOUT_SECONDS = 5.0
_POLL_SECONDS = 0.05


class Prefetcher(Loader):
    """A loader that prefetches batches in a thread; the first ``next()`` starts the thread.

    Args:
        loader: source of the batches; must not be used elsewhere.
    """

    def __init__(self, loader: Loader, depth: int, device: torch.device) -> None:
        self._loader = loader
        self._depth = depth
        self._device = device
        self.samples_per_epoch = loader.samples_per_epoch
        self.samples_per_epoch_of = loader.samples_per_epoch_of
        self._state = loader.state_dict()
        self._worker: _PrefetchThread | None = None

    def next(self) -> Batch:
        """Return the batch of the next step; waits for the thread if necessary.

        Raises:
            Exception: any exception of the thread, with its traceback.
        """
        if self._worker is None:
            self._worker = _PrefetchThread(self._loader, self._depth, self._device)
        batch, self._state = self._worker.take()
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stop_worker()
        self._loader.load_state_dict(state)
        self._state = self._loader.state_dict()

    def reset(self) -> None:
        self._stop_worker()
        self._loader.reset()
        self._state = self._loader.state_dict()

    def close(self) -> None:
        """Stop the thread; a thread blocked in a read is abandoned after a timeout."""
        self._stop_worker(CLOSE_TIMEOUT_SECONDS)
        self._loader.close()

    def _stop_worker(self, timeout: float | None = None) -> None:
        worker = self._worker
        self._worker = None
        if worker is not None and worker.stop(timeout):
            # Prefetched batches that were not returned must be read again.
            self._loader.load_state_dict(self._state)


class _PrefetchThread:
    """The thread, and the queue from it to the loop; replaced after a reset."""

    def __init__(self, loader: Loader, depth: int, device: torch.device) -> None:
        self._loader = loader
        self._device = device
        self._queue: queue.Queue[Any] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        # A daemon: a read that never returns must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def take(self) -> tuple[Batch, dict[str, Any]]:
        """Return the next batch and the loader's state after it."""
        if self._failure is not None:
            raise self._failure
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._failure = item
            raise item
        batch, state, copied = item
        if copied is not None:
            # The device waits for the copy, not the host: kernels launched from now on run after
            # it.
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            for tensor in batch:
                # Allocated on the thread's stream, which must not reuse the memory before this
                # stream is done with it. Numbers of samples stay in host memory.
                if tensor is not None and tensor.is_cuda:
                    tensor.record_stream(stream)
        return batch, state

    def stop(self, timeout: float | None) -> bool:
        """Stop the thread; return whether it ended within ``timeout`` seconds."""
        self._stopped.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            stream = None
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # the current device is per thread
                stream = torch.cuda.Stream(self._device)
            while not self._stopped.is_set():
                batch = self._loader.next()
                copied = None
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    on_device = place(batch, self._device)
                    if stream is not None:
                        copied = stream.record_event()
                self._put((on_device, self._loader.state_dict(), copied))
        except BaseException as error:  # passed to the loop, which raises it
            self._put(error)

    def _put(self, item: Any) -> None:
        while not self._stopped.is_set():
            try:
                return self._queue.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
