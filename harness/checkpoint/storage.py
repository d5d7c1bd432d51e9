"""torch's DCP storage with checksums, computed during writing and verified during reading.

Each entry's checksum is stored with its offset in DCP's own ``.metadata``, as an attribute that
other readers ignore. Sizes and checksums of files are stored in ``manifest.json``, which is written
last. The checksums are XXH3-128, so ``xxh128sum`` can check files by hand.
"""

import io
import itertools
import mmap
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as RemoteFileSystem
from torch.distributed.checkpoint.filesystem import FileSystem as LocalFileSystem
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from harness.checkpoint.catalog import (
    CHECKSUM,
    MANIFEST,
    METADATA,
    DamagedCheckpoint,
    check_files,
    encode_manifest,
    is_url,
    set_aside,
)
from harness.checkpoint.metadata import load_failure, parse_metadata
from harness.config.failures import kind_of_text
from harness.util.files import sync_file, sync_folder


@dataclass
class FileDigest:
    """Size and checksums of a file that was written."""

    size: int = 0
    checksum: str = ""
    spans: dict[tuple[int, int], str] = field(default_factory=dict)
    """Checksums by (offset, length) of the bytes written between two calls of ``tell``."""


class HashingStream(io.IOBase):
    """A sequentially written file that computes checksums of the file and of its entries.

    DCP calls ``tell`` before and after every entry; each call ends a span.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.digest = FileDigest()
        self.failure: OSError | None = None
        self._file = xxhash.xxh3_128()
        self._span = xxhash.xxh3_128()
        self._span_start = 0

    def write(self, data: Any) -> int:
        with memoryview(data) as view, view.cast("B") as content:
            try:
                self._raw.write(content)
            except OSError as error:
                self.failure = error
                raise
            self._file.update(content)
            self._span.update(content)
            self.digest.size += len(content)
            return len(content)

    def tell(self) -> int:
        end = self.digest.size
        if end > self._span_start:
            self.digest.spans[self._span_start, end - self._span_start] = self._span.hexdigest()
            self._span = xxhash.xxh3_128()
            self._span_start = end
        return end

    def flush(self) -> None:
        self._raw.flush()

    def fileno(self) -> int:
        return self._raw.fileno()

    def close(self) -> None:
        if not self.closed:
            self.digest.checksum = self._file.hexdigest()
            super().close()
            self._raw.close()


class _Hashing(FileSystemBase):
    """A file system of DCP that records digests of the files written through it."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[str, FileDigest] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as raw:  # type: ignore[safe-super]
            if "w" not in mode:
                yield raw
                return
            stream = HashingStream(cast("IO[bytes]", raw))
            try:
                yield stream
                stream.close()
            except RuntimeError as error:
                # torch's writer replaces the disk's error by its own, without a cause.
                raise stream.failure or error from None
            self.digests[Path(path).name] = stream.digest

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)  # type: ignore[safe-super]
        if Path(path).name in self.digests:
            self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _HashingLocal(_Hashing, LocalFileSystem): ...


class _HashingRemote(_Hashing, RemoteFileSystem): ...


@dataclass(frozen=True)
class HashedResult(WriteResult):
    """A rank's report on one written entry to the coordinator, with the size and checksum of its file."""

    file_size: int = 0
    file_checksum: str = ""


class Writer(FileSystemWriter):
    """Writes one checkpoint; it is complete once ``finish`` has written the manifest.

    An existing checkpoint at its path, a folder or an fsspec URL, is moved aside.
    """

    def __init__(self, path: str, manifest: dict[str, Any]) -> None:
        remote = is_url(path)
        # For a remote stream, sync_files would call os.sync, which flushes every disk of the
        # machine.
        super().__init__(path, sync_files=not remote)
        self.fs: Any = _HashingRemote() if remote else _HashingLocal()
        self.path = self.fs.init_path(path)
        self.manifest = manifest  # without ``files``

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Do not touch the disk: all ranks call this at once, and one clears the path afterwards."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Clear the path of leftovers of a killed process; called on one rank before any rank writes."""
        set_aside([str(self.path)])
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's entries and record their checksums."""
        self.fs.mkdir(self.path)
        results = super().write_data(plan, planner).wait()
        hashed: list[WriteResult] = []
        for result in results:
            place = result.storage_data
            digest = self.fs.digests[place.relative_path]
            setattr(place, CHECKSUM, digest.spans[place.offset, place.length])
            hashed.append(
                HashedResult(
                    result.index, result.size_in_bytes, place, digest.size, digest.checksum
                )
            )
        done: Future[list[WriteResult]] = Future()
        done.set_result(hashed)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write DCP's metadata, then the manifest; called on the coordinator."""
        super().finish(metadata, results)
        files = {}
        for result in cast("Iterator[HashedResult]", itertools.chain.from_iterable(results)):
            facts = {"size": result.file_size, CHECKSUM: result.file_checksum}
            files[result.storage_data.relative_path] = facts
        digest = self.fs.digests[METADATA]
        files[METADATA] = {"size": digest.size, CHECKSUM: digest.checksum}
        # Check that all files are visible here: ranks of other nodes may have written to another
        # disk.
        check_files(str(self.path), files)
        write_last(self.fs, self.path, MANIFEST, encode_manifest({**self.manifest, "files": files}))


