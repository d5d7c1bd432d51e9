"""Encode values as strict JSON, and read JSON of any origin.

JSON has no NaN and no infinity, and other parsers reject what Python writes for them. They are
written as the strings "nan", "inf" and "-inf", and read back as floats: a diverged loss must
neither become null nor make the file unreadable.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from harness.util.errors import UserError
from harness.util.files import require_regular

_MAX_DEPTH = 64
_TOO_DEEP = f"it is nested deeper than {_MAX_DEPTH} levels"
_JSON_NAMES: dict[type, str] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def dumps(value: Any, indent: int | None = None) -> str:
    """Encode ``value`` as strict JSON; paths become strings. TypeError for others, such as tensors."""
    return json.dumps(_encode(value), allow_nan=False, ensure_ascii=False, indent=indent)


def loads(text: str) -> Any:
    """Decode a value that ``dumps`` wrote, non-finite floats included."""
    return _decode(parse(text))


def parse(text: str | bytes, kind: type = object) -> Any:
    """Parse JSON of any origin, bytes as UTF-8 with or without a mark; non-finite floats stay strings.

    Raises:
        ValueError: it is not JSON or of another kind, or is nested too deeply.
    """
    try:
        value = json.loads(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if not isinstance(value, kind):
        raise ValueError(f"it holds {_JSON_NAMES[type(value)]}, not {_JSON_NAMES[kind]}")
    _check_depth(value)
    return value


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object; see ``parse``."""
    value: dict[str, Any] = parse(text, dict)
    return value


def read_object(path: Path, kind: type[UserError] = UserError) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: of the given kind; it is no regular file, cannot be read, or is damaged.
    """
    try:
        require_regular(path)
        return parse_object(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise kind(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise kind(f"{path}: damaged, cannot be read as JSON: {error}") from None


def _check_depth(value: Any) -> None:
    """Raise ValueError for nesting that would exceed the recursion limit, here or in pickle or json."""
    level: list[Any] = [[value]]
    for _ in range(_MAX_DEPTH + 1):
        level = [
            item
            for each in level
            for item in (each.values() if isinstance(each, dict) else each)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # nan, inf or -inf
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def _decode(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    return [_decode(item) for item in value] if isinstance(value, list) else value


def json_digest(content: Any) -> str:
    """SHA-256 of a value as JSON, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def flatten(nested: dict[str, Any]) -> dict[str, Any]:
    """Flatten ``{"a": {"b": 1}}`` to ``{"a.b": 1}``. Lists stay lists; empty dicts disappear."""
    flat: dict[str, Any] = {}
    for name, value in flat_items(nested):
        if name in flat:
            raise ValueError(f"two values are called {name}")
        flat[name] = value
    return flat


def flat_items(nested: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each leaf."""
    for key, value in nested.items():
        if isinstance(value, dict):
            yield from flat_items(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
