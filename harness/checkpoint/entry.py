"""One entry of a DCP file: a tensor whose checksum is verified while it is read."""

from __future__ import annotations

import io
import mmap
import os
from typing import IO, Any, cast

import torch
import xxhash

from harness.checkpoint.catalog import CHECKSUM, DamagedCheckpoint
from harness.checkpoint.metadata import load_failure
from harness.config.failures import kind_of_text


def _view(file: Any, offset: int, length: int) -> memoryview:
    """Return a part of an open file; a local file is mapped, not copied."""
    try:
        handle = file.fileno()
    except (AttributeError, OSError):
        file.seek(offset)
        return memoryview(file.read(length))
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    available = max(0, min(length, os.fstat(handle).st_size - offset))
    if not available:
        return memoryview(b"")
    size = offset - start + available
    # Populate all pages at once: hashing and copying would otherwise fault every few pages.
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    mapped = mmap.mmap(handle, size, flags=flags, prot=mmap.PROT_READ, offset=start)
    return memoryview(mapped)[offset - start :]


# Bytes to copy and then hash at once, while they are still in the CPU cache.
_BLOCK = 1 << 18


class Entry(io.RawIOBase):
    """File-like view of one entry that computes its checksum while it is read.

    Args:
        file: the open file.
        place: DCP's storage info of the entry (file, offset, length), with its checksum if there is one.

    Raises:
        DamagedCheckpoint: the file ends before the entry does.
    """

    def __init__(self, file: Any, place: Any) -> None:
        self._place, self._end = place, place.offset + place.length
        self._view, self._position = _view(file, place.offset, place.length), 0
        self._digest, self._hashed = xxhash.xxh3_128(), 0
        if len(self._view) != place.length:
            raise DamagedCheckpoint(f"{place.relative_path} ends before byte {self._end}")

    @property
    def span(self) -> str:
        """File and byte range of the entry, for messages."""
        return f"{self._place.relative_path}: bytes {self._place.offset} to {self._end}"

    def load(self) -> torch.Tensor:
        """Return the tensor that the entry holds.

        Raises:
            DamagedCheckpoint: the entry is damaged or not a tensor.
        """
        try:
            tensor = torch.load(cast("IO[bytes]", self), map_location="cpu", weights_only=True)
        except Exception as error:  # damaged bytes make torch raise almost anything
            self.verify()
            if isinstance(error, MemoryError) or kind_of_text(str(error)) is not None:
                raise  # out of memory or a similar failure of the machine, not of the file
            raise DamagedCheckpoint(f"{self.span}: the entry {load_failure(error)}") from error
        self.verify()
        if not isinstance(tensor, torch.Tensor):
            raise DamagedCheckpoint(f"{self.span}: the entry is not a tensor")
        return tensor

    def verify(self) -> None:
        """Raise DamagedCheckpoint if the entry has a recorded checksum and its bytes do not match it."""
        wanted = getattr(self._place, CHECKSUM, None)
        if wanted is None:
            return
        self._digest.update(self._view[self._hashed :])
        self._hashed = len(self._view)
        if self._digest.hexdigest() != wanted:
            raise DamagedCheckpoint(f"{self.span} do not have the checksum they were written with")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        start, end = self._position, min(self._position + len(buffer), len(self._view))
        self._position = end
        if end - start < _BLOCK or start < self._hashed:
            buffer[: end - start] = self._view[start:end]
            return end - start
        self._digest.update(self._view[self._hashed : start])
        for begin in range(start, end, _BLOCK):
            block = self._view[begin : min(begin + _BLOCK, end)]
            buffer[begin - start : begin - start + len(block)] = block
            self._digest.update(block)
        self._hashed = end
        return end - start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._view)}[whence]
        self._position = base + offset
        return self._position
