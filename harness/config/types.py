"""Types of fields: which values fit, how others are converted, and both in words."""

import dataclasses
import functools
import re
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from harness.util.errors import as_typed

UNSET = "???"
"""The value of a field that must be given."""
_SWITCHES = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}


@functools.cache
def type_hints(cls: type) -> dict[str, Any]:
    """Types of a dataclass's fields, cached because they are slow to compute."""
    return get_type_hints(cls)


@functools.cache
def inner_classes(cls: type) -> dict[str, Any]:
    """The dataclass in each field's type: of the value, or of the values of a mapping; None without one."""
    found = {}
    for name, hint in type_hints(cls).items():
        kinds = [kind for kind in (hint, *get_args(hint)) if dataclasses.is_dataclass(kind)]
        found[name] = kinds[0] if kinds else None
    return found


def without_null(hint: Any) -> Any:
    """Return the type of an optional value; any other type as it is."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return kinds[0] if get_origin(hint) is UnionType and len(kinds) == 1 else hint


def fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    if hint in (bool, int, str):
        return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    kind = get_origin(hint)
    arguments = get_args(hint)
    if kind in (Union, UnionType):
        return any(fits(value, argument) for argument in arguments)
    if kind is list:
        return isinstance(value, list | tuple) and all(
            fits(element, arguments[0]) for element in value
        )
    if kind is dict:
        return isinstance(value, dict) and all(
            fits(element, arguments[1]) for element in value.values()
        )
    if dataclasses.is_dataclass(hint):
        return isinstance(value, dict | cast("type", hint))
    if hint is float:
        # JSON has no number for infinity; harness/util/encoding.py writes it as a string.
        hint = int | float | str if value in ("nan", "inf", "-inf") else int | float
    return isinstance(value, hint) and not isinstance(value, bool)


def is_special(value: Any) -> bool:
    """Whether a value is a text with references, or stands for one that must be given."""
    return isinstance(value, str) and ("${" in value or value == UNSET)


def with_types(value: Any, hint: Any) -> Any:
    """Convert values as OmegaConf does: in a field of numbers 1 is 1.0, and in one of texts "1".

    What has no such type is left to ``from_dict``. So are mappings of dataclasses and lists of
    mappings.
    """
    hint = without_null(hint)
    kind = get_origin(hint)
    arguments = get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        hints = type_hints(hint)  # type: ignore[arg-type]
        return {key: with_types(element, hints.get(key, Any)) for key, element in value.items()}
    if kind is dict and isinstance(value, dict) and not dataclasses.is_dataclass(arguments[1]):
        return {str(key): with_types(element, arguments[1]) for key, element in value.items()}
    if kind is list and isinstance(value, list) and get_origin(arguments[0]) is not dict:
        return [with_types(element, arguments[0]) for element in value]
    return value if value is None or is_special(value) else _as_scalar(value, hint)


def _as_scalar(value: Any, hint: Any) -> Any:
    try:
        if hint is str and isinstance(value, int | float):
            return str(value)
        if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
            return float(value)
        if hint is int and isinstance(value, str):
            return int(value)
        if hint is int and isinstance(value, float) and value.is_integer():
            return int(value)  # 1e3
        if hint is bool and isinstance(value, int | str):
            text = str(value).lower()
            return _SWITCHES[text] if text in _SWITCHES else int(text) != 0
    except (ValueError, OverflowError):
        pass  # from_dict or check_rules will refuse it
    return value


def sizes_of(text: object) -> list[int]:
    """Return the integers that a text such as 8k may mean: lengths are counted in 1024s, others in 1000s."""
    match = re.fullmatch(r"(\d+)[kK]", str(text))
    return [int(match[1]) * unit for unit in (1000, 1024)] if match else []


_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[int]: "a list of integers, like [1,2]",
    list[float]: "a list of numbers, like [0.5,2]",
    list[str]: "a list of texts, like [a,b]",
    dict[str, str]: "a mapping of names to text, like {a: b}",
}
_WORDS_OF_LISTS = {
    list: "a list of lists, like [[a,b],[c]]",
    dict: "a list of mappings, like [{a:1,b:2}]",
}
_INTERVALS = {"least": "[", "above": "(", "most": "]", "below": ")"}
_BOUNDS = {"least": "at least", "above": "above", "most": "at most", "below": "below", "also": "or"}


def type_in_words(hint: Any, key: str) -> str:
    """Say which values fit a field of this type and dotted name, such as "an integer, or null"."""
    kinds = get_args(hint) if get_origin(hint) is UnionType else [hint]
    words = " or ".join(_kind_in_words(kind, key) for kind in kinds if kind is not NoneType)
    return words + _or_null(hint)


def _kind_in_words(kind: Any, key: str) -> str:
    if kind in _WORDS:
        return _WORDS[kind]
    if dataclasses.is_dataclass(kind):
        return f"set by its fields, {', '.join(f'{key}.{field.name}' for field in dataclasses.fields(kind))}"
    inner = get_args(kind)[-1:]
    if get_origin(kind) is list:
        return _WORDS_OF_LISTS.get(get_origin(inner[0]), "a list, like [a,b]")
    if inner and dataclasses.is_dataclass(inner[0]):
        return "a mapping of names to fields, like {a: {kind: b}}"
    return "a mapping, like {a: b}"


def rule_in_words(field: dataclasses.Field[Any]) -> str:
    """Say which values a field's rule allows, such as "at least 1"; empty without a rule."""
    rule = field.metadata
    if "choices" in rule:
        element = "each " if str(field.type).startswith("list") else ""
        words = f"{element}one of {', '.join(map(as_typed, rule['choices']))}"
    elif "written" in rule:
        words = f"a local {rule['written']}"
    elif rule.get("nonempty"):
        words = "non-empty"
    else:
        words = ", ".join(
            f"{words} {rule[name]}" for name, words in _BOUNDS.items() if name in rule
        )
        ends = [name for name in _INTERVALS if name in rule]
        if len(ends) == 2:
            low, high = ends
            words = f"in {_INTERVALS[low]}{rule[low]}, {rule[high]}{_INTERVALS[high]}"
    return words and words + _or_null(field.type)


def _or_null(hint: object) -> str:
    return ", or null" if str(hint).endswith("None") else ""
