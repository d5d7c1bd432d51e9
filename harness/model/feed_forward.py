"""SwiGLU feed-forward (arXiv:2002.05202)."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from harness.model.config import ModelConfig
from harness.model.sharding import Split


class FeedForward(nn.Module):
    """w2(silu(w1 x) * w3 x)."""

    sharding: ClassVar[dict[str, Split]] = {"w1": Split.COLUMN, "w3": Split.COLUMN, "w2": Split.ROW}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_hidden_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_hidden_dim, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Maps the normed residual stream [B, T, C] to what is added to it, [B, T, C]."""
        return self.w2(F.silu(self.w1(x_BTC)) * self.w3(x_BTC))
