"""``manifest.json``: what a checkpoint says of itself, with a checksum over itself. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import xxhash

from harness.metrics.encoding import dumps, parse_object

MANIFEST = "manifest.json"
METADATA = ".metadata"
FORMAT = 1
# Of a file's facts here, and of an entry's storage info in DCP's metadata, where other readers ignore it.
CHECKSUM = "xxh3_128"
HOLDS = ("full", "model", "hf")

_Check = tuple[str, Callable[[Any], bool]]
_MISSING = object()


class UnknownFormat(ValueError):
    """Another version of the harness wrote the manifest, in a format that this one does not read."""


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

# By dotted name. What no version has left out:
_REQUIRED: dict[str, _Check] = {"step": _COUNT, "files": _OBJECT, "state": _OBJECT, "options": _OBJECT}
# What a checkpoint that a run wrote has besides, and one that a run can resume from:
_OF_A_RUN: dict[str, _Check] = {"state.train_state": _OBJECT, "state.train_state.step": _COUNT}
_TO_RESUME: dict[str, _Check] = {
    "state.lr_scheduler": _OBJECT,
    "state.lr_scheduler.last_epoch": _COUNT,
    "state.data_loader": _OBJECT,
}
# What may be missing:
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
    """The manifest as it is written: JSON with a checksum over itself."""
    # Through JSON once: what is checked later is what JSON makes of it.
    body = json.loads(dumps({"format": FORMAT, **manifest}))
    return json.dumps({**body, "checksum": _checksum(body)}, indent=1).encode() + b"\n"


def decode_manifest(content: bytes) -> dict[str, Any]:
    """The manifest that ``content`` holds.

    Raises:
        ValueError: it is not what was written, or lacks what every version has written.
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
        _require(manifest, _OF_A_RUN)
    if full:
        _require(manifest, _TO_RESUME)
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
    """Checks the position of the data: of numbered samples, or of a stream for each row."""
    if "slots" not in position:
        _require(position, {"samples": _COUNT})
        return
    _require(position, {"step": _COUNT, "global_batch_size": _COUNT, "slots": _OBJECT})
    for slot in position["slots"].values():
        if not _is_object(slot):
            raise ValueError("state.data_loader.slots has an entry that is not an object")
        _require(slot, {"document": _OBJECT, "offset": _COUNT})


def _check_files(files: dict[str, Any]) -> None:
    for name, facts in files.items():
        if not _is_object(facts) or not _is_count(facts.get("size")):
            raise ValueError(f"files: {name} has no size")
        if not isinstance(facts.get(CHECKSUM), str):
            raise ValueError(f"files: {name} has no checksum")
