"""Numbers as words: times, sizes, rates and amounts, as tables and sentences show them."""

from collections.abc import Callable, Iterable
from typing import Any

MISSING = "–"
NOT_MEASURED = "not measured"
GIB = 2**30


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
    if value >= 0.005 * GIB:
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
