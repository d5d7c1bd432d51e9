"""Readers of token files that llm.c, modded-nanogpt, datatrove and nanotron write."""

import struct
from pathlib import Path

import numpy as np

from harness.contrib.formats.token_formats import (
    MOST_CHECKED,
    TokenFile,
    head_of,
    is_megatron,
    numbers_in,
    open_memmap,
    refuse,
)
from harness.data.tokens import TokenFormat, size_of

# llm.c, dev/data/data_common.py: 256 int32, of which magic, version and number of tokens are used.
# Shards of modded-nanogpt are of the first kind.
_LLMC_HEADER_BYTES = 1024
_LLMC_EXAMPLES = 20240522  # multiple-choice examples, no training tokens
_LLMC_KINDS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}


def open_llmc(file: Path) -> TokenFile:
    """Open tokens of llm.c or modded-nanogpt."""
    # Bytes that a short file does not have count as 0.
    magic, version, num_tokens = struct.unpack("<3i", head_of(file, 12).ljust(12, b"\0"))
    if magic not in _LLMC_KINDS:
        refuse(file, f"has magic {magic}; llm.c writes {' or '.join(map(str, _LLMC_KINDS))}")
    expected, dtype = _LLMC_KINDS[magic]
    if version != expected:
        refuse(
            file, f"has version {version}; llm.c's files of magic {magic} have version {expected}"
        )
    return TokenFile(file, dtype, skip=_LLMC_HEADER_BYTES, num_tokens=num_tokens)


def is_llmc(file: Path) -> bool:
    """Whether a file begins with llm.c's magic and has no index of Megatron."""
    magic = int.from_bytes(head_of(file, 4), "little")
    return magic in (*_LLMC_KINDS, _LLMC_EXAMPLES) and not is_megatron(file)


def open_datatrove(file: Path, dtype: str | None, vocab_size: int) -> TokenFile:
    """Open a .ds file of datatrove or nanotron, with its .index and .metadata if they exist."""
    if Path(f"{file}.loss").exists():
        refuse(
            file, "has a loss mask (.loss), which is not supported; would work: files without one"
        )
    dtype = dtype or _read_metadata(file)[1]
    index = Path(f"{file}.index")
    if not index.exists():
        return open_memmap(file, dtype, vocab_size)
    size = size_of(index)
    if size % 8:
        refuse(index, f"has {size} bytes, which are no complete offsets of 8 bytes")
    # Read as int64: values from 2**63 would be negative.
    ends = numbers_in(index, "<i8", 0, size // 8)
    checked = ends()[:MOST_CHECKED]
    if np.any(checked[:1] < 0) or np.any(np.diff(checked) < 0):
        refuse(index, "the documents' ends are not ascending")
    num_tokens = int(ends()[-1]) if size else 0
    if dtype is None:
        # 2 or 4 bytes for a token follow from the number of tokens.
        dtype = "uint32" if size_of(file) == 4 * num_tokens else "uint16"
    return TokenFile(
        file,
        dtype,
        num_tokens=num_tokens,
        num_documents=size // 8,
        # A document starts where another ends.
        start=lambda number: np.where(number > 0, ends()[number - 1], 0),
    )


def _read_metadata(file: Path) -> tuple[str | None, str | None]:
    """Return the tokenizer's name and the type of the tokens by a .ds.metadata file, if there is one.

    The file has three lines: ``NAME|BYTES``, the number of tokens, the number in words.
    """
    metadata = Path(f"{file}.metadata")
    if not metadata.exists():
        return None, None
    first = head_of(metadata, 4096).decode("utf-8", "replace").partition("\n")[0]
    name, _, token_bytes = first.rpartition("|")
    dtype = {"2": "uint16", "4": "uint32"}.get(token_bytes)
    if dtype is None:
        refuse(metadata, f"its first line is not NAME|2 or NAME|4: {first[:80]!r}")
    return name, dtype


LLMC = TokenFormat(
    endings=(".bin",),
    recognizes=is_llmc,
    boundary="bos",
    open=lambda file, data, vocab_size: open_llmc(file),
)
DATATROVE = TokenFormat(
    endings=(".ds",),
    companions=dict.fromkeys((".ds.index", ".ds.metadata", ".ds.loss")),
    needs_dtype=True,
    tokenizer_of=lambda file: _read_metadata(file)[0],
    open=lambda file, data, vocab_size: open_datatrove(file, data.dtype, vocab_size),
)
