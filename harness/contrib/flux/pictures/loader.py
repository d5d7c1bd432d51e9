"""Loaders of pictures with captions: encoded beforehand, or when they are read.

Row j of global step s is sample s * global_batch_size + j, as for tokens (``harness.data.loader``). Whether
the caption of a sample is dropped is a function of the seed and that number.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from harness.config.training import Sizes
from harness.contrib.flux.objective import ImageBatch
from harness.contrib.flux.pictures.encoders import Encoders, as_floats
from harness.contrib.flux.pictures.sources import RawSamples
from harness.data.loader import Cursor, Loader
from harness.data.samples import random_stream
from harness.data.workers import cpus

MOST_THREADS = 8


class CaptionDropout(NamedTuple):
    """Chooses the samples that are trained with the empty caption."""

    fraction: float
    seed: int

    def drops(self, number: int) -> bool:
        """Whether a sample's caption is dropped: a function of the seed and its number."""
        return bool(self.fraction) and random_stream("caption", self.seed, number).uniform() < self.fraction


class Caption(NamedTuple):
    """The embeddings of a caption, float32."""

    text_LD: np.ndarray
    pooled_P: np.ndarray


class Picture(NamedTuple):
    """An encoded picture: mean and standard deviation of its latents, float32, as in ``ImageBatch``."""

    mean_CHW: np.ndarray
    std_CHW: np.ndarray | None


class EncodedSamples(Protocol):
    """An endless sequence of pictures with captions, in the order in which they are trained."""

    num_per_epoch: int | None
    """Samples per epoch; None if there are no epochs."""

    @property
    def empty(self) -> Caption:
        """The embeddings of the empty caption."""

    def sample(self, number: int) -> tuple[Picture, Caption]:
        """Return a sample by its number."""

    def caption(self, number: int) -> str:
        """Return the caption of a sample as text."""


class PictureLoader(Loader):
    """A loader of pictures with captions."""

    @abstractmethod
    def caption(self, number: int) -> str:
        """Return the caption of a sample, without dropout."""


class EncodedLoader(PictureLoader):
    """Loader of pictures that are encoded, with random access."""

    def __init__(self, samples: EncodedSamples, rows: range, sizes: Sizes, dropout: CaptionDropout) -> None:
        self._samples, self._cursor, self._dropout = samples, Cursor(rows, sizes), dropout
        self.samples_per_epoch = samples.num_per_epoch

    def next(self) -> ImageBatch:
        numbers = [piece.number for piece in self._cursor.advance()]
        pictures, captions = zip(*map(self._sample, numbers), strict=True)
        means, stds = zip(*pictures, strict=True)
        texts, pooled = zip(*captions, strict=True)
        std_BCHW = None if stds[0] is None else _stack(stds)
        return ImageBatch(_stack(means), std_BCHW, _stack(texts), _stack(pooled), torch.tensor(numbers))

    def caption(self, number: int) -> str:
        return self._samples.caption(number)

    def _sample(self, number: int) -> tuple[Picture, Caption]:
        picture, caption = self._samples.sample(number)
        return picture, self._samples.empty if self._dropout.drops(number) else caption

    def state_dict(self) -> dict[str, Any]:
        return self._cursor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cursor.load_state_dict(state)

    def reset(self) -> None:
        self._cursor.reset()


def _stack(arrays: Any) -> torch.Tensor:
    return torch.from_numpy(np.stack(arrays))


class _Read(NamedTuple):
    """The pictures and captions of a step that threads are reading."""

    numbers: list[int]
    pictures: list[Future[tuple[np.ndarray, str]]]
    state: dict[str, Any]
    """Position after this step."""


class EncodingLoader(PictureLoader):
    """Reads the pictures of the next step in threads, and encodes those of this step.

    Args:
        encoders: they encode in ``next``, on all ranks together if FSDP shards them.
    """

    def __init__(
        self,
        samples: RawSamples,
        encoders: Encoders,
        rows: range,
        sizes: Sizes,
        dropout: CaptionDropout,
        *,
        runs_in_loop: bool,
    ) -> None:
        self._samples, self._encoders, self._dropout = samples, encoders, dropout
        self._cursor, self._state = Cursor(rows, sizes), {"step": 0, "samples": 0}
        self._threads = ThreadPoolExecutor(min(MOST_THREADS, cpus()), thread_name_prefix="pictures")
        self._ahead: _Read | None = None
        self.samples_per_epoch = samples.num_per_epoch
        self.runs_in_loop = runs_in_loop

    def next(self) -> ImageBatch:
        found = self._ahead or self._start()
        self._ahead = self._start()
        pictures, captions = zip(*(each.result() for each in found.pictures), strict=True)
        self._state = found.state
        return self._encoded(found.numbers, pictures, captions)

    def caption(self, number: int) -> str:
        return self._samples.sample(number)[1]

    def _start(self) -> _Read:
        numbers = [piece.number for piece in self._cursor.advance()]
        pictures = [self._threads.submit(self._samples.sample, number) for number in numbers]
        return _Read(numbers, pictures, self._cursor.state_dict())

    def _encoded(
        self, numbers: list[int], pictures: Sequence[np.ndarray], captions: Sequence[str]
    ) -> ImageBatch:
        moments = self._encoders.autoencoder.encode(as_floats(pictures))
        texts = [
            "" if self._dropout.drops(number) else caption
            for number, caption in zip(numbers, captions, strict=True)
        ]
        return ImageBatch(*moments, *self._encoders.text.encode(texts), torch.tensor(numbers))

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drop()
        self._cursor.load_state_dict(state)
        self._state = self._cursor.state_dict()

    def reset(self) -> None:
        self._drop()
        self._cursor.reset()
        self._state = self._cursor.state_dict()

    def close(self) -> None:
        self._drop()

    def _drop(self) -> None:
        for each in self._ahead.pictures if self._ahead else ():
            each.cancel()
        self._ahead = None
