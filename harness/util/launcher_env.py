"""Read the environment variables that torchrun or another launcher sets. Imports no torch."""

from __future__ import annotations

import os

from harness.util.errors import LONGEST_VALUE, UserError

LONGEST_NUMBER = 9
"""Maximum digits of a number that a launcher sets."""


def launched_ranks() -> int | None:
    """Return the number of ranks if torchrun (or another launcher) started this process, else None.

    Raises:
        UserError: the launcher's variables are incomplete or have impossible values.
    """
    if "RANK" not in os.environ:
        return None
    size = _launcher_number("WORLD_SIZE", 1)
    _launcher_number("RANK", 0, size)
    if size > 1:
        _launcher_number("MASTER_PORT", 1, 65536)
        if not os.environ.get("MASTER_ADDR"):
            raise _launcher_error("MASTER_ADDR", "is missing")
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if name in os.environ:
            _launcher_number(name, 0)
    return size


def _launcher_number(name: str, least: int, below: int | None = None) -> int:
    """Read a number that a launcher must set.

    Raises:
        UserError: the variable is missing, not a number, or out of range.
    """
    value = os.environ.get(name)
    if value is None:
        raise _launcher_error(name, "is missing")
    # Python refuses to parse very long numbers.
    number = int(value) if value.isdecimal() and len(value) <= LONGEST_NUMBER else -1
    if number < least or (below is not None and number >= below):
        end = "" if below is None else f" and less than {below}"
        shown = value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE]}..."
        raise _launcher_error(f"{name}={shown}", f"must be a whole number of at least {least}{end}")
    return number


def _launcher_error(name: str, rule: str) -> UserError:
    return UserError(
        f"{name}: {rule}; RANK={os.environ['RANK']} means that a launcher started this process; would work: "
        "torchrun, or unset RANK"
    )
