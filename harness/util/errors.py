"""The kinds of error, and their exit codes.

A mistake of the user is reported as one line, a bug of the harness as a traceback, and a failure of
the machine with its context. If several ranks fail, the controller reports the earliest error.
"""

import errno
from collections.abc import Iterable
from itertools import product
from math import gcd

EXIT_OK = 0
EXIT_BUG = 1
EXIT_USER = 2
EXIT_MACHINE = 3
EXIT_NON_FINITE = 4
EXIT_RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: "the user is invited to retry"
EXIT_INTERRUPTED = 130

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LONGEST_VALUE = 200
"""Characters of a value that a message shows."""
LONGEST_MESSAGE = 2000
"""Characters of a message that are shown."""
MOST_VALUES = 40
"""Values that a message lists after "would work"."""

EXTRAS = {
    "matplotlib": ".[report]",
    "scipy": ".[report]",
    "tensorboard": ".[tensorboard]",
    "optuna": ".[optuna]",
    "lm_eval": ".[eval]",
    "PIL": "./experiments/extensions/flux",
    "diffusers": "./experiments/extensions/flux",
    "transformers": ".[chat]",
}
"""Optional packages, and what pip installs each with: an extra, or a package of this repository."""

# Exit codes of a run that stopped on request: with its state saved, or without.
STOPPED = (EXIT_RESUMABLE, EXIT_INTERRUPTED)


class HarnessError(Exception):
    """Base of every error that the harness raises on purpose."""

    kind = "bug"
    exit_code = EXIT_BUG


class UserError(HarnessError):
    """The user's request cannot be carried out; the message is one line and names what would work."""

    kind = "user"
    exit_code = EXIT_USER


class ConfigError(UserError):
    """A field of the job has a value that breaks a rule.

    Attributes:
        field: the dotted name the user types, e.g. ``parallelism.tp``.
        value: the invalid value.
        rule: the rule, in words.
        works: values that would work, or a phrase; may be empty.
    """

    def __init__(
        self, field: str, value: object, rule: str, works: Iterable[object] | str = ()
    ) -> None:
        self.field = field
        self.value = value
        self.rule = rule
        self.works = works if isinstance(works, str) else _listed(works)
        would_work = f"; would work: {self.works}" if self.works else ""
        shown = as_typed(value)
        if len(shown) > LONGEST_VALUE:
            shown = f"{shown[:LONGEST_VALUE]}... ({len(shown)} characters)"
        super().__init__(f"{one_line(field)}={one_line(shown)}: {rule}{would_work}")


def missing_package(error: BaseException) -> UserError | None:
    """The user's error for an optional package that could not be imported; None for any other error."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    name = (error.name or "").split(".")[0]
    if name not in EXTRAS:
        return None
    return UserError(
        f"the package {name} is not installed; would work: pip install -e '{EXTRAS[name]}'"
    )


class CapacityError(ConfigError):
    """A pass has more rows for a rank of experts than ``parallelism.ep_capacity`` has room for."""


class MissingPackageError(ConfigError):
    """No installed package adds the name that a job uses, or the file that has it is not as it was."""


class DataError(UserError):
    """The data or the tokenizer cannot be used: missing, empty, unreadable, or of the wrong size."""


class MachineError(HarnessError):
    """The machine failed: out of memory, a collective that timed out, a lost rank."""

    kind = "machine"
    exit_code = EXIT_MACHINE


class NonFiniteError(HarnessError):
    """The loss or a gradient is not finite; the evidence is in the run folder."""

    kind = "non_finite"
    exit_code = EXIT_NON_FINITE


class LostGradientError(HarnessError):
    """Trained parameters have no gradient: training would continue with wrong numbers."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(f"backward gave no gradient to {', '.join(names)}")


def one_line(message: str) -> str:
    """Escape line breaks and other control characters; of a long message keep both ends."""
    if len(message) > LONGEST_MESSAGE:
        message = f"{message[: LONGEST_MESSAGE // 2]} ... {message[-LONGEST_MESSAGE // 2 :]}"
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in message)


def as_typed(value: object) -> str:
    """Format a value as typed on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    # An empty string inside of a list or mapping is shown with its quotes.
    if isinstance(value, list | tuple):
        return f"[{','.join(as_typed(each) or repr(each) for each in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{as_typed(each) or repr(each)}' for key, each in value.items())}}}"
    return str(value)


def _listed(works: Iterable[object]) -> str:
    """Join values with commas; of very many, the first ones and the last."""
    words = [str(each) for each in works]
    if len(words) > MOST_VALUES:
        words = [*words[: MOST_VALUES - 1], "...", words[-1]]
    return ", ".join(words)


def divisors(*numbers: int) -> list[int]:
    """All positive integers that divide every one of ``numbers``, ascending.

    Trial division stops at 100,000: if a number has two larger prime factors, some divisors are
    missing.
    """
    if min(numbers) < 1:
        return []
    rest = gcd(*numbers)
    found = [1]
    for factor in range(2, 100_001):
        if factor * factor > rest:
            break
        powers = [1]
        while rest % factor == 0:
            rest //= factor
            powers.append(powers[-1] * factor)
        found = [divisor * power for divisor, power in product(found, powers)]
    # What is left is 1, a prime, or a product of primes above the limit.
    return sorted({*found, *(divisor * rest for divisor in found)})
