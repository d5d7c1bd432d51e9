"""Read DCP's ``.metadata`` without running code that it names.

torch reads the file with ``pickle.load``, which imports and calls whatever the file names. Here the
pickle can only create the records below. torch's objects are built from them, one field at a time.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from harness.checkpoint.catalog import CHECKSUM, METADATA, DamagedCheckpoint
from harness.util.files import is_file_name


def parse_metadata(content: bytes) -> Metadata:
    """Return the metadata that the file ``.metadata`` holds.

    Fields that reading does not need are left out.
    """
    try:
        fields = _fields(_Unpickler(io.BytesIO(content)).load(), "Metadata")
        entries = fields["state_dict_metadata"].items()
        places = fields["storage_data"].items()
        # What is missing or of another type raises an exception.
        return Metadata(
            {str(name): _entry(name, value) for name, value in entries},
            storage_data={_index(key): _place(value) for key, value in places},
        )
    except DamagedCheckpoint:
        raise
    except Exception as error:  # damaged bytes make pickle raise almost anything
        raise DamagedCheckpoint(f"{METADATA} cannot be read: {first_line(error)}") from error


def load_failure(error: BaseException) -> str:
    """Return in one line why ``torch.load(weights_only=True)`` refuses a file."""
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    if named is not None:
        return _untrusted(named[1])
    # torch's own advice is to load the file without the restriction.
    text = (
        "it is not a pickle of tensors"
        if isinstance(error, pickle.UnpicklingError)
        else first_line(error)
    )
    return f"cannot be read: {text}"


def _untrusted(name: str) -> str:
    return f"is not trusted: it names {name!r}, which no checkpoint needs; no code of it was run"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


class _Record:
    """The state of one pickled object. Each subclass, in ``_RECORDS``, is for one of torch's classes."""

    state: Any = None

    def __new__(cls, *_arguments: Any) -> _Record:
        return super().__new__(cls)

    # A forged file can also set the state of the class. That call fails, because it has no `self`.
    def __setstate__(self, state: Any) -> None:
        self.state = state


_NAMES = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "_StorageInfo",
)
_RECORDS: dict[str, type[_Record]] = {name: type(name, (_Record,), {}) for name in _NAMES}


class _Unused(_Record):
    """A value that reading does not need: a memory format, a layout, a path."""


_MODULE = "torch.distributed.checkpoint.metadata"
_BEFORE_2_3 = "torch.distributed._shard.sharded_tensor.metadata"
_KNOWN: dict[tuple[str, str], Any] = {
    **{(_MODULE, name): kind for name, kind in _RECORDS.items()},
    (_MODULE, "StorageMeta"): _Unused,
    (_MODULE, "_MEM_FORMAT_ENCODING"): _Unused,
    (_BEFORE_2_3, "TensorProperties"): _RECORDS["TensorProperties"],
    (_BEFORE_2_3, "MEM_FORMAT_ENCODING"): _Unused,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _RECORDS["_StorageInfo"],
    ("torch.serialization", "_get_layout"): _Unused,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): dict,
    ("builtins", "getattr"): _Unused,  # Python 3.11.0 pickles a member of an enum with it
}
for _name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
    _KNOWN["pathlib", _name] = _Unused
    _KNOWN["pathlib._local", _name] = _Unused  # Python 3.13


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None and module == "torch":
            known = vars(torch).get(name)
            known = known if isinstance(known, torch.dtype) else None
        if known is None:
            raise DamagedCheckpoint(f"{METADATA} {_untrusted(f'{module}.{name}')}")
        return known


def _entry(name: str, record: Any) -> STORAGE_TYPES:
    if isinstance(record, _RECORDS["BytesStorageMetadata"]):
        return BytesStorageMetadata()
    fields = _fields(record, "TensorStorageMetadata")
    # The state of properties is a tuple of torch's: dtype, layout, requires_grad, ...
    dtype, *_ = fields["properties"].state
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has no dtype")
    size = _size(fields["size"])
    parts = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    chunks = [ChunkStorageMetadata(_size(part["offsets"]), _size(part["sizes"])) for part in parts]
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ValueError(f"the chunks of {name} do not add up to the tensor")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _index(record: Any) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    offset = fields.get("offset")
    offset = None if offset is None else _size(offset)
    return MetadataIndex(str(fields["fqn"]), offset, fields.get("index"))


def _place(record: Any) -> _StorageInfo:
    fields = _fields(record, "_StorageInfo")
    file = fields["relative_path"]
    if not is_file_name(file):
        raise ValueError(f"{file!r} is not a file in the checkpoint's folder")
    place = _StorageInfo(file, *_size((fields["offset"], fields["length"])))
    if CHECKSUM in fields:
        setattr(place, CHECKSUM, fields[CHECKSUM])
    return place


def _size(lengths: Any) -> torch.Size:
    size = torch.Size(lengths)
    if min(size, default=0) < 0:
        raise ValueError(f"a size or position is negative: {list(size)}")
    return size


def _fields(record: Any, kind: str) -> dict[str, Any]:
    if not isinstance(record, _RECORDS[kind]):
        raise ValueError(f"{type(record).__name__.strip('_')} is in the place of {kind}")
    return dict(record.state)
