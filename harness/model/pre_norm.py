"""The pre-norm block, from which other kinds of blocks derive (no torch until it is built)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from harness.config.model import ModelConfig
from harness.model.blocks import BlockKind
from harness.model.spec import ModuleSpec, pre_norm_modules

if TYPE_CHECKING:
    from harness.model.decoder import Block


class PreNorm(BlockKind):
    """Attention and a feed-forward or mixture of experts, each after a norm."""

    def modules(self, model: ModelConfig, layer: int) -> Iterator[ModuleSpec]:
        return pre_norm_modules(model, layer)

    def build(self, model: ModelConfig, layer: int) -> Block:
        from harness.model.decoder import Block

        return Block(model, layer)
