"""Documents of a streamed dataset, read and tokenized for one row of the global batch.

A dataset has N shards (files). A part is a shard or, with fewer shards than rows (R), every c-th
example of a shard, where c = ceil(R / N). In each pass over the dataset the parts are dealt to the
rows in turn: the i-th part of row j is part ``(j + i * R) % (N * c)``. So every part is read by one
row in a pass. What a row reads depends on (dataset, seed, R, j), not on ranks.

With ``data.shuffle`` the parts of every pass are in another order, and the documents of a row are
shuffled in blocks of ``data.shuffle_buffer``. A block ends with its pass.

A position is a JSON object, the start of a document:

* ``shards``: N.
* ``part``: i.
* ``document``: the library's state of the part, before this document; null at the beginning of a
  part.
* ``example``: number of the example in its shard.
* ``block`` and ``index`` with ``data.shuffle``: the number of the block, and the document's place
  in it. The other values are then those of the block's first document.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from harness.config.data import DataConfig
from harness.data.documents import describe, text_of_row
from harness.data.samples import random_stream, sample_of
from harness.data.tokenizer import Tokenizer, with_bos_eos
from harness.util.errors import DataError

Position = dict[str, Any]


class TokenizedDocument(NamedTuple):
    """A tokenized document that is not empty."""

    position: Position
    tokens: np.ndarray
    """int32, with bos and eos."""


class _Text(NamedTuple):
    position: Position
    text: str


@dataclass(frozen=True)
class RowReader:
    """Reads the documents of one row from any position, in this process.

    Args:
        dataset: the split, an ``IterableDataset``.
        row: row of the global batch (j).
        rows: the global batch size (R).
        field: the column with the text.
        shuffle_buffer: documents of a block; None keeps the stored order.
    """

    dataset: Any
    tokenizer: Tokenizer
    row: int
    rows: int
    field: str
    name: str
    seed: int
    shuffle_buffer: int | None

    @property
    def beginning(self) -> Position:
        """Position of the first document."""
        position = {"shards": self.dataset.n_shards, "part": 0, "document": None, "example": 0}
        return position if self.shuffle_buffer is None else {**position, "block": 0, "index": 0}

    def check(self, position: Position) -> None:
        """Raise DataError if ``position`` was saved for other shards or with another order."""
        shuffled = "block" in position
        if shuffled != (self.shuffle_buffer is not None):
            raise DataError(
                f"{self.name}: the position was saved with data.shuffle={str(shuffled).lower()}; "
                "set data.shuffle as it was"
            )
        saved = position["shards"]
        shards = self.dataset.n_shards
        if saved != shards:
            raise DataError(
                f"{self.name}: the dataset has {shards} shards, but {saved} when the position was saved; "
                "use the same files"
            )

    def read(self, position: Position) -> Iterator[TokenizedDocument]:
        """Yield the documents from ``position`` on, without end."""
        texts = self._texts if self.shuffle_buffer is None else self._shuffled_texts
        for start, text in texts(position):
            tokens = with_bos_eos(self.tokenizer.encode(text), self.tokenizer)
            yield TokenizedDocument(start, np.asarray(tokens, dtype=np.int32))

    def close(self) -> None:
        """Stop background work, of which this reader has none; call ``read`` to continue."""

    def _texts(self, position: Position) -> Iterator[_Text]:
        number = position["part"]
        state = position["document"]
        example = position["example"]
        without_text = 0
        while True:
            shard, cut = self._part(number)
            if state is not None:
                shard.load_state_dict(state)
            found = False
            for fields, next_state in self._examples(shard):
                text = ""
                if example % self._cuts == cut:
                    text = text_of_row(fields, self.field, self.name)
                if text:
                    found = True
                    start = {
                        "shards": position["shards"],
                        "part": number,
                        "document": state,
                        "example": example,
                    }
                    yield _Text(start, text)
                state = next_state
                example += 1
            number += 1
            state = None
            example = 0
            without_text = 0 if found else without_text + 1
            # One part more than the row has: the first was perhaps not read from its beginning.
            if without_text > self._num_own_parts:
                raise DataError(
                    f"{self.name} holds no text; it may have fewer documents than the batch has rows"
                )

    def _shuffled_texts(self, position: Position) -> Iterator[_Text]:
        assert self.shuffle_buffer is not None
        block = position["block"]
        first = position["index"]

        def pass_of(text: _Text) -> int:
            return (self.row + text.position["part"] * self.rows) // self._num_parts

        for _, texts in groupby(self._texts(position), pass_of):
            while members := list(islice(texts, self.shuffle_buffer)):
                random = random_stream(f"documents of row {self.row}", self.seed, block)
                order = random.permutation(len(members))
                for index in range(first, len(members)):
                    start = {**members[0].position, "block": block, "index": index}
                    yield _Text(start, members[order[index]].text)
                block += 1
                first = 0

    @property
    def _cuts(self) -> int:
        return -(-self.rows // self.dataset.n_shards)

    @property
    def _num_parts(self) -> int:
        return self.dataset.n_shards * self._cuts

    @property
    def _num_own_parts(self) -> int:
        """Number of different parts that this row reads in all passes."""
        if self.shuffle_buffer is not None:
            return self._num_parts
        return self._num_parts // gcd(self._num_parts, self.rows)

    def _part(self, number: int) -> tuple[Any, int]:
        """Return the part that the row reads after ``number`` others, as a shard and a remainder.

        Dividing the numbers of the part's examples by ``_cuts`` leaves this remainder.
        """
        from datasets.distributed import split_dataset_by_node

        pass_, part = divmod(self.row + number * self.rows, self._num_parts)
        if self.shuffle_buffer is not None:
            order = random_stream("parts", self.seed, pass_).permutation(self._num_parts)
            part = int(order[part])
        shards = self.dataset.n_shards
        cut, shard = divmod(part, shards)
        # With as many ranks as there are shards, the split of a rank is one shard.
        return split_dataset_by_node(self.dataset, rank=shard, world_size=shards), cut

    def _examples(self, dataset: Any) -> Iterator[tuple[dict[str, Any], Any]]:
        """Yield each example, and the state of ``dataset`` after it."""
        examples = iter(dataset)
        while True:
            try:
                example = next(examples, None)
            # File readers and the hub's client raise many types of errors; all mean that reading
            # failed.
            except Exception as error:
                raise DataError(f"{self.name} cannot be read: {describe(error)}") from error
            if example is None:
                return
            yield example, dataset.state_dict()


class RowStream:
    """An endless sequence of the samples of one row of the global batch."""

    def __init__(self, reader: RowReader, data: DataConfig) -> None:
        self._reader = reader
        self._data = data
        self.reset()

    def reset(self) -> None:
        self._seek(self._reader.beginning, 0)

    def state_dict(self) -> dict[str, Any]:
        """Start of the next sample: the position of a document, and ``offset``, a number of tokens in it."""
        position = self._documents[0].position if self._documents else self._position
        return {**position, "offset": self._offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        position = {name: value for name, value in state.items() if name != "offset"}
        self._reader.check(position)
        self._seek(position, state["offset"])

    def close(self) -> None:
        self._reader.close()

    def next(self, length: int) -> tuple[np.ndarray, ...]:
        """Return a sample of ``length`` inputs."""
        tokens, starts = self._peek(length + 1)
        self._offset += length  # not length + 1: the last label is the next sample's first input
        while self._offset >= len(self._documents[0].tokens):
            self._offset -= len(self._documents.popleft().tokens)
        return sample_of(tokens, starts[1:].nonzero()[0], self._data)

    def _peek(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The next ``count`` tokens, and whether each is the first of its document."""
        available = sum(len(document.tokens) for document in self._documents) - self._offset
        while available < count:
            self._documents.append(next(self._unread))
            available += len(self._documents[-1].tokens)
        tokens = np.empty(count, dtype=np.int64)
        starts = np.zeros(count, dtype=bool)
        filled = 0
        begin = self._offset
        for document in self._documents:
            part = document.tokens[begin : begin + count - filled]
            tokens[filled : filled + len(part)] = part
            starts[filled] = begin == 0
            filled += len(part)
            begin = 0
        return tokens, starts

    def _seek(self, position: Position, offset: int) -> None:
        self._position = position
        self._offset = offset
        self._documents: deque[TokenizedDocument] = deque()
        self._unread: Iterator[TokenizedDocument] = self._reader.read(position)
