"""The manifest of a folder in shards. It is written last, so a folder that has one is complete."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from harness.util.encoding import parse_object
from harness.util.errors import DataError
from harness.util.files import write_atomically

MANIFEST = "manifest.json"
FORMAT_VERSION = 1


def load_manifest(folder: Path, verb: str, noun: str) -> dict[str, Any]:
    """Read the manifest of a folder.

    Args:
        folder: the folder.
        verb: the verb that writes such folders.
        noun: their name, for messages.

    Raises:
        DataError: there is none, it is not JSON, or a later version wrote it.
    """
    path = folder / MANIFEST
    try:
        found = parse_object(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        rule = f"is not a complete {noun} of harness {verb}: it has no {MANIFEST}"
        raise DataError(f"{folder} {rule}; would work: harness {verb} {verb}.target={folder}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from None
    version = found.get("version")
    if version != FORMAT_VERSION:
        raise DataError(f"{path} has format version {version!r}; this harness reads version {FORMAT_VERSION}")
    return found


def write_manifest(folder: Path, manifest: Any) -> None:
    """Write the manifest, a dataclass, of a folder.

    Raises:
        OSError: the folder is full or not writable.
    """
    text = json.dumps(dataclasses.asdict(manifest), indent=1, ensure_ascii=False)
    write_atomically(folder / MANIFEST, f"{text}\n".encode())
