"""Which number formats a run computes and reduces in."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config import numerics
from harness.errors import ConfigError

DTYPES = ("float32", "bfloat16")


@dataclass
class PrecisionConfig:
    """Mixed precision: the master parameters and the optimizer state are always float32."""

    param_dtype: str = numerics("float32")
    """Format of parameters and activations in forward and backward: float32 or bfloat16."""
    reduce_dtype: str = numerics("float32")
    """Format of the gradients while they are reduced over data-parallel ranks: float32 or bfloat16."""

    def validate(self) -> None:
        """Raises ConfigError for a format that is not known."""
        for name in ("param_dtype", "reduce_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ConfigError(f"precision.{name}", getattr(self, name), "no such format", DTYPES)

    @property
    def is_mixed(self) -> bool:
        """Whether computing needs copies of the parameters in another format."""
        return self.param_dtype != "float32"
