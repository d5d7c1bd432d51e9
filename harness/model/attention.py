"""Grouped-query attention (arXiv:2305.13245)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from harness.model.config import ModelConfig
from harness.model.kernels import Kernel, SdpaKernel
from harness.model.rope import rotate
from harness.model.sharding import Split

# B: batch, T: sequence, C: residual width, H: heads of this rank, D: head width


class Attention(nn.Module):
    """Causal self-attention; under tensor parallel each rank holds some of the heads.

    What becomes of queries, keys and values is up to ``inner``, which can be exchanged.
    """

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
        self.inner: Kernel = SdpaKernel()

    def forward(self, x_BTC: Tensor, rope_2TD: Tensor, mask: Any | None = None) -> Tensor:
        """Attends from every position to itself and those before it.

        Args:
            x_BTC: normed residual stream.
            rope_2TD: cosines and sines of the positions.
            mask: what ``inner`` made of the documents; None when they see each other.

        Returns:
            What is added to the residual stream, [B, T, C].
        """
        B, T, _ = x_BTC.shape
        # -1 and not n_heads: a tensor-parallel rank sees only its own heads.
        q_BTHD = rotate(self.wq(x_BTC).view(B, T, -1, self.head_dim), rope_2TD)
        k_BTHD = rotate(self.wk(x_BTC).view(B, T, -1, self.head_dim), rope_2TD)
        v_BTHD = self.wv(x_BTC).view(B, T, -1, self.head_dim)
        out_BTHD = self.inner(q_BTHD, k_BTHD, v_BTHD, mask)
        return self.wo(out_BTHD.reshape(B, T, -1))
