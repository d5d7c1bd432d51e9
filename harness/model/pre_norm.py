"""The pre-norm block, from which other kinds of blocks derive (no torch until it is built)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from harness.config.model import ModelConfig
from harness.model.blocks import BlockKind
from harness.model.spec import ModuleSpec, pre_norm_modules
from harness.tools.plan.activations import PartActivations, pre_norm_activations
from harness.tools.plan.operations import Operations, pre_norm_operations

if TYPE_CHECKING:
    from harness.model.decoder import Block


class PreNorm(BlockKind):
    """Attention and a feed-forward or mixture of experts, each after a norm."""

    def modules(self, model: ModelConfig, layer: int) -> Iterator[ModuleSpec]:
        return pre_norm_modules(model, layer)

    def build(self, model: ModelConfig, layer: int) -> Block:
        from harness.model.decoder import Block

        return Block(model, layer)

    def activations(self, model: ModelConfig, layer: int, *, on_cpu: bool) -> PartActivations:
        return pre_norm_activations(model, layer, on_cpu=on_cpu)

    def operations(self, model: ModelConfig, layer: int, seq_len: int) -> Operations:
        return pre_norm_operations(model, layer, seq_len)
