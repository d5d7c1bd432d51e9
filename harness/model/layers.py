"""Layers of a decoder: gated feed-forwards, the output projection, and multi-token prediction.

SwiGLU is arXiv:2002.05202; GPT-OSS has a variant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.config.model import ModelConfig

ALPHA, LIMIT = 1.702, 7.0
"""GPT-OSS: slope of the gate and limit of both factors (openai/gpt-oss, gpt_oss/torch/model.py, swiglu)."""


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The gated activation between the projections.

    Args:
        gate: w1 x.
        up: w3 x.
        activation: a name of model.activation.
    """
    if activation == "swiglu":
        return F.silu(gate) * up
    if activation != "swiglu_clamped":
        raise ValueError(f"no such activation: {activation}")
    gate = gate.clamp(max=LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up.clamp(-LIMIT, LIMIT) + 1)


class FeedForward(nn.Module):
    """w2(silu(w1 x) * w3 x), or with another activation."""

    def __init__(self, dim: int, hidden_dim: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Map the normed residual stream [B, T, C] to the update that is added to the stream, [B, T, C]."""
        return self.w2(gated(self.w1(x_BTC), self.w3(x_BTC), self.activation))


class Head(nn.Linear):
    """The output projection.

    Attributes:
        loss: maps the residual stream [B, T, C], the weight [V, C] and labels [B, T] to the loss; None: the
            head returns logits.
    """

    loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def forward(self, x_BTC: Tensor, *labels_BT: Tensor) -> Tensor:
        """Logits [B, T, V], or the scalar loss if there are labels.

        With L labels, x is L streams concatenated [L * B, T, C], and the result has their losses [L].
        """
        if not labels_BT:
            return super().forward(x_BTC)
        assert self.loss is not None, "labels need a head with a loss"
        streams = x_BTC.chunk(len(labels_BT))
        losses = [self.loss(x, self.weight, labels) for x, labels in zip(streams, labels_BT, strict=True)]
        return losses[0] if len(losses) == 1 else torch.stack(losses)


# B: batch, T: sequence (of this rank, when it is split), C: residual width


class MTP(nn.Module):
    """Multi-token prediction of DeepSeek V3 (arXiv:2412.19437, section 2.2).

    It has no table of its own: the decoder embeds the tokens and computes the logits. The order of the
    concatenated halves is that of the released weights, layer 61: ``eh_proj`` multiplies the embedding's half
    (``enorm``), then the stream's (``hnorm``); ``norm`` is ``shared_head.norm``. The stream is that before
    the decoder's final norm. Neither the paper nor the files specify this, and implementations differ
    (ggml-org/llama.cpp#24025 and vllm-project/vllm#47448).

    Args:
        config: the model.
        block: its block, number n_layers.
    """

    def __init__(self, config: ModelConfig, block: nn.Module) -> None:
        super().__init__()
        self.embedding_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.hidden_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.proj = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.block = block
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)

    def forward(
        self, x_BTC: Tensor, later_BTC: Tensor, rope_2TD: Tensor, mask: Any | None, positions_T: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Map the stream before the decoder's final norm to the output projection's input.

        Args:
            x_BTC: the stream after the last block.
            later_BTC: embeddings of the tokens one position later.
            rope_2TD: the rotation table; it is not shifted, as rotation depends on distances only.
            mask: the block's attention mask.
            positions_T: the positions.

        Returns:
            The normed stream [B, T, C], and the number of tokens per expert, None without experts.
        """
        both = torch.cat((self.embedding_norm(later_BTC), self.hidden_norm(x_BTC)), dim=-1)
        out_BTC, load_E = self.block(self.proj(both), rope_2TD, mask, positions_T)
        return self.norm(out_BTC), load_E
