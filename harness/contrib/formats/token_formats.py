"""Readers of token files that other programs write: Megatron-Core and numpy.

A reader checks what a file says about itself (magic, version, type, length, offsets) and returns a
part of a token sequence (``tokens.Tokens``).
"""

import struct
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from harness.data.tokens import TokenFormat, map_file, size_of
from harness.util.errors import DataError

# Megatron-Core 0.16, megatron/core/datasets/indexed_dataset.py (_IndexWriter and DType): magic,
# version, code of the type, number of sequences, number of documents + 1; then int32 lengths, int64
# offsets in bytes, int64 first sequence of each document, and for multimodal data int8 modes.
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}

_LLMC_MAGIC = (20240520, 20240801)  # read by experiments/extensions

MOST_CHECKED = 1 << 24  # entries at the beginning of an index; more would delay the start
_SAMPLE = 1 << 15  # bytes at the beginning of a file that show how many bytes an id has
_FEWEST = 8  # ids other than 0 in them; fewer show nothing
_MOST_MAPPED = 1 << 14  # arrays; Linux allows 65,530 maps of a process
_WIDTHS = {8: "int64", 4: "uint32", 2: "uint16"}


def numbers_in(file: Path, dtype: str, skip: int, count: int) -> Callable[[], np.ndarray]:
    """Numbers in a file, which is mapped when they are needed."""
    return partial(_map, str(file), dtype, skip, count, file.stat().st_mtime_ns)


@lru_cache(_MOST_MAPPED)
def _map(name: str, dtype: str, skip: int, count: int, modified: int) -> np.ndarray:
    return map_file(name, dtype, skip, count)


class TokenFile:
    """Tokens in one file, after a header of ``skip`` bytes; as many as fit without ``num_tokens``.

    Args:
        num_documents: of a file with an index; None: without one.
        start: the first token of a document by its number, or those of an array of numbers, by an
            index that is read in place.
    """

    def __init__(
        self,
        file: Path,
        dtype: str,
        *,
        skip: int = 0,
        num_tokens: int | None = None,
        num_documents: int | None = None,
        start: Callable[[Any], Any] = int,
    ) -> None:
        self.name = str(file)
        self.num_documents = num_documents
        self._start = start
        size = size_of(file) - skip
        itemsize = np.dtype(dtype).itemsize
        self.num_tokens = size // itemsize if num_tokens is None else num_tokens
        if size != self.num_tokens * itemsize:
            expected = f"{self.num_tokens} tokens of {dtype} after a header of {skip} bytes"
            refuse(file, f"has {size + skip} bytes, which are not {expected}")
        self._tokens = numbers_in(file, dtype, skip, self.num_tokens)

    def read(self, begin: int, end: int) -> np.ndarray:
        return self._tokens()[begin:end].astype(np.int64)

    def starts_between(self, begin: int, end: int) -> np.ndarray:
        # bisect instead of numpy: arrays may not be aligned, and numpy would copy all of them.
        numbers = range(self.num_documents or 0)
        first = bisect_left(numbers, begin, key=self._start)
        last = bisect_left(numbers, end, lo=first, key=self._start)
        if first == last:
            return np.empty(0, dtype=np.int64)
        return np.asarray(self._start(np.arange(first, last)), np.int64)


def open_memmap(file: Path, dtype: str | None, vocab_size: int) -> TokenFile:
    """Open plain tokens, as nanoGPT writes them, or a .npy file; ``dtype``: None for the smallest."""
    if file.suffix == ".npy":
        return _open_npy(file, dtype)
    if int.from_bytes(head_of(file, 4), "little") in _LLMC_MAGIC:
        refuse(file, "has llm.c's header; would work: data.format=llmc of experiments/extensions")
    dtype = dtype or smallest_dtype(vocab_size)
    part = TokenFile(file, dtype)
    _check_width(file, dtype, vocab_size)
    return part


