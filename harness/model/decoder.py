"""The decoder: embedding, blocks, final norm, output projection; or the part that one stage holds."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from harness.model.attention import Attention
from harness.model.config import ModelConfig
from harness.model.feed_forward import FeedForward
from harness.model.head import Head
from harness.model.kernels import Kernel
from harness.model.rope import rope_table
from harness.model.sharding import Split

# B: batch, T: sequence (of this rank, when it is split), C: residual width, V: vocabulary


class Block(nn.Module):
    """Pre-norm decoder block."""

    sharding: ClassVar[dict[str, Split]] = {
        "attention_norm": Split.NORM,
        "attention": Split.REGION,
        "ffn_norm": Split.NORM,
        "feed_forward": Split.REGION,
    }

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BTC: Tensor, rope_2TD: Tensor, mask: Any | None = None) -> Tensor:
        """Maps the residual stream [B, T, C] to the next block's."""
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), rope_2TD, mask)
        return x_BTC + self.feed_forward(self.ffn_norm(x_BTC))


class Decoder(nn.Module):
    """A decoder, whole or in part.

    Modules are named after their place in the whole model (``layers.7``), so parameter names, and with
    them initial values, gradients and checkpoints, do not depend on how the model is split.
    """

    sharding: ClassVar[dict[str, Split]] = {
        "tok_embeddings": Split.VOCABULARY,
        "norm": Split.NORM,
        "output": Split.HEAD,
    }

    def __init__(self, config: ModelConfig, seq_len: int, modules: Collection[str] | None = None) -> None:
        """Builds the named modules on the current default device (use ``torch.device("meta")``).

        Args:
            config: the model's numbers.
            seq_len: positions to make the rotation table for.
            modules: names among tok_embeddings, layers.<i>, norm, output; None means all.
        """
        super().__init__()
        has = (lambda name: True) if modules is None else set(modules).__contains__
        self.config = config
        self.seq_len = seq_len
        self.positions: Tensor | None = None
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim) if has("tok_embeddings") else None
        self.layers = nn.ModuleDict(
            {str(i): Block(config) for i in range(config.n_layers) if has(f"layers.{i}")}
        )
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps) if has("norm") else None
        self.output = Head(config.dim, config.vocab_size, bias=False) if has("output") else None
        self.tie_embeddings()
        self.register_buffer("rope", self._rope_table(torch.get_default_device()), persistent=False)
        self.rope: Tensor

    def _rope_table(self, device: torch.device | str) -> Tensor:
        table = rope_table(self.config.rope, self.config.head_width, self.seq_len, device=device)
        return table if self.positions is None else table[:, self.positions.to(device)]

    def take_positions(self, positions_T: Tensor) -> None:
        """Says which positions of the sequence this decoder sees, in their order; without it, all of them.

        Call it before ``materialize_buffers``.
        """
        self.positions = positions_T

    def use_kernel(self, kernel: type[Kernel]) -> None:
        """Says how attention is computed."""
        for block in self.layers.values():
            block.attention.inner = kernel()  # type: ignore[union-attr,method-assign]

    def tie_embeddings(self) -> None:
        """Makes the output projection the embedding table, where the model says so.

        Called again after every step that replaces parameters one module at a time (tensor parallel,
        materialization), which would silently leave two tables.
        """
        if self.config.tied_embeddings and self.tok_embeddings is not None and self.output is not None:
            self.output.weight = self.tok_embeddings.weight

    def materialize_buffers(self, device: torch.device) -> None:
        """Computes the buffers, which ``to_empty`` leaves without values."""
        self.rope = self._rope_table(device)

    def forward(
        self, x: Tensor, labels_BT: Tensor | None = None, documents_BT: Tensor | None = None
    ) -> Tensor:
        """Runs the modules this part holds.

        Args:
            x: token ids [B, T] for a part with the embedding, else the residual stream [B, T, C].
            labels_BT: labels, for a part whose output projection computes the loss.
            documents_BT: number of each position's document, where documents do not see each other. They
                keep their positions: a rotation depends on the distance of two tokens only.

        Returns:
            Logits [B, T, V] from a part with the output projection, or the loss where there are labels; else
            the residual stream [B, T, C].
        """
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        rope_2TD, mask = self.rope, self._mask(documents_BT)
        for block in self.layers.values():
            x = block(x, rope_2TD, mask)
        x = self.norm(x) if self.norm is not None else x
        if self.output is None:
            return x
        # One that was swapped for another format takes no labels.
        return self.output(x) if labels_BT is None else self.output(x, labels_BT)

    def _mask(self, documents_BT: Tensor | None) -> Any | None:
        """What all blocks' attention needs to know of the documents, made once."""
        if documents_BT is None or not self.layers:
            return None
        return next(iter(self.layers.values())).attention.inner.mask(documents_BT)  # type: ignore[union-attr,operator]
