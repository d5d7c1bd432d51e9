"""``manifest.json``: a checkpoint's description, protected by a checksum. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import xxhash

from harness.util.encoding import dumps, parse_object

MANIFEST = "manifest.json"
METADATA = ".metadata"
FORMAT = 1
# Key of a file's checksum in the manifest, and attribute of an entry's storage info in DCP's metadata, where
# other readers ignore it.
CHECKSUM = "xxh3_128"
HOLDS = ("full", "model", "hf")

_Check = tuple[str, Callable[[Any], bool]]
_MISSING = object()


class UnknownFormat(ValueError):
    """The manifest has a format of another version of the harness."""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


_COUNT: _Check = ("a number of 0 or more", _is_count)
_INTEGER: _Check = ("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool))
_OBJECT: _Check = ("an object", _is_object)
_OBJECT_OR_NULL: _Check = ("an object or null", lambda value: value is None or _is_object(value))
_TEXT_OR_NULL: _Check = ("a string or null", lambda value: value is None or isinstance(value, str))
_HOLDS: _Check = (f"one of {', '.join(HOLDS)}", lambda value: isinstance(value, str) and value in HOLDS)
# NaN and infinity are written as strings.
_NUMBER_OR_NULL: _Check = (
    "a number or null",
    lambda value: value is None or value in ("nan", "inf", "-inf") or isinstance(value, int | float),
)

# Fields by dotted name. Required in every manifest:
_REQUIRED: dict[str, _Check] = {"step": _COUNT, "files": _OBJECT, "state": _OBJECT, "options": _OBJECT}
# Also required in a checkpoint written by a run:
_REQUIRED_OF_RUNS: dict[str, _Check] = {"state.train_state": _OBJECT, "state.train_state.step": _COUNT}
# Also required to resume from a checkpoint:
_REQUIRED_TO_RESUME: dict[str, _Check] = {
    "state.lr_scheduler": _OBJECT,
    "state.lr_scheduler.last_epoch": _COUNT,
    "state.data_loader": _OBJECT,
}
_OPTIONAL: dict[str, _Check] = {
    "holds": _HOLDS,
    "job_id": _TEXT_OR_NULL,
    "created": _NUMBER_OR_NULL,
    "world_size": _COUNT,
    "model": _OBJECT_OR_NULL,
    "tokenizer": _OBJECT_OR_NULL,
    "job": _OBJECT_OR_NULL,
    "job.parallelism": _OBJECT,
    "job.training": _OBJECT,
    "job.training.steps": _COUNT,
    "options.load_step": _INTEGER,
    "state.train_state.tokens": _COUNT,
    "state.train_state.skipped_steps": _COUNT,
    "state.train_state.loss": _NUMBER_OR_NULL,
    "state.train_state.validation_loss": _NUMBER_OR_NULL,
}


def encode_manifest(manifest: dict[str, Any]) -> bytes:
    """Encode a manifest as JSON and add its checksum."""
    # Round-trip through JSON first: the reader computes the checksum from the decoded values.
    body = json.loads(dumps({"format": FORMAT, **manifest}))
    return json.dumps({**body, "checksum": _checksum(body)}, indent=1).encode() + b"\n"


def decode_manifest(content: bytes) -> dict[str, Any]:
    """Decode and check a manifest.

    Raises:
        UnknownFormat: another version of the harness wrote it.
        ValueError: it is damaged, or a required field is missing.
    """
    manifest = parse_object(content)
    if manifest.pop("checksum", None) != _checksum(manifest):
        raise ValueError("it does not have the checksum it was written with")
    _require(manifest, {"format": _COUNT})
    version = manifest["format"]
    if version != FORMAT:
        raise UnknownFormat(f"it has format {version}, and this version reads {FORMAT}")
    _require(manifest, _REQUIRED)
    _check(manifest, _OPTIONAL)
    full = manifest.get("holds", "full") == "full"
    if full or manifest.get("job_id") is not None:
        _require(manifest, _REQUIRED_OF_RUNS)
    if full:
        _require(manifest, _REQUIRED_TO_RESUME)
        _check_position(manifest["state"]["data_loader"])
    _check_files(manifest["files"])
    if manifest.get("holds") != "hf" and METADATA not in manifest["files"]:
        raise ValueError(f"files: {METADATA} is missing")
    return manifest


def _checksum(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def _require(manifest: dict[str, Any], fields: dict[str, _Check]) -> None:
    for name in fields:
        if _find(manifest, name) is _MISSING:
            raise ValueError(f"{name} is missing")
    _check(manifest, fields)


def _check(manifest: dict[str, Any], fields: dict[str, _Check]) -> None:
    for name, (expected, holds) in fields.items():
        value = _find(manifest, name)
        if value is not _MISSING and not holds(value):
            raise ValueError(f"{name} is not {expected}")


def _find(manifest: dict[str, Any], name: str) -> Any:
    value: Any = manifest
    for key in name.split("."):
        if not isinstance(value, dict) or key not in value:
            return _MISSING
        value = value[key]
    return value


def _check_position(position: dict[str, Any]) -> None:
    """Check the data position: a number of samples, or the position of a stream per batch row."""
    if "mixture" in position:
        _require(position, {"samples": _COUNT, "mixture.counts": _OBJECT, "mixture.block": _OBJECT})
    if "slots" not in position:
        _require(position, {"samples": _COUNT})
        _check(position, {"tokens": _COUNT})
        return
    _require(position, {"step": _COUNT, "global_batch_size": _COUNT, "slots": _OBJECT})
    for slot in position["slots"].values():
        if not _is_object(slot):
            raise ValueError("state.data_loader.slots has an entry that is not an object")
        # Null: the beginning of a part of the dataset.
        _require(slot, {"document": _OBJECT_OR_NULL, "offset": _COUNT})
        _check(slot, dict.fromkeys(("shards", "part", "example", "block", "index"), _COUNT))


def _check_files(files: dict[str, Any]) -> None:
    for name, facts in files.items():
        if not _is_object(facts) or not _is_count(facts.get("size")):
            raise ValueError(f"files: {name} has no size")
        if not isinstance(facts.get(CHECKSUM), str):
            raise ValueError(f"files: {name} has no checksum")
