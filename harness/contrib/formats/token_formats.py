"""Readers of token files that other programs write: Megatron-Core, numpy, llm.c, datatrove.

A reader checks what a file says about itself (magic, version, type, length, offsets) and returns a
part of a token sequence (``tokens.Tokens``).
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

import numpy as np

from harness.data.tokens import TokenFormat, map_file, size_of
from harness.util.errors import DataError

# Megatron-Core 0.16, megatron/core/datasets/indexed_dataset.py (_IndexWriter and DType): magic,
# version, code of the type, number of sequences, number of documents + 1; then int32 lengths, int64
# offsets in bytes, int64 first sequence of each document, and for multimodal data int8 modes.
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}

# llm.c, dev/data/data_common.py: 256 int32, of which magic, version and number of tokens are used.
# Shards of modded-nanogpt are of the first kind.
_LLMC_HEADER_BYTES = 1024
_LLMC_EXAMPLES = 20240522
_LLMC_KINDS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}

_MOST_MAPPED = (
    16384  # files mapped at once; Linux allows 65,530 maps in a process (vm.max_map_count)
)
_MOST_CHECKED = 1 << 24  # entries at each end of an index; more would delay the start
_SAMPLE = 1 << 15  # bytes at the beginning of a file that show how many bytes an id has
_FEWEST = 8  # ids other than 0 in them; fewer show nothing
_WIDTHS = {8: "int64", 4: "uint32", 2: "uint16"}


class _Array:
    """Numbers in a file, mapped when they are read."""

    def __init__(self, file: Path, dtype: str, skip: int, count: int) -> None:
        self._map = (str(file), dtype, skip, count, file.stat().st_mtime_ns)

    def __call__(self) -> np.ndarray:
        return _map(*self._map)


@lru_cache(maxsize=_MOST_MAPPED)
def _map(name: str, dtype: str, skip: int, count: int, modified: int) -> np.ndarray:
    return map_file(name, dtype, skip, count)


class TokenFile:
    """Tokens in one file, after a header of ``skip`` bytes; as many as fit without ``num_tokens``."""

    def __init__(
        self,
        file: Path,
        dtype: str,
        *,
        skip: int = 0,
        num_tokens: int | None = None,
        starts: DocumentEnds | MegatronIndex | None = None,
    ) -> None:
        self.name = str(file)
        self._starts = starts
        size = size_of(file) - skip
        itemsize = np.dtype(dtype).itemsize
        self.num_tokens = size // itemsize if num_tokens is None else num_tokens
        self.num_documents = None if starts is None else len(starts)
        if size != self.num_tokens * itemsize:
            after = f" after a header of {skip} bytes" if skip else ""
            expected = f"{self.num_tokens} tokens of {dtype}{after}"
            _refuse(file, f"has {size + skip} bytes, which are not {expected}")
        self._tokens = _Array(file, dtype, skip, self.num_tokens)

    def read(self, begin: int, end: int) -> np.ndarray:
        return self._tokens()[begin:end].astype(np.int64)

    def starts_between(self, begin: int, end: int) -> np.ndarray:
        return (
            np.empty(0, dtype=np.int64)
            if self._starts is None
            else self._starts.between(begin, end)
        )


def open_memmap(file: Path, dtype: str | None, vocab_size: int) -> TokenFile:
    """Open plain tokens, as nanoGPT writes them, or a .npy file; ``dtype``: None for the smallest."""
    if file.suffix == ".npy":
        return _open_npy(file, dtype)
    dtype = dtype or smallest_dtype(vocab_size)
    part = TokenFile(file, dtype)
    _check_width(file, dtype, vocab_size)
    return part


def _check_width(file: Path, dtype: str, vocab_size: int) -> None:
    """Check that no other number of bytes than that of ``dtype`` makes the first ids those of a vocabulary.

    Of several numbers the largest is right: read with fewer bytes, an id is followed by ids 0.
    """
    head = _head(file, _SAMPLE)
    size = np.dtype(dtype).itemsize
    for width, works in _WIDTHS.items():
        ids = np.frombuffer(head, f"<u{width}", len(head) // width)
        fits = size_of(file) % width == 0 and bool(np.all(ids < vocab_size))
        if fits and np.count_nonzero(ids) >= _FEWEST:
            if width != size:
                problem = f"its ids seem to have {width} bytes, and {dtype} has {size}"
                _refuse(file, f"{problem}; would work: data.dtype={works}")
            return


def _open_npy(file: Path, dtype: str | None) -> TokenFile:
    try:
        array = np.lib.format.open_memmap(str(file), mode="r")
    except Exception as error:  # the header is a Python literal, and numpy raises almost anything
        _refuse(file, f"is not a readable .npy file ({' '.join(str(error).split())})")
    if array.ndim != 1 or array.dtype.kind not in "ui":
        _refuse(
            file, f"has {array.dtype} in {array.ndim} dimensions; ids are integers in one dimension"
        )
    if dtype not in (None, array.dtype.name):
        _refuse(file, f"has ids of {array.dtype}; would work: data.dtype={array.dtype}")
    return TokenFile(file, array.dtype.str, skip=array.offset, num_tokens=len(array))


def open_llmc(file: Path) -> TokenFile:
    """Open tokens of llm.c or modded-nanogpt."""
    header = _head(file, _LLMC_HEADER_BYTES)
    if len(header) < _LLMC_HEADER_BYTES:
        _refuse(file, f"is shorter than the header of llm.c, {_LLMC_HEADER_BYTES} bytes")
    magic, version, num_tokens = struct.unpack_from("<3i", header)
    if magic == _LLMC_EXAMPLES:
        _refuse(file, f"has llm.c's magic {magic}: multiple-choice examples, no training tokens")
    if magic not in _LLMC_KINDS:
        _refuse(file, f"has magic {magic}; llm.c writes {' or '.join(map(str, _LLMC_KINDS))}")
    expected, dtype = _LLMC_KINDS[magic]
    if version != expected:
        _refuse(
            file, f"has version {version}; llm.c's files of magic {magic} have version {expected}"
        )
    if num_tokens < 0:
        _refuse(file, f"has a header with {num_tokens} tokens")
    return TokenFile(file, dtype, skip=_LLMC_HEADER_BYTES, num_tokens=num_tokens)


def is_llmc(file: Path) -> bool:
    """Whether a file begins with llm.c's magic and has no index of Megatron."""
    head = _head(file, 4)
    has_magic = len(head) == 4 and struct.unpack("<i", head)[0] in (*_LLMC_KINDS, _LLMC_EXAMPLES)
    return has_magic and not is_megatron(file)


