"""Grouped-query attention (arXiv:2305.13245)."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from harness.model.config import ModelConfig
from harness.model.rope import rotate
from harness.model.sharding import Split

# B: batch, T: sequence, C: residual width, H: heads of this rank, D: head width


class Attention(nn.Module):
    """Causal self-attention; under tensor parallel each rank holds some of the heads."""

    sharding: ClassVar[dict[str, Split]] = {
        "wq": Split.COLUMN,
        "wk": Split.COLUMN,
        "wv": Split.COLUMN,
        "wo": Split.ROW,
    }

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_width
        self.wq = nn.Linear(config.dim, config.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * self.head_dim, config.dim, bias=False)

    def forward(self, x_BTC: Tensor, rope_2TD: Tensor) -> Tensor:
        """Attends from every position to itself and those before it.

        Args:
            x_BTC: normed residual stream.
            rope_2TD: cosines and sines of the positions.

        Returns:
            What is added to the residual stream, [B, T, C].
        """
        B, T, _ = x_BTC.shape
        # -1 and not n_heads: a tensor-parallel rank sees only its own heads.
        q_BTHD = rotate(self.wq(x_BTC).view(B, T, -1, self.head_dim), rope_2TD)
        k_BTHD = rotate(self.wk(x_BTC).view(B, T, -1, self.head_dim), rope_2TD)
        v_BTHD = self.wv(x_BTC).view(B, T, -1, self.head_dim)
        out_BHTD = F.scaled_dot_product_attention(
            q_BTHD.transpose(1, 2),
            k_BTHD.transpose(1, 2),
            v_BTHD.transpose(1, 2),
            is_causal=True,
            enable_gqa=q_BTHD.shape[2] != k_BTHD.shape[2],
        )
        return self.wo(out_BHTD.transpose(1, 2).reshape(B, T, -1))
