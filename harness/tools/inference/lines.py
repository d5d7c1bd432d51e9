"""Lines of text and JSON files that users write: prompts and questions. Imports no torch."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

from harness.util.encoding import parse
from harness.util.errors import UserError

STDIN = "-"
LONGEST_LINE = 4_000_000
"""Characters of a line, about a million tokens; a tokenizer takes a hundred bytes for each."""


def numbered_lines(name: str, file: str, works: str) -> list[tuple[str, str]]:
    """Return the lines that are not blank, each after its place for messages, ``<name>, line <i>``.

    Args:
        name: name of the input, for messages.
        file: its path, or ``-`` for standard input.
        works: a valid input, for messages.

    Raises:
        UserError: the input cannot be read, is not UTF-8, has no such line, or one is too long.
    """
    lines = []
    try:
        with nullcontext(sys.stdin) if file == STDIN else open(file, encoding="utf-8") as opened:
            # Not splitlines(), which also splits at separators that JSON allows inside of a text.
            for i, line in enumerate(iter(partial(opened.readline, LONGEST_LINE + 1), ""), start=1):
                if len(line) > LONGEST_LINE:
                    rule = f"has more than {LONGEST_LINE} characters"
                    raise UserError(f"{name}, line {i}: {rule}; would work: {works}")
                line.encode("utf-8")  # standard input has surrogates for bytes that are not UTF-8
                if line.strip():
                    lines.append((f"{name}, line {i}", line.removesuffix("\n")))
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}") from error
    except UnicodeError as error:
        raise UserError(f"{name}: is not UTF-8 text") from error
    if not lines:
        raise UserError(f"{name}: is empty; would work: {works}")
    return lines


def parse_json(line: str, where: str) -> Any:
    """Parse a line.

    Raises:
        UserError: it is not JSON, or has text that is not Unicode.
    """
    try:
        row = parse(line)
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: has half a surrogate pair, which no tokenizer can read") from error
    except ValueError as error:
        raise UserError(f"{where}: is not JSON: {error}") from error
    return row
