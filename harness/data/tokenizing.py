"""Units: the parts of a source that are tokenized one by one, in one or several processes.

A source is cut into spans: byte ranges of JSON lines, row groups of parquet files, rows of a table,
or complete files. Consecutive spans make up a unit. Units depend on the source only, and the result
depends neither on the number of processes, nor on how often tokenizing was stopped and continued. A
line belongs to the span in which it begins.

    <key>.tokens     ids of the unit's documents, without a split into train and validation
    <key>.index      int64: documents, tokens, checksum, then the start and the number of each document
                     that is not empty; written last, so a unit with an index is complete
"""

import hashlib
import os
import sys
import time
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain, count
from pathlib import Path

import numpy as np
import xxhash

from harness.config.data import TokenizerConfig
from harness.data.documents import LongText, Source, Span
from harness.data.tokenizer import Tokenizer, build_tokenizer, with_bos_eos
from harness.data.workers import Workers
from harness.util.encoding import json_digest
from harness.util.errors import DataError
from harness.util.files import sync_file, write_atomically
from harness.util.processes import cpus

MOST_WORKERS = 32
"""Default maximum of processes."""
# Larger batches take more memory, and more time: 1.3 s instead of 1.6 s for 8 MB (2026-11-23).
CHARS_PER_BATCH = 250_000
_HEADER = 3
_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Unit:
    """Consecutive spans of a source.

    Attributes:
        number: position among the source's units.
        key: hash of the spans, the content of their files, and the tokenizer.
    """

    number: int
    key: str
    spans: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.spans)

    def __str__(self) -> str:
        last = (
            f" to {self.spans[-1].name}"
            if len(self.spans) > 1
            else f", from {self.spans[0].begin:,}"
        )
        return f"{self.spans[0].name}{last}"


def units_of(source: Source, tokenizer: Tokenizer, unit_bytes: int) -> list[Unit]:
    """Return the units of a source, in the order of its documents."""
    groups: list[list[Span]] = []
    size = 0
    for span in source.spans(unit_bytes):
        if not groups or size + span.nbytes > unit_bytes:
            groups.append([])
            size = 0
        groups[-1].append(span)
        size += span.nbytes
    units = []
    common = [*source.reading, tokenizer.fingerprint]
    for number, spans in enumerate(groups):
        key = json_digest([*common, source.contents(spans)])[:24]
        units.append(Unit(number, key, tuple(spans)))
    return units


@dataclass(frozen=True)
class Index:
    """Documents of a tokenized unit.

    Attributes:
        num_documents: including empty ones.
        starts: offset of each nonempty document (int64).
        numbers: number of each nonempty document among all of the unit (int64).
    """

    num_documents: int
    num_tokens: int
    checksum: int
    starts: np.ndarray
    numbers: np.ndarray


def _checksum(tokens: Path, *index: int | bytes) -> int:
    """Checksum of a unit's ids and index, which fits into int64."""
    digest = xxhash.xxh3_64()
    with tokens.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    for part in index:
        digest.update(part if isinstance(part, bytes) else b"%d " % part)
    return digest.intdigest() >> 1


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)


def read_index(folder: Path, unit: Unit, dtype: np.dtype) -> Index | None:
    """Read the index of a tokenized unit; None if the unit is not complete."""
    try:
        numbers = np.fromfile(folder / f"{unit.key}.index", dtype=np.int64)
        size = (folder / f"{unit.key}.tokens").stat().st_size
    except FileNotFoundError:
        return None
    header = numbers[:_HEADER].tolist()
    rest = numbers[_HEADER:]
    if len(header) < _HEADER or size != header[1] * dtype.itemsize or len(rest) % 2:
        return None
    return Index(*header, *np.split(rest, 2))


def is_intact(folder: Path, unit: Unit, dtype: np.dtype) -> bool:
    """Whether a unit is tokenized, and its files have the content that they were written with."""
    index = read_index(folder, unit, dtype)
    if index is None:
        return False
    tokens = folder / f"{unit.key}.tokens"
    counts = (index.num_documents, index.num_tokens)
    if index.checksum == _checksum(
        tokens, *counts, index.starts.tobytes(), index.numbers.tobytes()
    ):
        return True
    sys.stderr.write(f"WARNING {tokens} is damaged and is made again\n")
    return False


