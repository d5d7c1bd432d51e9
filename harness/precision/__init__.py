"""Number formats of parameters, activations and reductions."""

from harness.precision.config import PrecisionConfig

__all__ = ["PrecisionConfig"]
