"""One override, parsed once: its sign, key and value, and its text in Hydra's grammar."""

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
# A quoted text, or what stands alone: an element of a list, sweep or function, or one of a mapping,
# which follows its key.
_QUOTED = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\""
_ALONE = r"(?P<text>[^\[\]{}(),'\"]+)(?=[,\])}]|$)"
_OF_LIST = re.compile(rf"{_QUOTED}|(?P<before>^|[\[,(]){_ALONE}")
_OF_MAPPING = re.compile(rf"{_QUOTED}|(?P<before>[{{,]\s*[\w.-]+\s*:|[\[,(]){_ALONE}")
# A number or switch that Hydra would write in another way: 12.10 as 12.1, true as True. Not
# integers.
_NUMBER = re.compile(r"(?!(0|-?[1-9]\d*)$)[+-]?([\d.][\w.+-]*|(?i:true|false|nan|inf))")


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

        They are around options and texts that look like numbers (debug=nan), around texts that are
        not ASCII, also as elements of lists and mappings, and around the complete value of a
        ``verbatim`` field.
        """
        value = self.value
        if value is None:
            return self.source
        field = schema.__dataclass_fields__.get(self.key)  # type: ignore[attr-defined]
        if field is not None and field.metadata.get("verbatim"):
            # Null, or a text in Hydra's quotes: a quote inside has a backslash before it.
            if value != "null" and not re.fullmatch(_QUOTED, value, re.DOTALL):
                value = quoted(value.replace("${", "\\${"))
        elif "${" not in value:
            is_text = self.key in config_folders().groups or _has_texts(self.key, schema)
            # Functions other than choice() have arguments that are no texts: range(1.5,3).
            takes_texts = is_text and ("(" not in value or value.startswith("choice("))

            def with_quotes(match: re.Match[str]) -> str:
                text = (match["text"] or "").strip()
                if text.isascii() and not (takes_texts and _NUMBER.fullmatch(text)):
                    return match[0]
                return f"{match['before']}'{text}'"

            element = _OF_MAPPING if "{" in value else _OF_LIST
            value = element.sub(with_quotes, value)
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


@functools.cache
def _has_texts(key: str, schema: type) -> bool:
    """Whether a field is a text, or a list or mapping of texts."""
    hint: Any = schema
    for name in key.split("."):
        if dataclasses.is_dataclass(hint):
            hint = without_null(type_hints(hint).get(name))  # type: ignore[arg-type]
        else:  # of a mapping
            hint = (get_args(hint) or (None,))[-1]
    while get_origin(hint) in (dict, list):
        hint = get_args(hint)[-1]
    return hint is str