def write_unit(
    folder: Path, unit: Unit, source: Source, tokenizer: Tokenizer, advance: Callable[[int], None]
) -> None:
    """Tokenize a unit into ``folder``: its files are there completely, or not at all.

    Args:
        advance: called with the approximate number of bytes read since the last call.
    """
    dtype = token_dtype(tokenizer)
    temporary = folder / f".{unit.key}.{uuid.uuid4().hex}.tmp"
    starts = array("q")
    numbers = array("q")
    num_tokens = 0
    counter = count()
    texts = chain.from_iterable(map(source.read, unit.spans))
    documents = ((next(counter), text) for text in texts)
    try:
        with temporary.open("xb") as file:
            for batch in _batches(documents):
                for number, pieces in _encoded(batch, tokenizer):
                    starts.append(num_tokens)
                    numbers.append(number)
                    for ids in pieces:
                        file.write(np.asarray(ids, dtype=dtype).tobytes())
                        num_tokens += len(ids)
                advance(sum(len(text) for _, text in batch))
            sync_file(file)
        counts = next(counter), num_tokens
        checksum = _checksum(temporary, *counts, starts.tobytes(), numbers.tobytes())
        temporary.replace(folder / f"{unit.key}.tokens")
    finally:
        temporary.unlink(missing_ok=True)
    header = array("q", [*counts, checksum])
    write_atomically(folder / f"{unit.key}.index", (header + starts + numbers).tobytes())


def remove_unit(folder: Path, unit: Unit) -> None:
    for kind in ("index", "tokens"):
        (folder / f"{unit.key}.{kind}").unlink(missing_ok=True)


Batch = list[tuple[int, str | LongText]]


def _encoded(batch: Batch, tokenizer: Tokenizer) -> Iterator[tuple[int, Iterable[Sequence[int]]]]:
    """Yield for each document of a batch its number and its ids with bos and eos, in pieces."""
    if len(batch) == 1:
        number, text = batch[0]
        before, after = (
            [] if end is None else [[end]] for end in (tokenizer.bos_id, tokenizer.eos_id)
        )
        parts = [text] if isinstance(text, str) else text
        yield number, chain(before, tokenizer.encode_in_pieces(parts), after)
        return
    texts = [text for _, text in batch if isinstance(text, str)]  # a long one is alone
    encoded = tokenizer.encode_batch(texts)
    for (number, _), ids in zip(batch, encoded, strict=True):
        yield number, [with_bos_eos(ids, tokenizer)]


def _batches(documents: Iterable[tuple[int, str | LongText]]) -> Iterator[Batch]:
    """Yield the nonempty documents in lists of at most CHARS_PER_BATCH, to bound the memory of tokenizing.

    A longer document is a list of its own.
    """
    batch: Batch = []
    num_chars = 0
    for number, text in documents:
        if batch and num_chars + len(text) > CHARS_PER_BATCH:
            yield batch
            batch = []
            num_chars = 0
        if text:
            batch.append((number, text))
            num_chars += len(text)
    if batch:
        yield batch


def bytes_of(units: Iterable[Unit]) -> int:
    return sum(unit.nbytes for unit in units)


def tokenize(
    folder: Path,
    units: Sequence[Unit],
    source: Source,
    tokenizer: Tokenizer,
    *,
    workers: int | None,
) -> None:
    """Tokenize the units that are not complete in ``folder``; those that are finished survive an error.

    Args:
        workers: number of processes; None: as many as this process may use CPUs, at most
            MOST_WORKERS. A tokenizer without ``config`` tokenizes here.

    Raises:
        DataError: of the first document that cannot be read.
        OSError: the folder is full or not writable.
        MachineError: a process died.
    """
    dtype = token_dtype(tokenizer)
    missing = [unit for unit in units if not is_intact(folder, unit, dtype)]
    config = tokenizer.config
    workers = 1 if config is None else min(workers or min(cpus(), MOST_WORKERS), len(missing))
    progress = TokenizingProgress(source.name, units, missing, workers)
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


class TokenizingProgress:
    """Prints how much is tokenized, every few seconds."""

    def __init__(
        self,
        name: str,
        units: Iterable[Unit],
        missing: Sequence[Unit],
        workers: int,
    ) -> None:
        self._name = name
        self._workers = workers
        self._read = dict.fromkeys((unit.key for unit in missing), 0)
        self._total = bytes_of(units)
        self._todo = bytes_of(missing)
        self._started = time.monotonic()
        self._next = self._started + _SECONDS_BETWEEN_LINES

    def advance(self, unit: Unit, nbytes: int) -> None:
        """Count bytes that were read of a unit; of a compressed file they may be more than it has."""
        self._read[unit.key] = min(self._read[unit.key] + nbytes, unit.nbytes)
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _SECONDS_BETWEEN_LINES
        done = sum(self._read.values())
        speed = done / (now - self._started)
        left = f", {timedelta(seconds=round((self._todo - done) / speed))} left" if speed else ""
        sys.stderr.write(
            f"tokenizing {self._name}: {(self._total - self._todo + done) / 1e6:,.0f} of "
            f"{self._total / 1e6:,.0f} MB, {speed / 1e6:.1f} MB/s{left}, processes: {self._workers}\n"
        )
        sys.stderr.flush()


def is_held_out(index: int, fraction: float) -> bool:
    """Whether the document at ``index`` is held out; depends only on the index and the fraction."""
    digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64
