"""Tokens as one sequence: parts in any number of files, read in place.

A part is a file, an Arrow batch, or a split of a token cache. Offsets count tokens, from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np

from harness.errors import DataError


class Tokens(Protocol):
    """Concatenated documents."""

    name: str
    """Name for error messages."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_documents(self) -> int | None:
        """Number of documents; None if their boundaries are unknown."""
        ...

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return the tokens from ``begin`` to ``end`` (exclusive), int64."""
        ...

    def starts_between(self, begin: int, end: int) -> np.ndarray:
        """Return the ascending offsets in [begin, end) at which a document starts, int64; empty if unknown."""
        ...


class Concatenation(Tokens):
    """Parts, one after the other.

    Args:
        vocab_size: every id that is read must be smaller.
        rule: the rule that a larger id breaks, for the error.
    """

    def __init__(self, parts: Sequence[Tokens], name: str, vocab_size: int, rule: str) -> None:
        self.name, self._vocab_size, self._rule = name, vocab_size, rule
        self._parts = [part for part in parts if part.num_tokens]
        self._begins = np.array([0, *accumulate(part.num_tokens for part in self._parts)], dtype=np.int64)

    @property
    def num_tokens(self) -> int:
        return int(self._begins[-1])

    @property
    def num_documents(self) -> int | None:
        counts = [part.num_documents for part in self._parts]
        return None if None in counts else sum(count or 0 for count in counts)

    def read(self, begin: int, end: int) -> np.ndarray:
        pieces = [np.empty(0, dtype=np.int64)]
        for part, _, first, last in self._cut(begin, end):
            ids = part.read(first, last)
            self._check(ids, part, first)
            pieces.append(ids)
        return pieces[1] if len(pieces) == 2 else np.concatenate(pieces)

    def starts_between(self, begin: int, end: int) -> np.ndarray:
        pieces = [np.empty(0, dtype=np.int64)]
        for part, offset, first, last in self._cut(begin, end):
            pieces.append(part.starts_between(first, last) + offset)
        return np.concatenate(pieces)

    def _cut(self, begin: int, end: int) -> list[tuple[Tokens, int, int, int]]:
        """Cut a range into parts: each with its offset, and begin and end within the part."""
        cut, index = [], int(np.searchsorted(self._begins, begin, side="right")) - 1
        while begin < min(end, self.num_tokens):
            offset, stop = int(self._begins[index]), min(end, int(self._begins[index + 1]))
            cut.append((self._parts[index], offset, begin - offset, stop - offset))
            begin, index = stop, index + 1
        return cut

    def _check(self, ids: np.ndarray, part: Tokens, first: int) -> None:
        if int(ids.max()) < self._vocab_size and int(ids.min()) >= 0:
            return
        index = int(np.argmax((ids >= self._vocab_size) | (ids < 0)))
        raise DataError(f"{part.name}: token {first + index} has id {ids[index]}, but {self._rule}")


class Section(Tokens):
    """The tokens of a part from ``begin`` to ``end`` (exclusive)."""

    def __init__(self, part: Tokens, begin: int, end: int) -> None:
        self.name, self._part, self._begin, self._end = part.name, part, begin, end

    @property
    def num_tokens(self) -> int:
        return self._end - self._begin

    @property
    def num_documents(self) -> int | None:
        known = self._part.num_documents is not None
        return len(self.starts_between(0, self.num_tokens)) if known else None

    def read(self, begin: int, end: int) -> np.ndarray:
        return self._part.read(self._begin + begin, self._begin + end)

    def starts_between(self, begin: int, end: int) -> np.ndarray:
        return self._part.starts_between(self._begin + begin, self._begin + end) - self._begin


class Delimited(Tokens):
    """Tokens whose documents begin at a token, or end at one.

    Boundaries are found in the tokens that are read, so no file is scanned.
    """

    num_documents = None

    def __init__(self, tokens: Tokens, *, token: int, begins: bool) -> None:
        self.name, self._tokens, self._token, self._begins = tokens.name, tokens, token, begins

    @property
    def num_tokens(self) -> int:
        return self._tokens.num_tokens

    def read(self, begin: int, end: int) -> np.ndarray:
        return self._tokens.read(begin, end)

    def starts_between(self, begin: int, end: int) -> np.ndarray:
        if self._begins:
            return np.flatnonzero(self.read(begin, end) == self._token) + begin
        before = max(begin - 1, 0)
        starts = np.flatnonzero(self.read(before, end - 1) == self._token) + before + 1
        return starts if begin else np.concatenate([[0], starts])
