"""Multi-token prediction: from a position's stream and the token after it, the token after that one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.model.config import ModelConfig

# B: batch, T: sequence (of this rank, when it is split), C: residual width


class MTP(nn.Module):
    """The module that DeepSeek V3 predicts a second token with (arXiv:2412.19437, section 2.2).

    It has no table of its own: the decoder embeds the tokens, and its output projection makes the logits.
    Names and order of the two halves are those of the released weights, layer 61: ``eh_proj`` multiplies the
    embedding's half (``enorm``) and then the stream's (``hnorm``); ``norm`` is ``shared_head.norm``. The
    stream is taken before the decoder's final norm. Neither the paper nor the files say so, and programs that
    run the released model differ in it (ggml-org/llama.cpp#24025 and vllm-project/vllm#47448).

    Args:
        config: the model's numbers.
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
        """Maps the stream before the decoder's final norm to what the output projection takes.

        Args:
            x_BTC: the stream behind the last block.
            later_BTC: embeddings of the tokens one position later.
            rope_2TD: the rotation table; rotation sees distances only, so positions are not moved.
            mask: what the block's attention needs to know of documents.
            positions_T: places of the positions.

        Returns:
            The normed stream [B, T, C], and how many tokens went to each expert, where there are experts.
        """
        both = torch.cat((self.embedding_norm(later_BTC), self.hidden_norm(x_BTC)), dim=-1)
        out_BTC, load_E = self.block(self.proj(both), rope_2TD, mask, positions_T)
        return self.norm(out_BTC), load_E
