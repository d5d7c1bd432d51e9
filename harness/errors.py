"""The three kinds of error, and the exit code each one ends a process with.

A mistake of the user is one clear line; a fault of ours is a traceback; a fault of the machine
carries its context. Whatever a rank dies of, the controller reports the earliest one.
"""

from __future__ import annotations

from collections.abc import Iterable

EXIT_OK = 0
EXIT_BUG = 1
EXIT_USER = 2
EXIT_MACHINE = 3
EXIT_NON_FINITE = 4
EXIT_RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: "the user is invited to retry"
EXIT_INTERRUPTED = 130

# Codes of a run that was asked to stop and did: after saving its state, or without.
STOPPED = (EXIT_RESUMABLE, EXIT_INTERRUPTED)


class HarnessError(Exception):
    """Base of every error that the harness raises knowingly."""

    kind = "bug"
    exit_code = EXIT_BUG


class UserError(HarnessError):
    """Something the user asked for cannot be done; the message is one line and says what would work."""

    kind = "user"
    exit_code = EXIT_USER


class ConfigError(UserError):
    """A field of the job has a value that a rule forbids.

    Attributes:
        field: the dotted name the user types, e.g. ``parallelism.tp``.
        value: the offending value.
        rule: what must hold, in words.
        works: values that would work (or a phrase saying so); may be empty.
    """

    def __init__(self, field: str, value: object, rule: str, works: Iterable[object] | str = ()) -> None:
        self.field, self.value, self.rule = field, value, rule
        self.works = works if isinstance(works, str) else ", ".join(str(w) for w in works)
        would_work = f"; would work: {self.works}" if self.works else ""
        super().__init__(f"{field}={_typed(value)}: {rule}{would_work}")


class DataError(UserError):
    """The data or the tokenizer cannot be used: missing, empty, unreadable, or of the wrong size."""


class MachineError(HarnessError):
    """The machine failed: out of memory, a collective that timed out, a lost rank."""

    kind = "machine"
    exit_code = EXIT_MACHINE


class NonFiniteError(HarnessError):
    """The loss or a gradient is not finite; the evidence lies in the run folder."""

    kind = "non_finite"
    exit_code = EXIT_NON_FINITE


def _typed(value: object) -> str:
    """The value as the user would type it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def divisors(*numbers: int) -> list[int]:
    """All positive integers that divide every one of ``numbers``, ascending."""
    smallest = min(numbers)
    return [d for d in range(1, smallest + 1) if all(n % d == 0 for n in numbers)]
