"""A schedule: the learning rate decays as (1 - x)^exponent."""

from dataclasses import dataclass

from harness.config.fields import numerics
from harness.config.optimizer import Decay


@dataclass(frozen=True)
class PowerOptions:
    """Fields of ``schedule.options``."""

    exponent: float = numerics(2.0, above=0)
    """1 is a linear decay."""


POWER = Decay(lambda progress, options: (1 - progress) ** options.exponent, options=PowerOptions)
