"""Tokenizing: units of a source in one or several processes, then one token cache of consecutive units.

The result does not depend on the number of processes, nor on how often tokenizing was stopped and continued.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, TextIO

import numpy as np

from harness.config.data import TokenizerConfig
from harness.data.cache_check import FILES, META, SPLITS, describe_files
from harness.data.documents import Source
from harness.data.tokenizer import Tokenizer, build_tokenizer
from harness.data.units import Index, Unit, bytes_of, cpus, is_intact, read_index, token_dtype, write_unit
from harness.data.workers import Workers, can_start_processes
from harness.util.errors import DataError

MOST_WORKERS = 32
"""Default maximum of processes."""
_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class TokenizedUnits:
    """Consecutive tokenized units of a source.

    Attributes:
        folder: of their files.
        units: in order.
        first_document: number of their first document in the source.
    """

    folder: Path
    units: Sequence[Unit]
    first_document: int = 0


def tokenize(
    folder: Path, units: Sequence[Unit], source: Source, tokenizer: Tokenizer, *, workers: int | None
) -> None:
    """Tokenize the units that are not complete in ``folder``; those that are finished survive an error.

    Args:
        folder: of the units' files; exists.
        units: of the source, in order.
        source: the source.
        tokenizer: the tokenizer.
        workers: number of processes; None: as many as this process may use CPUs, at most MOST_WORKERS. A
            tokenizer without ``config``, and a process that may have no children, tokenize here.

    Raises:
        DataError: of the first document that cannot be read.
        OSError: the folder is full or not writable.
        MachineError: a process died.
    """
    dtype = token_dtype(tokenizer)
    missing = [unit for unit in units if not is_intact(folder, unit, dtype)]
    config = tokenizer.config if can_start_processes() else None
    workers = 1 if config is None else min(workers or min(cpus(), MOST_WORKERS), len(missing))
    progress = Progress(source.name, units, missing, workers)
    if workers > 1 and config is not None:
        prepare = partial(_prepare, source, config, tokenizer.fingerprint, folder)
        fewer = "fewer processes (data.tokenize_workers, tokenize.workers)"
        Workers(prepare, "tokenized", fewer).run(missing, workers, progress.advance)
        return
    for unit in missing:
        write_unit(folder, unit, source, tokenizer, partial(progress.advance, unit))


def _prepare(
    source: Source, config: TokenizerConfig, fingerprint: str, folder: Path, index: int
) -> Callable[[Unit, Callable[[int], None]], None]:
    """Build the tokenizer in one of several processes; return the function that tokenizes a unit."""
    # The tokenizers library reads it once. One process of several needs one thread.
    os.environ["RAYON_NUM_THREADS"] = "1"
    tokenizer = build_tokenizer(config)
    tokenizer.num_threads = 1
    if tokenizer.fingerprint != fingerprint:
        raise DataError(f"tokenizer file {config.file} has changed meanwhile")
    return lambda unit, advance: write_unit(folder, unit, source, tokenizer, advance)


class Progress:
    """Prints how much is tokenized, every few seconds.

    Args:
        name: of the source.
        units: all units.
        missing: those that are still to be tokenized.
        workers: number of processes.
        stream: where to print.
        clock: seconds.
    """

    def __init__(
        self,
        name: str,
        units: Iterable[Unit],
        missing: Sequence[Unit],
        workers: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._workers, self._clock = name, workers, clock
        self._stream = stream or sys.stderr
        self._read = dict.fromkeys((unit.key for unit in missing), 0)
        self._total, self._todo = bytes_of(units), bytes_of(missing)
        self._started = clock()
        self._next = self._started + _SECONDS_BETWEEN_LINES

    def advance(self, unit: Unit, nbytes: int) -> None:
        """Count bytes that were read of a unit; of a compressed file they may be more than it has."""
        self._read[unit.key] = min(self._read[unit.key] + nbytes, unit.nbytes)
        now = self._clock()
        if now < self._next:
            return
        self._next = now + _SECONDS_BETWEEN_LINES
        done = sum(self._read.values())
        speed = done / (now - self._started)
        left = f", {timedelta(seconds=round((self._todo - done) / speed))} left" if speed else ""
        self._stream.write(
            f"tokenizing {self._name}: {(self._total - self._todo + done) / 1e6:,.0f} of "
            f"{self._total / 1e6:,.0f} MB, {speed / 1e6:.1f} MB/s{left}, processes: {self._workers}\n"
        )
        self._stream.flush()


def is_held_out(index: int, fraction: float) -> bool:
    """Whether the document at ``index`` is held out; depends only on the index and the fraction."""
    digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def count_documents(tokenized: TokenizedUnits, dtype: np.dtype) -> int:
    """Number of documents of tokenized units, including empty ones."""
    return sum(_index(tokenized.folder, unit, dtype).num_documents for unit in tokenized.units)


def concatenate(
    folder: Path, tokenized: TokenizedUnits, dtype: np.dtype, held_out: float, **facts: Any
) -> dict[str, Any]:
    """Write the documents of tokenized units as a token cache (``cache.py``).

    Args:
        folder: to write to; exists.
        tokenized: the units, all complete.
        dtype: of the ids.
        held_out: fraction of documents that go to ``validation``.
        facts: further entries of ``meta.json``.

    Returns:
        The content of ``meta.json``.
    """
    writers = {split: _Writer(folder, split) for split in SPLITS}
    document, damaged = tokenized.first_document, 0
    try:
        for unit in tokenized.units:
            index, tokens = _index(tokenized.folder, unit, dtype), tokenized.folder / f"{unit.key}.tokens"
            if held_out > 0:
                numbers = (index.numbers + document).tolist()
                held = np.array([is_held_out(number, held_out) for number in numbers], dtype=bool)
                _append_parts(writers, tokens, index, held, dtype)
            else:
                with tokens.open("rb") as content:
                    shutil.copyfileobj(content, writers["train"].tokens, 1 << 24)
                writers["train"].add_starts(index.starts, index.num_tokens)
            document += index.num_documents
            damaged += index.damaged
    finally:
        for writer in writers.values():
            writer.close()
    meta = {
        "dtype": dtype.name,
        "tokens": {split: writers[split].num_tokens for split in SPLITS},
        "damaged": damaged,
        "files": describe_files(folder, FILES),
        **facts,
    }
    (folder / META).write_text(json.dumps(meta))
    return meta


def _index(folder: Path, unit: Unit, dtype: np.dtype) -> Index:
    index = read_index(folder, unit, dtype)
    if index is None:
        raise DataError(f"{folder / unit.key}.tokens was removed while it was used")
    return index


class _Writer:
    """Appends documents to the two files of a split."""

    def __init__(self, folder: Path, split: str) -> None:
        self.num_tokens = 0
        self.tokens: IO[bytes] = (folder / f"{split}.tokens").open("wb")
        self._starts = (folder / f"{split}.starts").open("wb")

    def add_starts(self, starts: np.ndarray, num_tokens: int) -> None:
        """Add documents whose ids were appended: their offsets in them, and the number of ids."""
        self._starts.write((starts + self.num_tokens).tobytes())
        self.num_tokens += num_tokens

    def close(self) -> None:
        self.tokens.close()
        self._starts.close()


def _append_parts(
    writers: dict[str, _Writer], file: Path, index: Index, held: np.ndarray, dtype: np.dtype
) -> None:
    """Append the documents of a unit, each to its split; ``held`` has a value for each document."""
    ends = np.append(index.starts[1:], index.num_tokens)
    changes = (np.flatnonzero(held[1:] != held[:-1]) + 1).tolist()
    with file.open("rb") as content:
        # Consecutive documents of a split are one run, and the file is read in order.
        for begin, end in pairwise([0, *changes, len(held)] if len(held) else []):
            writer = writers["validation" if held[begin] else "train"]
            num_tokens = int(ends[end - 1] - index.starts[begin])
            writer.tokens.write(content.read(num_tokens * dtype.itemsize))
            writer.add_starts(index.starts[begin:end] - index.starts[begin], num_tokens)
