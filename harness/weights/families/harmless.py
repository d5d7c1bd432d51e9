"""Fields of config.json that do not change what a decoder computes (no torch): the table in harmless.txt."""

import json
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path


def is_harmless(name: str, value: object) -> bool:
    """Whether a field of config.json that no family reads changes nothing, with this value."""
    for pattern, only in _table().items():
        if fnmatchcase(name, pattern):
            return only is None or value is None or value == json.loads(only)
    return not value


def is_listed(name: str) -> bool:
    """Whether a field of config.json is harmless with any value."""
    return any(fnmatchcase(name, pattern) for pattern, only in _table().items() if only is None)


@cache
def _table() -> dict[str, str | None]:
    """Patterns of names, each with its only harmless value as JSON; None: any value."""
    table: dict[str, str | None] = {}
    for line in Path(__file__).with_name("harmless.txt").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(" ")
        if name != "#":
            table[name] = value or None
    return table
