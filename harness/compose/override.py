"""One override, parsed once: its sign, key and value, and its text in Hydra's grammar."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from harness.compose.paths import config_folders
from harness.config.types import type_hints, without_null

SETTING = "hydra.searchpath"

_OVERRIDE = re.compile(
    r"(?P<sign>\+\+|\+|~)?(?P<key>[A-Za-z_][\w./@:-]*)(?:=(?P<value>.*))?", re.DOTALL
)
_NAMES_OF_NUMBERS = re.compile(r"\s*(nan|inf)\s*", re.IGNORECASE)
QUOTED = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\""
# A quoted text, or an unquoted element of a list, mapping or sweep with characters that are not
# ASCII.
_NON_ASCII = re.compile(
    QUOTED + r"|(?<![^,\[:{])[^\s,\[\]{}()'\":=$\\]*[^\x00-\x7f][^,\[\]{}()'\":=$\\]*(?![^,\]}])"
)
# A number or switch that Hydra would write in another way: 12.10 as 12.1, true as True. Not
# integers.
_NUMBER_ALONE = (
    r"\s*(?!(?:0|-?[1-9]\d*)\s*(?:$|[,\])}]))"
    r"(?P<number>[+-]?(?:[\d.][\w.+-]*|(?i:true|false|nan|inf)))"
    r"\s*(?![^,\])}])"
)
# It is an element of a list or sweep, or one of a mapping, which follows its key.
_OF_LIST = re.compile(QUOTED + r"|(?P<key>(?<![^,\[(]))" + _NUMBER_ALONE)
_OF_MAPPING = re.compile(QUOTED + r"|(?P<key>(?<![^,{])\s*[\w.-]+\s*:)" + _NUMBER_ALONE)


@dataclass(frozen=True)
class Override:
    """An override of a command line, of a point of a sweep, or of an axis in a file.

    Attributes:
        sign: ``+``, ``++``, ``~``, or empty.
        key: a field, or a group, perhaps with ``@PLACE``; empty if the text is no override.
        value: the text after ``=``; None without one.
        source: the complete text, as typed.
    """

    sign: str
    key: str
    value: str | None
    source: str

    @property
    def sets_search_path(self) -> bool:
        return self.key == SETTING

    @property
    def text(self) -> str | None:
        """The value without quotes around it."""
        if self.value is None:
            return None
        text = self.value.strip()
        is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
        return text[1:-1] if is_quoted else text

    def for_hydra(self, schema: type) -> str:
        """Return the override with the quotes that Hydra's grammar needs.

        They are around options that look like numbers (debug=nan), around numbers in fields of
        texts, around characters that are not ASCII, and around the complete value of a ``verbatim``
        field.
        """
        value = self.value
        if value is None:
            return self.source
        if self.key in config_folders().groups:
            options = value.split(",")
            for index, option in enumerate(options):
                if _NAMES_OF_NUMBERS.fullmatch(option):
                    options[index] = f"'{option}'"
            value = ",".join(options)
        elif self.key in _verbatim_fields(schema):
            value = _verbatim(value)
        elif "${" not in value:
            if ("(" not in value or value.startswith("choice(")) and _has_texts(self.key, schema):
                element = _OF_MAPPING if "{" in value else _OF_LIST
                value = element.sub(_with_quoted_number, value)
            if not value.isascii():
                value = _NON_ASCII.sub(_with_quotes, value)
        return f"{self.sign}{self.key}={value}"


@functools.lru_cache(maxsize=10_000)
def parse(source: str) -> Override:
    match = _OVERRIDE.fullmatch(source)
    if match is None:
        return Override("", "", None, source)
    return Override(match["sign"] or "", match["key"], match["value"], source)


def last_text(overrides: Iterable[Override], key: str) -> str | None:
    """Return the last value given for a group or field, without quotes; None if there is none."""
    texts = [
        override.text
        for override in overrides
        if override.key == key and override.value is not None
    ]
    return texts[-1] if texts else None


def quoted(text: str) -> str:
    """Quote a text for Hydra, for which backslashes are special before a quote and at the end."""

    def escaped(match: re.Match[str]) -> str:
        backslashes = match[1]
        quote = match[2]
        return backslashes * 2 + ("\\'" if quote else "")

    return "'" + re.sub(r"(\\*)('|$)", escaped, text) + "'"


def _with_quotes(match: re.Match[str]) -> str:
    return match[0] if match[0][0] in "'\"" else f"'{match[0]}'"


def _with_quoted_number(match: re.Match[str]) -> str:
    return f"{match['key']}'{match['number']}'" if match["number"] else match[0]


def _verbatim(value: str) -> str:
    """Quote a text, unless it is null or has Hydra's quotes: a quote inside has a backslash before it."""
    if value == "null" or re.fullmatch(r"""'([^'\\]|\\.)*'|"([^"\\]|\\.)*\"""", value, re.DOTALL):
        return value
    return quoted(value.replace("${", "\\${"))


@functools.cache
def _verbatim_fields(schema: type) -> set[str]:
    return {field.name for field in dataclasses.fields(schema) if field.metadata.get("verbatim")}


@functools.cache
def _has_texts(key: str, schema: type) -> bool:
    """Whether a field is a text, or a list or mapping of texts."""
    hint: Any = schema
    for name in key.split("."):
        if dataclasses.is_dataclass(hint):
            hint = without_null(type_hints(hint).get(name))  # type: ignore[arg-type]
        else:  # of a list or mapping
            hint = (get_args(hint) or (None,))[-1]
    while get_origin(hint) in (dict, list):
        hint = get_args(hint)[-1]
    return hint is str
