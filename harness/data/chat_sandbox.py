"""The sandbox of chat templates, with the functions that transformers gives them.

Transcribed from ``_cached_compile_jinja_template`` of transformers 5.23, utils/chat_template_utils.py. But
``{% generation %}`` puts marks around its text, where transformers counts characters while rendering.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from harness.util.errors import DataError

# Unicode's noncharacters, which no text may contain.
MARKS = "\ufdd0\ufdd1"
BEGIN, END = MARKS[0], MARKS[1]


@lru_cache(maxsize=16)
def compile_template(text: str, date: str | None) -> jinja2.Template:
    """Compile a template; ``strftime_now`` formats ``date`` (YYYY-MM-DD).

    Raises:
        jinja2.TemplateError: it is not a template.
    """

    def strftime_now(format: str) -> str:
        if date is None:
            rule = "the chat template asks for today's date, so the samples would differ from day to day"
            raise DataError(f"{rule}; would work: data.chat_date=2026-01-31")
        return datetime.date.fromisoformat(date).strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(text)


def split_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Remove the marks of generation blocks; return the text, and the range of each block."""
    parts, ranges, begin, length = [], [], 0, 0
    for part in re.split(f"([{BEGIN}{END}])", marked):
        if part == BEGIN:
            begin = length
        elif part == END:
            ranges.append((begin, length))
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), ranges


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``: marks the text that the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore, which could leave the sandbox."""

    def __init__(*args: Any, **values: Any) -> None:  # a template may name a value ``self``
        self, *positional = args
        attributes = dict(*positional, **values)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot store {name!r}")


class _Dict:
    """``dict`` without its other attributes."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own ``tojson`` escapes the characters of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
