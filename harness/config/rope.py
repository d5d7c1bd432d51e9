"""Config of the rotary position embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.config.fields import numerics
from harness.util.errors import ConfigError

SCALINGS = ("none", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv:2104.09864)."""

    theta: float = numerics(10000.0, above=0)
    """Base of the geometric series of wavelengths."""
    interleaved: bool = numerics(False)
    """Whether elements (2i, 2i + 1) of a head are rotated as a pair; else (i, i + width / 2)."""
    scaling: str = numerics("none", choices=SCALINGS)
    """``none``; ``linear`` stretches all wavelengths (arXiv:2306.15595); ``llama3``, the frequency-dependent
    stretching of Llama 3.1; ``yarn`` (arXiv:2309.00071)."""
    factor: float = numerics(8.0, above=0)
    """Factor by which the longest wavelengths (``linear``: all) are stretched."""
    low_freq_factor: float = numerics(1.0, above=0)
    """``llama3``: wavelengths longer than original_max_position / this are fully stretched."""
    high_freq_factor: float = numerics(4.0, above=0)
    """``llama3``: wavelengths shorter than original_max_position / this are unchanged."""
    original_max_position: int = numerics(8192, above=0)
    """Context length, in tokens, that the model was first trained with."""
    beta_fast: float = numerics(32.0, above=0)
    """``yarn``: pairs that turn more often than this within the original context are unchanged."""
    beta_slow: float = numerics(1.0, above=0)
    """``yarn``: pairs that turn less often than this are fully stretched."""
    truncate: bool = numerics(True)
    """``yarn``: whether the ends of the ramp between them are rounded to integers."""
    mscale: float | None = numerics(None)
    """``yarn``: set with mscale_all_dim; the ratio of their temperatures scales the rotation."""
    mscale_all_dim: float | None = numerics(None)
    """``yarn``: temperature of the scores of latent attention (DeepSeek V2 and V3)."""

    def validate(self) -> None:
        """Raise ConfigError when no frequencies can be computed."""
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            least, most = getattr(self, low), getattr(self, high)
            if least > most or (least == most and low == "beta_slow"):
                raise ConfigError(
                    f"model.rope.{low}", least, f"must be below model.rope.{high}={most}", f"{most / 4}"
                )
        if (self.mscale is None) != (self.mscale_all_dim is None):
            rule = "belongs with model.rope.mscale_all_dim: both are set or neither is"
            raise ConfigError("model.rope.mscale", self.mscale, rule, f"{self.mscale_all_dim}")

    @property
    def rotation_scale(self) -> float:
        """Factor of rotated queries and keys: YaRN's temperature, equation 22."""
        if self.scaling != "yarn":
            return 1.0
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    @property
    def score_scale(self) -> float:
        """Extra factor of attention's scores, from mscale_all_dim."""
        if self.scaling != "yarn" or self.mscale_all_dim is None:
            return 1.0
        return self._temperature(self.mscale_all_dim) ** 2

    def _temperature(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0
