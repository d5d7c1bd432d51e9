"""Numbers and names as words: times, sizes, rates and amounts in tables, names that are like a typed one."""

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

MISSING = "–"
GIB = 2**30
MOST_NAMES = 8
"""Names that a message lists."""
MOST_SIMILAR = 3
"""Names that a message suggests, or shows of more than it lists."""


def seconds(value: float | None) -> str:
    """Format a time with three digits; empty if unknown, ``-`` if zero."""
    if value is None:
        return ""
    if value == 0:
        return "-"
    unit = "us"
    size = 1e-6
    # A value that would round to 1000 of a unit is shown as 1 of the next.
    if value >= 0.9995:
        unit = "s"
        size = 1.0
    elif value >= 0.9995 * 1e-3:
        unit = "ms"
        size = 1e-3
    amount = value / size
    digits = 2
    if amount >= 99.95:
        digits = 0
    elif amount >= 9.995:
        digits = 1
    return f"{amount:,.{digits}f} {unit}"


def counted(value: float) -> str:
    """Format a count: ``405.9 B``, ``999``."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:,.0f}"


def plural(count: int, noun: str) -> str:
    """Format a number of things: ``1 row``, ``2 rows``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def gib(value: float) -> str:
    """Format bytes in GiB with two decimals; zero is ``-``."""
    if value == 0:
        return "-"
    if abs(value) >= 0.005 * GIB:
        return f"{value / GIB:,.2f}"
    return f"{value / GIB:.1g}"


def figure(value: float) -> str:
    """Format a rate or an amount: an integer from 100 on, three digits below."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def dollars(value: float) -> str:
    """Format a price: ``$1,048``; with cents below 100."""
    return f"${value:,.0f}" if value >= 99.995 else f"${value:.2f}"


def summed(values: Iterable[float | None]) -> float | None:
    """Add up values; None if one is unknown."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def shortened(text: str, length: int) -> str:
    """Cut a text to ``length`` characters; the last one shows that it was cut."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def formatted(value: Any, form: str | Callable[[Any], str] = "", missing: str = MISSING) -> str:
    """Format a value for a cell; ``form`` is a format spec, or a function of the value."""
    if value is None or value == "":
        return missing
    if callable(form):
        return form(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format(value, form) if form and isinstance(value, int | float) else str(value)


def words_of(name: str) -> tuple[str, ...]:
    """The words and numbers of a name, sorted and in lower case: the same for tp_fsdp and FSDP-TP."""
    return tuple(sorted(re.findall(r"[a-z]+|\d+", name.lower())))


def meant(typed: str, names: Iterable[str], *, inside: bool = False) -> list[str]:
    """Return the names that are probably meant: of the same words, or else spelled almost like it.

    Args:
        typed: the wrong name.
        names: the right ones.
        inside: whether a name with the typed one inside is meant rather than one spelled like it.
    """
    names = list(names)
    found = [name for name in names if words_of(name) == words_of(typed)]
    if inside and typed and not found:
        found = [name for name in names if typed.lower() in name.lower()][:MOST_SIMILAR]
    return found or _spelled_like(typed, names, 1, 0.7)


def listed(typed: str, names: Iterable[str], where: str) -> str:
    """List all names, or of many those that are spelled most like the typed one, and ``where`` all are."""
    names = sorted(names)
    if len(names) <= MOST_NAMES:
        return ", ".join(names) or "none"
    nearest = _spelled_like(typed, names, MOST_SIMILAR, 0.4)
    if not nearest:
        return f"{len(names)} names that {where} lists"
    return f"{', '.join(nearest)}, and others; {where} lists all {len(names)}"


def _spelled_like(typed: str, names: Iterable[str], most: int, cutoff: float) -> list[str]:
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(typed.lower(), by_lower, most, cutoff)
    return [by_lower[each] for each in close]
