"""A block: the pre-norm block, with a feed-forward w2(relu(w1 x)^2) without a gate (arXiv:2109.08668).

The declaration imports no torch: it is read when a job is composed and planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.config.model import ModelConfig
from harness.model.decoder_architecture import PreNorm
from harness.model.spec import ModuleSpec
from harness.tools.plan.activations import PartActivations, SavedTensor
from harness.tools.plan.costs import PreNormCosts
from harness.util.errors import ConfigError

if TYPE_CHECKING:
    from harness.model.decoder import Block


class Relu2(PreNorm):
    """Pre-norm blocks with a squared ReLU."""

    def validate(self, model: ModelConfig) -> None:
        if model.moe.enabled:
            raise ConfigError("model.block", "relu2", "has no experts", ["pre_norm"])

    def modules(self, model: ModelConfig, layer: int) -> Iterator[ModuleSpec]:
        """All modules of a pre-norm block but the gate."""
        return (
            each
            for each in super().modules(model, layer)
            if not each.name.endswith("feed_forward.w3")
        )

    def build(self, model: ModelConfig, layer: int) -> Block:
        from harness_extras.relu2_block import Relu2Block

        return Relu2Block(model, layer)


class Relu2Costs(PreNormCosts):
    """What the plan knows of these blocks; without it they train, and have no plan."""

    def activations(self, model: ModelConfig, layer: int, *, on_cpu: bool) -> PartActivations:
        """Those of a pre-norm block, with other tensors of the feed-forward.

        Backward needs relu(w1 x), to differentiate the square and the ReLU, and its square, the input of w2.
        """
        block = super().activations(model, layer, on_cpu=on_cpu)
        hidden = next(each for each in block.kept if each.name == "feed_forward.up")
        kept = [each for each in block.kept if not each.name.startswith("feed_forward.")]
        return replace(
            block,
            kept=(
                *kept,
                replace(hidden, name="feed_forward.relu"),
                replace(hidden, name="feed_forward.square"),
            ),
            products=tuple(each for each in block.products if each.name != "feed_forward.gate"),
            forward=(*block.forward[:-1], _times(hidden, 3)),
            backward=(*block.backward[:-1], _times(hidden, 2)),
        )


def _times(hidden: SavedTensor, count: int) -> SavedTensor:
    return replace(hidden, name=f"feed_forward, {count} tensors", width=count * hidden.width)