def open_datatrove(file: Path, dtype: str | None, vocab_size: int) -> TokenFile:
    """Open a .ds file of datatrove or nanotron, with its .index and .metadata if they exist."""
    if Path(f"{file}.loss").exists():
        _refuse(
            file, "has a loss mask (.loss), which is not supported; would work: files without one"
        )
    dtype = dtype or _recorded_dtype(file)
    index = Path(f"{file}.index")
    if not index.exists():
        return open_memmap(file, dtype, vocab_size)
    ends = DocumentEnds(index)
    if dtype is None:
        # 2 or 4 bytes for a token follow from the number of tokens.
        dtype = "uint32" if size_of(file) == 4 * ends.num_tokens else "uint16"
    return TokenFile(file, dtype, num_tokens=ends.num_tokens, starts=ends)


def _recorded_dtype(file: Path) -> str | None:
    """Return the type of the tokens by a .ds.metadata file; None if there is none.

    The file has three lines: ``NAME|BYTES``, the number of tokens, the number in words.
    """
    metadata = Path(f"{file}.metadata")
    if not metadata.exists():
        return None
    first = _head(metadata, 4096).decode("utf-8", "replace").partition("\n")[0]
    token_bytes = first.rpartition("|")[2]
    if token_bytes not in ("2", "4"):
        _refuse(metadata, f"its first line is not NAME|2 or NAME|4: {first[:80]!r}")
    return "uint16" if token_bytes == "2" else "uint32"


class DocumentEnds:
    """The index of a .ds file: the end of each document, uint64."""

    def __init__(self, index: Path) -> None:
        size = size_of(index)
        if size % 8:
            _refuse(index, f"has {size} bytes, which are no complete offsets of 8 bytes")
        self._count = size // 8
        self._ends = _Array(index, "<i8", 0, self._count)
        # Read as int64: values from 2**63 would be negative.
        ends = self._ends()
        for part in _both_ends(self._count):
            if len(ends[part]) and (ends[part][0] < 0 or np.any(np.diff(ends[part]) < 0)):
                _refuse(index, "the documents' ends are not ascending")
        self.num_tokens = int(ends[-1]) if self._count else 0

    def __len__(self) -> int:
        return self._count

    def between(self, begin: int, end: int) -> np.ndarray:
        """Return the offsets in [begin, end) at which documents start, int64, ascending."""
        ends = self._ends()
        first, last = np.searchsorted(ends, [begin, end])
        starts = ends[first:last].astype(np.int64)
        # A document starts where another ends, except at the end of the file.
        starts = starts[starts < self.num_tokens]
        return starts if begin else np.concatenate([[0], starts])


def open_megatron(file: Path) -> TokenFile:
    """Open ``PREFIX.bin`` with its index ``PREFIX.idx``."""
    index = MegatronIndex(file.with_suffix(".idx"))
    return TokenFile(file, index.dtype, num_tokens=index.num_tokens, starts=index)


def is_megatron(file: Path) -> bool:
    return file.suffix == ".bin" and file.with_suffix(".idx").exists()


