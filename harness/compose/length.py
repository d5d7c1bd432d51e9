"""The length of a run, which is given in one of several ways."""

from __future__ import annotations

from collections.abc import Iterable

from harness.compose.override import Override, last_text

LENGTHS = {
    "training.steps": "steps",
    "training.tokens": "tokens",
    "scale.tokens_per_parameter": "scale",
    "scale.flops": "scale",
}
"""Fields that give the length of a run. Only those of one kind can be combined."""


def other_lengths(overrides: Iterable[Override]) -> list[str]:
    """Return the lengths of files that a typed one takes the place of; none if several kinds are typed."""
    overrides = list(overrides)
    given = {LENGTHS[name] for name in LENGTHS if last_text(overrides, name) not in (None, "null")}
    return [name for name in LENGTHS if LENGTHS[name] not in given] if len(given) == 1 else []
