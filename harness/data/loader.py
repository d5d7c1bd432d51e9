"""Loaders of the samples of every step, and resuming.

Row j of global step s is sample s * global_batch_size + j, a function of (data, tokenizer, seed)
and that number. A rank is assigned rows and reads only those, so neither the loss curve of a run
nor its state depends on the number of ranks. Scheduled sizes (``config/training.py``) change how
many samples, or which pieces of samples, a step reads; a rank has about the same fraction of each.

Batches are numbered in the order of the data, from 1. Step k reads batch k, unless some before it
are left out: then every step reads a later one. A batch that is left out has the size of the step
that would have read it.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from harness.config.job import Job
from harness.config.training import Phase, Sizes
from harness.data.batch import Batch
from harness.data.cache import open_documents
from harness.data.mixture import SourceOrder
from harness.data.samples import PackedSamples, Reading, Samples, SyntheticSamples
from harness.data.stream_reader import RowStream
from harness.util.errors import DataError


class Loader(ABC):
    """An endless sequence of batches of one split.

    Attributes:
        samples_per_epoch: samples per epoch, over all rows; None if unknown (streams) or
            meaningless (synthetic data).
        samples_per_epoch_of: the same for each source of a mixture; empty without a mixture.
        note: a line to show when training starts, or None.
        runs_in_loop: whether the training loop must call ``next`` itself, because it computes on
            the device.
        leaves_out: whether it leaves out the batches of ``data.leave_out`` and of its state, as
            ``Cursor`` does. A job that wants it is refused without.
    """

    samples_per_epoch: int | None
    note: str | None = None
    runs_in_loop: bool = False
    leaves_out: bool = False
    samples_per_epoch_of: Mapping[str, int | None] = MappingProxyType({})

    @abstractmethod
    def next(self) -> Any:
        """Return this loader's rows of the next global step: a ``Batch``, or an ``OtherBatch``."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position, JSON-serializable; combine the states of all ranks with ``merge_states``."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the step at which ``state`` was saved; the sizes of the next step are
        those of ``state["step"] + 1``.

        ``state["leave_out"]`` has the numbers of batches to leave out beside those of the job
        (``leaves_out``).

        Raises:
            DataError: the state is from a stream or a mixture and this loader is not, or the
                reverse; or, for streams, it is from another global batch size or does not contain
                this loader's rows.
        """

    @abstractmethod
    def reset(self) -> None:
        """Return to global step 0."""

    def close(self) -> None:
        """Stop background work; load a state, or reset, before ``next`` is called again."""
        return


class Piece(NamedTuple):
    """What one row of a step reads: a sample, or with scheduled lengths a piece of one."""

    slot: int
    """The row of the largest global batch whose stream is read, if the source is a stream."""
    number: int
    """Number of the sample."""
    first: int
    """First token of the piece in the sample."""
    length: int
    """Tokens of the piece."""


@dataclass
class Cursor:
    """Position of a loader with ``rows`` of the largest global batch: the step, and the tokens read so far.

    Attributes:
        leave_out: numbers of batches that no step reads.
        step: number of steps read.
        batch: number of batches read or left out.
        position: number of tokens before the next batch, over all rows; see ``Sizes``.
        chosen: more numbers to leave out, which are in the state.
        left_out: pieces of the batches between the last step and the one before it.
    """

    rows: range
    sizes: Sizes
    leave_out: Collection[int] = ()
    step: int = 0
    batch: int = 0
    position: int = 0
    chosen: list[int] = field(default_factory=list)
    left_out: list[Piece] = field(default_factory=list)

    def advance(self) -> list[Piece]:
        """Go on by one step; return the pieces of this loader's rows."""
        self.step += 1
        phase = self.sizes.at(self.step)
        self.left_out = []
        while self.batch + 1 in self.leave_out or self.batch + 1 in self.chosen:
            self.left_out += self._next_batch(phase)
        return self._next_batch(phase)

    def _next_batch(self, phase: Phase) -> list[Piece]:
        sizes = self.sizes
        begin = phase.begin(self.position)
        length = phase.seq_len
        self.batch += 1
        self.position = begin + phase.tokens
        return [
            Piece(
                row * sizes.batch_size // phase.batch_size,
                *divmod(begin + row * length, sizes.seq_len),
                length,
            )
            for row in phase.share(self.rows, sizes.batch_size)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the step, and the next sample; inside of a sample also the tokens read of it.

        If batches were or will be left out, also the number of batches before the next one, and
        ``chosen``.
        """
        samples, tokens = divmod(self.position, self.sizes.seq_len)
        state: dict[str, Any] = {"step": self.step, "samples": samples}
        if tokens:
            state["tokens"] = tokens
        if self.batch != self.step:
            state["batch"] = self.batch
        if self.chosen:
            state["leave_out"] = self.chosen
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self.batch = state.get("batch", self.step)
        self.chosen = state.get("leave_out", [])
        self.position = state.get("samples", 0) * self.sizes.seq_len + state.get("tokens", 0)

    def reset(self) -> None:
        self.step = self.batch = self.position = 0
        self.chosen = []


def stack(samples: list[tuple[np.ndarray, ...]]) -> Batch:
    return Batch(*(torch.from_numpy(np.stack(arrays)) for arrays in zip(*samples, strict=True)))


class SampleSource(Protocol):
    """Reads the samples of one source."""

    num_per_epoch: int | None
    """Samples per epoch; None if there are no epochs, or their length is unknown."""
    streams: Mapping[int, RowStream]
    """Streams by row of the global batch; none for a source with random access."""

    def read(self, piece: Piece) -> tuple[np.ndarray, ...]:
        """Return a piece of a sample; of a stream, as many of the next tokens."""


class NumberedSource(SampleSource):
    """Samples with random access."""

    streams: Mapping[int, RowStream] = MappingProxyType({})

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.num_per_epoch = samples.num_per_epoch
        self._known: tuple[int, tuple[np.ndarray, ...]] | None = None

    def read(self, piece: Piece) -> tuple[np.ndarray, ...]:
        # Neighbouring rows read pieces of one sample.
        if self._known is None or self._known[0] != piece.number:
            self._known = piece.number, self._samples.sample(piece.number)
        cut = slice(piece.first, piece.first + piece.length)
        inputs_T, labels_T, *documents = (array[cut] for array in self._known[1])
        # A piece numbers its documents from 0. Samples with padding are not cut.
        return inputs_T, labels_T, *(numbers_T - max(0, numbers_T[0]) for numbers_T in documents)


class SampleLoader(Loader):
    """Loader of samples. Each row of a step comes from the only source, or from the one that ``order`` draws.

    A source with random access is read by its own sample numbers, as if it were alone. A streamed
    source has a stream for each row of the largest batch, which advances when its row draws the
    source. Row j of a smaller batch of B rows reads stream j * global_batch_size // B, so a rank's
    rows of any batch are in its own streams.

    Args:
        sources: by name; the name of a single one does not matter.
    """

    leaves_out = True

    def __init__(
        self,
        reading: Reading,
        sources: Mapping[str, SampleSource],
        order: SourceOrder | None = None,
    ) -> None:
        self.sources = sources
        self._order = order
        self._cursor = Cursor(reading.rows, reading.sizes, reading.leave_out)
        self._batch_size = reading.sizes.batch_size
        self._names = reading.data.source_names
        self._streams: dict[str, RowStream] = {}
        for name, source in sources.items():
            for row, stream in source.streams.items():
                self._streams[f"{name}/{row}" if order else str(row)] = stream
        per_epoch = {name: source.num_per_epoch for name, source in sources.items()}
        self.samples_per_epoch = None if order else next(iter(per_epoch.values()))
        self.samples_per_epoch_of = per_epoch if order else {}

    def next(self) -> Batch:
        pieces = self._cursor.advance()
        if self._streams and self._cursor.left_out:
            self._read(self._cursor.left_out)  # a stream cannot go past a batch without reading it
        return self._read(pieces)

    def _read(self, pieces: list[Piece]) -> Batch:
        if self._order is None:
            (source,) = self.sources.values()
            return stack([source.read(piece) for piece in pieces])
        read = []
        drawn = []
        for piece in pieces:
            index, number = self._order.which(piece.number)
            name = self._order.names[index]
            read.append(self.sources[name].read(piece._replace(number=number)))
            drawn.append(self._names.index(name))
        return stack(read)._replace(sources_B=torch.tensor(drawn))

    def state_dict(self) -> dict[str, Any]:
        """Return the step and, unless a single source is streamed, the next sample (``Cursor``); of
        a mixture the position of the order as ``mixture``, and the positions of all streams as
        ``slots``.
        """
        state: dict[str, Any] = self._cursor.state_dict()
        if self._order:
            state["mixture"] = self._order.state_dict(state["samples"])
        elif self._streams:
            del state["samples"]
            state.pop("tokens", None)
        if self._streams:
            state["global_batch_size"] = self._batch_size
            state["slots"] = {slot: stream.state_dict() for slot, stream in self._streams.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._check(state)
        for slot, stream in self._streams.items():
            if slot in state.get("slots", {}):
                stream.load_state_dict(state["slots"][slot])
            else:
                stream.reset()  # of a new source
        self._cursor.load_state_dict(state)
        if self._order:
            self._order.load_state_dict(state["mixture"])

    def _check(self, state: dict[str, Any]) -> None:
        slots = state.get("slots", {})
        saved = "the saved position"
        was = _kind_in_words("mixture" in state, bool(slots))
        now = _kind_in_words(self._order is not None, bool(self._streams))
        if was != now:
            raise DataError(f"{saved} is in {was}, and the job reads {now}")
        size = state.get("global_batch_size", self._batch_size)
        if self._streams and size != self._batch_size:
            raise DataError(
                "a streamed dataset is split by rows of the global batch, so it cannot resume with "
                f"training.global_batch_size={self._batch_size}; the state was saved with {size}"
            )
        known = state["mixture"]["counts"] if self._order else {"": 0}
        missing = [
            slot for slot in self._streams if slot not in slots and slot.rpartition("/")[0] in known
        ]
        if missing:
            what = f"{missing[0]} (source/row)" if self._order else f"rows {', '.join(missing)}"
            raise DataError(f"{saved} has no {what}; merge the states of all ranks")

    def reset(self) -> None:
        if self._order:
            self._order.reset()
        for stream in self._streams.values():
            stream.reset()
        self._cursor.reset()

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


def _kind_in_words(is_mixture: bool, has_streams: bool) -> str:
    if is_mixture:
        return "a mixture"
    return "a streamed dataset" if has_streams else "one source that is not streamed"


def load_numbered(reading: Reading, samples: Samples) -> SampleLoader:
    return SampleLoader(reading, {"": NumberedSource(samples)})


def load_documents(reading: Reading) -> Loader:
    """Return the loader of a source's documents, which are in the token cache."""
    return load_numbered(reading, PackedSamples(open_documents(reading), reading))


def load_synthetic(reading: Reading) -> Loader:
    return load_numbered(reading, SyntheticSamples(reading))


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks into one state, which any number of ranks can load."""
    steps = sorted({state["step"] for state in states})
    if len(steps) != 1:
        raise DataError(
            f"the loader states to merge are of different steps: {', '.join(map(str, steps))}"
        )
    merged = dict(states[0])
    if "slots" in merged:
        merged["slots"] = {}
        for state in states:
            merged["slots"] |= state["slots"]
    return merged


def leave_out(loader: Loader, ahead: Mapping[str, Any], step: int, job: Job) -> list[int]:
    """Let no step read ``debug.spike_batches`` batches any more, of which the last is that of a step.

    Args:
        loader: it has gone back to an earlier step; batches before it cannot be left out.
        ahead: its state after it read the step.

    Returns:
        Their numbers.
    """
    state = loader.state_dict()
    before = ahead.get("leave_out", [])
    first = state.get("batch", state["step"]) + 1
    last = first - 1
    for _ in range(step - state["step"]):
        last += 1
        while last in before or last in job.data.leave_out:
            last += 1
    batches = list(range(max(first, last - job.debug.spike_batches + 1), last + 1))
    loader.load_state_dict({**state, "leave_out": sorted({*before, *batches})})
    return batches