def write_last(fs: FileSystemBase, folder: str | os.PathLike, name: str, content: bytes) -> None:
    """Write the file that marks a folder as complete: atomically (write, rename) and synced to disk."""
    temporary = fs.concat_path(folder, f"{name}.tmp")
    final = fs.concat_path(folder, name)
    local = folder if isinstance(folder, Path) else None
    with fs.create_stream(temporary, "wb") as stream:
        stream.write(content)  # type: ignore[attr-defined]
        if local:
            sync_file(stream)
    if local:
        sync_folder(local)  # the names of the data files must be durable before this file's name
    fs.rename(temporary, final)
    if local:
        sync_folder(local)


class _Content(io.RawIOBase):
    """The bytes of an entry as a file. A file on a local disk is mapped: a copy would double the memory."""

    def __init__(self, file: Any, place: Any) -> None:
        end = place.offset + place.length
        # ``mmap`` cannot map beyond the end of a file, and with a length of 0 it maps all of it.
        if isinstance(file, io.BufferedReader) and 0 < end <= os.fstat(file.fileno()).st_size:
            mapped = mmap.mmap(file.fileno(), end, prot=mmap.PROT_READ)
            self.bytes = memoryview(mapped)[place.offset :]
        else:
            file.seek(place.offset)
            self.bytes = memoryview(file.read(place.length))
        self._position = 0

    def readinto(self, buffer: Any) -> int:
        part = self.bytes[self._position :][: len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self.bytes)}
        self._position = bases[whence] + offset
        return self._position


def _read_tensor(file: Any, place: Any) -> torch.Tensor:
    """Return the tensor of an entry, after its bytes are compared with its checksum.

    ``place`` is DCP's storage info of the entry (file, offset, length), with its checksum if there
    is one.
    """
    span = _span(place)
    content = _Content(file, place)
    if len(content.bytes) != place.length:
        raise DamagedCheckpoint(f"{span}: the file ends before")
    checksum = getattr(place, CHECKSUM, None)
    if checksum is not None and xxhash.xxh3_128_hexdigest(content.bytes) != checksum:
        raise DamagedCheckpoint(f"{span} do not have the checksum they were written with")
    try:
        tensor = torch.load(cast("IO[bytes]", content), map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes make torch raise almost anything
        if isinstance(error, MemoryError) or kind_of_text(str(error)) is not None:
            raise  # out of memory or a similar failure of the machine, not of the file
        raise DamagedCheckpoint(f"{span}: the entry {load_failure(error)}") from error
    if not isinstance(tensor, torch.Tensor):
        raise DamagedCheckpoint(f"{span}: the entry is not a tensor")
    return tensor


def _span(place: Any) -> str:
    """File and byte range of an entry, for messages."""
    return f"{place.relative_path}: bytes {place.offset} to {place.offset + place.length}"


class Reader(FileSystemReader):
    """Reads one checkpoint, in a folder or at an fsspec URL, and verifies checksums while reading.

    A checkpoint of other software has no checksums; its manifest is empty.
    """

    def __init__(self, path: str, manifest: dict[str, Any]) -> None:
        super().__init__(path)
        self.fs: Any = RemoteFileSystem() if is_url(path) else LocalFileSystem()
        self.path = self.fs.init_path(path)
        self.manifest = manifest
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's metadata, which is read once. Code that a forged file names is not run.

        Call it before ``dcp.load``, which from torch 2.13 on turns errors of this method into text.
        """
        if self._metadata is not None:
            return self._metadata
        try:
            with self.fs.create_stream(self.fs.concat_path(self.path, METADATA), "rb") as stream:
                content = stream.read()
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{METADATA} is missing") from error
        if (
            self.manifest
            and xxhash.xxh3_128_hexdigest(content) != self.manifest["files"][METADATA][CHECKSUM]
        ):
            raise DamagedCheckpoint(f"{METADATA} does not have the checksum it was written with")
        self._metadata = parse_metadata(content)
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the planned items, entry by entry in file order.

        Unlike DCP's own method it reads each entry once, for all items that need it, and verifies
        it.
        """
        wanted: dict[tuple[str, int, int], list[ReadItem]] = {}
        for item in plan.items:
            place = self.storage_data.get(item.storage_index)
            if place is None:
                raise DamagedCheckpoint(f"{METADATA} has no location of {item.storage_index.fqn}")
            if item.type == LoadItemType.BYTE_IO:
                # torch's planner would unpickle it.
                raise DamagedCheckpoint(
                    f"{item.storage_index.fqn} is not a tensor in this checkpoint"
                )
            wanted.setdefault((place.relative_path, place.offset, place.length), []).append(item)
        for relative_path, entries in itertools.groupby(sorted(wanted), key=itemgetter(0)):
            path = self.fs.concat_path(self.path, relative_path)
            with self.fs.create_stream(path, "rb") as file:
                for entry in entries:
                    items = wanted[entry]
                    place = self.storage_data[items[0].storage_index]  # the same for all items
                    self._read_entry(file, place, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_entry(
        self, file: Any, place: Any, items: list[ReadItem], planner: LoadPlanner
    ) -> None:
        tensor = _read_tensor(file, place)
        for item in items:
            places = zip(item.storage_offsets, item.lengths, tensor.shape, strict=True)
            if tensor.dim() != len(item.lengths) or any(
                offset + length > size for offset, length, size in places
            ):
                raise DamagedCheckpoint(
                    f"{_span(place)}: the tensor has shape {list(tensor.shape)}"
                )
            target = planner.resolve_tensor(item).detach()
            target.copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
