"""RMSNorm (arXiv:1910.07467), whose weight can be stored as its difference from one."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.config.model import ModelConfig


class Norm(nn.RMSNorm):
    """RMSNorm of the last dimension.

    Attributes:
        zero_centred: whether it multiplies by 1 + weight.
    """

    zero_centred = False

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, self.weight)

    def scaled(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalize, and multiply by a weight."""
        if not self.zero_centred:
            return F.rms_norm(x, self.normalized_shape, weight, self.eps)
        # 1 + weight would round small weights away in 16 bits; the sum of products is in 32.
        normed = F.rms_norm(x, self.normalized_shape, None, self.eps)
        return torch.addcmul(normed, normed, weight)


def build_norm(config: ModelConfig, width: int, eps: float | None = None) -> Norm:
    """Build a norm of a decoder; ``eps``: instead of the model's."""
    norm = Norm(width, eps=config.norm_eps if eps is None else eps)
    norm.zero_centred = config.norm_zero_centred
    return norm
