"""Damages every file of a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "last bit flipped": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "zeros": lambda content: bytes(len(content)),
    "cut short": lambda content: content[:-2],
    "emptied": lambda content: b"",
    "removed": lambda content: None,
}


def all_damages(folder: Path) -> list[tuple[str, str]]:
    """Every file, by its path in the folder, with every damage that changes it."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return [
        (str(file.relative_to(folder)), name)
        for file in files
        for name in DAMAGES
        if name == "removed" or file.stat().st_size
    ]


def damage(file: Path, name: str) -> None:
    changed = DAMAGES[name](file.read_bytes())
    if changed is None:
        file.unlink()
    else:
        file.write_bytes(changed)