def _check_width(file: Path, dtype: str, vocab_size: int) -> None:
    """Check that no other number of bytes than that of ``dtype`` makes the first ids those of a vocabulary.

    Of several numbers the largest is right: read with fewer bytes, an id is followed by ids 0.
    """
    head = head_of(file, _SAMPLE)
    size = np.dtype(dtype).itemsize
    for width, works in _WIDTHS.items():
        ids = np.frombuffer(head, f"<u{width}", len(head) // width)
        fits = size_of(file) % width == 0 and bool(np.all(ids < vocab_size))
        if fits and np.count_nonzero(ids) >= _FEWEST:
            if width != size:
                problem = f"its ids seem to have {width} bytes, and {dtype} has {size}"
                refuse(file, f"{problem}; would work: data.dtype={works}")
            return


def _open_npy(file: Path, dtype: str | None) -> TokenFile:
    try:
        array = np.lib.format.open_memmap(str(file), mode="r")
    except Exception as error:  # the header is a Python literal, and numpy raises almost anything
        refuse(file, f"is not a readable .npy file ({' '.join(str(error).split())})")
    if array.ndim != 1 or array.dtype.kind not in "ui":
        refuse(
            file, f"has {array.dtype} in {array.ndim} dimensions; ids are integers in one dimension"
        )
    if dtype not in (None, array.dtype.name):
        refuse(file, f"has ids of {array.dtype}; would work: data.dtype={array.dtype}")
    return TokenFile(file, array.dtype.str, skip=array.offset, num_tokens=len(array))


def is_megatron(file: Path) -> bool:
    return file.suffix == ".bin" and file.with_suffix(".idx").exists()


def open_megatron(file: Path) -> TokenFile:
    """Open ``PREFIX.bin`` with its index ``PREFIX.idx``."""
    index = file.with_suffix(".idx")
    begin = _MEGATRON_HEADER.size
    # Bytes that a short file does not have count as 0.
    head = head_of(index, begin).ljust(begin, b"\0")
    magic, version, code, sequences, documents = _MEGATRON_HEADER.unpack(head)
    if magic != _MEGATRON_MAGIC:
        refuse(index, "does not begin with MMIDIDX, as --dataset-impl mmap writes it")
    if version != 1:
        refuse(index, f"has version {version} of Megatron's index; version 1 is read")
    if code not in _MEGATRON_DTYPES:
        refuse(index, f"has type code {code}; those of integers are read: {_MEGATRON_DTYPES}")
    without_modes = begin + 12 * sequences + 8 * documents
    if documents < 1 or size_of(index) not in (without_modes, without_modes + sequences):
        counts = f"{sequences} sequences and {documents} document boundaries"
        refuse(index, f"has {size_of(index)} bytes, which are not {counts}")
    lengths = map_file(str(index), "<i4", begin, sequences)
    all_pointers = numbers_in(index, "<i8", begin + 4 * sequences, sequences)
    all_firsts = numbers_in(index, "<i8", begin + 12 * sequences, documents)
    pointers = all_pointers()
    firsts = all_firsts()
    dtype = _MEGATRON_DTYPES[code]
    itemsize = np.dtype(dtype).itemsize
    if firsts[0] != 0 or firsts[-1] != sequences:
        refuse(index, f"its documents do not begin with sequence 0 and end with {sequences}")
    if np.any(np.diff(firsts[:MOST_CHECKED]) < 0):
        refuse(index, "the first sequences of its documents are not ascending")
    sizes = lengths[:MOST_CHECKED].astype(np.int64) * itemsize
    follow = np.array_equal(np.diff(pointers[:MOST_CHECKED]), sizes[:-1])
    if not follow or np.any(sizes < 0) or np.any(pointers[:1] != 0):
        refuse(index, "its sequences do not follow each other without gaps, from byte 0")
    num_tokens = int(pointers[-1]) // itemsize + int(lengths[-1]) if sequences else 0

    def start(document: Any) -> Any:
        sequence = all_firsts()[document]  # empty documents at the end have no sequence
        known = all_pointers()[np.minimum(sequence, sequences - 1)] // itemsize
        return np.where(sequence < sequences, known, num_tokens)

    count = documents - 1 if sequences else 0
    return TokenFile(file, dtype, num_tokens=num_tokens, num_documents=count, start=start)


def smallest_dtype(vocab_size: int) -> str:
    """Return the type that nanoGPT and datatrove choose for a vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def head_of(file: Path, size: int) -> bytes:
    size_of(file)
    try:
        with file.open("rb") as content:
            return content.read(size)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}") from error


def refuse(file: Path, problem: str) -> NoReturn:
    raise DataError(f"{file}: {problem}")


MEGATRON = TokenFormat(
    endings=(".bin",),
    companions={".idx": ".bin"},
    recognizes=is_megatron,
    open=lambda file, data, vocab_size: open_megatron(file),
)
MEMMAP = TokenFormat(
    endings=(".bin", ".npy"),
    recognizes=lambda file: file.suffix in (".bin", ".npy"),  # it is asked last
    needs_dtype=True,
    open=lambda file, data, vocab_size: open_memmap(file, data.dtype, vocab_size),
)
