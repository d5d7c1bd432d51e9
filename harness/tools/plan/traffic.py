"""A collective, and a pass: what ranks compute and send."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness.tools.plan.machine import Group


@dataclass(frozen=True)
class Collective:
    """One collective of a pass."""

    axis: str
    collective: str
    group: Group
    bytes: float
    """Of the full tensor, as ``Machine.collective_seconds`` expects."""
    seconds: float
    exposed: float
    """Seconds that no computation hides."""


@dataclass(frozen=True)
class Pass:
    """A forward, or a part of a backward, of one microbatch."""

    compute: float = 0.0
    collectives: tuple[Collective, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of computation and of exposed collectives."""
        return self.compute + sum(each.exposed for each in self.collectives)

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.compute + other.compute, self.collectives + other.collectives)

    def times(self, factor: float) -> Pass:
        """The pass, scaled by ``factor``."""
        scaled = (
            Collective(
                m.axis, m.collective, m.group, m.bytes * factor, m.seconds * factor, m.exposed * factor
            )
            for m in self.collectives
        )
        return Pass(self.compute * factor, tuple(scaled))


def added(passes: Iterable[Pass]) -> Pass:
    """The sum of the passes, run one after the other."""
    return sum(passes, Pass())
