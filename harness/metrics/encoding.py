"""Values as strict JSON has them.

JSON knows no NaN and no infinity, and Python writes them as words that other parsers refuse. They become the
strings "nan", "inf" and "-inf", and floats again when read: a diverged loss must neither vanish as null nor
make the file unreadable.
"""

from __future__ import annotations

import json
import math
from pathlib import PurePath
from typing import Any

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def dumps(value: Any, indent: int | None = None) -> str:
    """``value`` as strict JSON; paths become strings.

    Raises:
        TypeError: something in ``value`` has no form in JSON, e.g. a tensor.
    """
    return json.dumps(_encode(value), allow_nan=False, ensure_ascii=False, indent=indent)


def loads(text: str) -> Any:
    """The value that ``dumps`` wrote, non-finite floats included.

    Raises:
        ValueError: ``text`` is not JSON.
    """
    return _decode(json.loads(text))


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
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
