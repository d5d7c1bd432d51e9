"""Config of multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.fields import numerics
from harness.util.errors import ConfigError

DEPTHS = (0, 1)


@dataclass(frozen=True)
class MTPConfig:
    """Multi-token prediction as in DeepSeek V3 (arXiv:2412.19437, section 2.2).

    One more block is trained to predict the token after the next one. The decoder's own output does not
    change; the logged loss and validation's are the decoder's.
    """

    depth: int = numerics(0, choices=DEPTHS)
    """Tokens to predict beyond the next one: 0 or 1."""
    loss_weight: float = numerics(0.3)
    """Weight of its loss (lambda in the paper: 0.3 for the first 10T tokens, then 0.1). The loss is a sum
    over its tokens divided by the token count of the next-token loss, which is slightly larger."""

    def validate(self) -> None:
        """Raise ConfigError for a weight that is not positive."""
        if self.depth and not self.loss_weight > 0:
            works = "0.3, or model.mtp.depth=0"
            raise ConfigError("model.mtp.loss_weight", self.loss_weight, "must be positive", works)
