"""Multi-token prediction: predicts the token after the next one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.config.model import ModelConfig

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
