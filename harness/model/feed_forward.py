"""Gated feed-forwards: SwiGLU, GEGLU (arXiv:2002.05202) and GPT-OSS's variant."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALPHA = 1.702
LIMIT = 7.0
"""GPT-OSS: slope of the gate and limit of both factors (openai/gpt-oss, gpt_oss/torch/model.py,
swiglu)."""


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The gated activation between the projections.

    Args:
        gate: w1 x.
        up: w3 x.
        activation: a name of model.activation.
    """
    if activation == "swiglu":
        return F.silu(gate) * up
    if activation == "geglu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if activation != "swiglu_clamped":
        raise ValueError(f"no such activation: {activation}")
    gate = gate.clamp(max=LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up.clamp(-LIMIT, LIMIT) + 1)


class FeedForward(nn.Module):
    """w2(silu(w1 x) * w3 x), or with another activation, and with a gate times sigmoid(gate x)."""

    def __init__(
        self, dim: int, hidden_dim: int, activation: str, *, has_gate: bool = False
    ) -> None:
        super().__init__()
        self.activation = activation
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)
        self.gate = nn.Linear(dim, 1, bias=False) if has_gate else None

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Map the normed residual stream [B, T, C] to the update that is added to the stream, [B, T, C]."""
        hidden_BTF = gated(self.w1(x_BTC), self.w3(x_BTC), self.activation)
        if self.gate is not None:
            # Of the hidden layer, not of the output, which may be split along the sequence.
            hidden_BTF = hidden_BTF * torch.sigmoid(self.gate(x_BTC))
        return self.w2(hidden_BTF)