class MegatronIndex:
    """The index of Megatron-Core: where sequences are, and which sequence is a document's first."""

    def __init__(self, index: Path) -> None:
        head = _head(index, _MEGATRON_HEADER.size)
        if len(head) < _MEGATRON_HEADER.size or not head.startswith(_MEGATRON_MAGIC):
            _refuse(index, "does not begin with MMIDIDX, as --dataset-impl mmap writes it")
        _, version, code, sequences, documents = _MEGATRON_HEADER.unpack(head)
        if version != 1:
            _refuse(index, f"has version {version} of Megatron's index; version 1 is read")
        if code not in _MEGATRON_DTYPES:
            _refuse(
                index,
                f"has type code {code}, which is no type of integers; {_MEGATRON_DTYPES} are read",
            )
        without_modes = _MEGATRON_HEADER.size + 12 * sequences + 8 * documents
        if documents < 1 or size_of(index) not in (without_modes, without_modes + sequences):
            counts = f"{sequences} sequences and {documents} document boundaries"
            _refuse(index, f"has {size_of(index)} bytes, which are not {counts}")
        self._file = index
        self._sequences = sequences
        self._boundaries = documents
        skips = (_MEGATRON_HEADER.size + size * sequences for size in (0, 4, 12))
        self._lengths = _Array(index, "<i4", next(skips), sequences)
        self._pointers = _Array(index, "<i8", next(skips), sequences)
        self._firsts = _Array(index, "<i8", next(skips), documents)
        self.dtype = _MEGATRON_DTYPES[code]
        self._itemsize = np.dtype(self.dtype).itemsize
        self._num_bytes = self._check()
        self.num_tokens = self._num_bytes // self._itemsize

    def __len__(self) -> int:
        return self._boundaries - 1

    def between(self, begin: int, end: int) -> np.ndarray:
        """As ``DocumentEnds.between``."""
        pointers = self._pointers()
        firsts = self._firsts()

        def start(document: int) -> int:
            sequence = firsts[document]  # empty documents at the end have no sequence
            return int(pointers[sequence]) if sequence < self._sequences else self._num_bytes

        # bisect instead of numpy: the arrays are not aligned, and numpy would copy all of them.
        numbers = range(len(self))
        first = bisect_left(numbers, begin * self._itemsize, key=start)
        last = bisect_left(numbers, end * self._itemsize, lo=first, key=start)
        return pointers[firsts[first:last]].astype(np.int64) // self._itemsize

    def _check(self) -> int:
        """Check that sequences follow each other and documents ascend; return the bytes of all sequences."""
        lengths = self._lengths()
        pointers = self._pointers()
        firsts = self._firsts()
        if int(firsts[0]) != 0 or int(firsts[-1]) != self._sequences:
            _refuse(
                self._file,
                f"its documents do not begin with sequence 0 and end with {self._sequences}",
            )
        for part in _both_ends(self._boundaries):
            if np.any(np.diff(firsts[part]) < 0):
                _refuse(self._file, "the first sequences of its documents are not ascending")
        if self._sequences == 0:
            return 0
        for part in _both_ends(self._sequences):
            sizes = lengths[part].astype(np.int64) * self._itemsize
            if np.any(sizes < 0) or not np.array_equal(np.diff(pointers[part]), sizes[:-1]):
                _refuse(self._file, "its sequences do not follow each other without gaps")
        if int(pointers[0]) != 0:
            _refuse(self._file, f"its first sequence begins at byte {pointers[0]} instead of 0")
        return int(pointers[-1]) + int(lengths[-1]) * self._itemsize


def smallest_dtype(vocab_size: int) -> str:
    """Return the type that nanoGPT and datatrove choose for a vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def _both_ends(count: int) -> list[slice]:
    """Parts of an index that are checked: all, or both ends of a very long one."""
    if count <= 2 * _MOST_CHECKED:
        return [slice(0, count)]
    return [slice(0, _MOST_CHECKED), slice(count - _MOST_CHECKED, count)]


def _head(file: Path, size: int) -> bytes:
    size_of(file)
    try:
        with file.open("rb") as content:
            return content.read(size)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}") from error


def _refuse(file: Path, problem: str) -> NoReturn:
    raise DataError(f"{file}: {problem}")


MEGATRON = TokenFormat(
    endings=(".bin",),
    companions={".idx": ".bin"},
    recognizes=is_megatron,
    open=lambda file, data, vocab_size: open_megatron(file),
)
LLMC = TokenFormat(
    endings=(".bin",),
    recognizes=is_llmc,
    boundary="bos",
    open=lambda file, data, vocab_size: open_llmc(file),
)
MEMMAP = TokenFormat(
    endings=(".bin", ".npy"),
    recognizes=lambda file: (
        file.suffix == ".npy"
        or (file.suffix == ".bin" and not is_megatron(file) and not is_llmc(file))
    ),
    needs_dtype=True,
    open=lambda file, data, vocab_size: open_memmap(file, data.dtype, vocab_size),
)
DATATROVE = TokenFormat(
    endings=(".ds",),
    companions=dict.fromkeys((".ds.index", ".ds.metadata", ".ds.loss")),
    needs_dtype=True,
    open=lambda file, data, vocab_size: open_datatrove(file, data.dtype, vocab_size),
)
