"""Lines of text and JSON files that users write: prompts and questions. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from harness.errors import UserError


def numbered_lines(name: str, read: Callable[[], str], works: str) -> list[tuple[str, str]]:
    """Return the lines that are not blank, each after its place for messages, ``<name>, line <i>``.

    Args:
        name: name of the input, for messages.
        read: reads it.
        works: a valid input, for messages.

    Raises:
        UserError: the input cannot be read, is not UTF-8, or has no such line.
    """
    try:
        text = read()
        text.encode("utf-8")  # standard input has surrogates for bytes that are not UTF-8
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}") from error
    except UnicodeError as error:
        raise UserError(f"{name}: is not UTF-8 text") from error
    # Not splitlines(), which also splits at separators that JSON allows inside of a text.
    lines = [(f"{name}, line {i}", line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise UserError(f"{name}: is empty; would work: {works}")
    return lines


def parse_json(line: str, where: str) -> Any:
    """Parse a line.

    Raises:
        UserError: it is not JSON, or has text that is not Unicode.
    """
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: has half a surrogate pair, which no tokenizer can read") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not JSON") from error
    return row
