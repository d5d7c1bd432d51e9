"""Numbers of multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config import numerics
from harness.errors import ConfigError

DEPTHS = (0, 1)


@dataclass
class MTPConfig:
    """Multi-token prediction as DeepSeek V3 has it (arXiv:2412.19437, section 2.2).

    A block more is trained to predict the token after the next one. Nothing of the decoder's own output
    changes; the loss that is shown, and validation's, are the decoder's.
    """

    depth: int = numerics(0)
    """Tokens that are predicted beyond the next one: 0 or 1."""
    loss_weight: float = numerics(0.3)
    """What their loss is multiplied by (lambda; the paper's is 0.3 for its first 10T tokens, then 0.1). It is
    a sum over tokens that is divided by the number of the next-token loss's, which is slightly larger."""

    def validate(self) -> None:
        """Raises ConfigError for a depth or a weight that there is not."""
        if self.depth not in DEPTHS:
            raise ConfigError("model.mtp.depth", self.depth, "one token more can be predicted", DEPTHS)
        if self.depth and not self.loss_weight > 0:
            works = "0.3, or model.mtp.depth=0"
            raise ConfigError("model.mtp.loss_weight", self.loss_weight, "must be positive", works)
