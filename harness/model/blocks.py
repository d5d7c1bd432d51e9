"""Kinds of decoder blocks. Only building a block imports torch.

The pre-norm block (``pre_norm.py``) has all functions of this interface. Another kind derives from it and
replaces those in which it differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

from harness.config.model import BLOCKS, ModelConfig

if TYPE_CHECKING:
    from harness.model.decoder import Block
    from harness.model.spec import ModuleSpec


class BlockKind(ABC):
    """One kind of block. Instances have no state."""

    options: type | None = None
    """Dataclass of ``model.block_options``; None: there are none."""

    def validate(self, model: ModelConfig) -> None:  # noqa: B027
        """Raise ConfigError for a model that cannot have these blocks."""

    @abstractmethod
    def modules(self, model: ModelConfig, layer: int) -> Iterator[ModuleSpec]:
        """Every module of a block with its tensors, in order.

        Layouts, initial values, checkpoints, precision and counts read it. The plan needs ``BlockCosts`` too.
        """

    @abstractmethod
    def build(self, model: ModelConfig, layer: int) -> Block:
        """Build the modules on the current default device."""


def block_of(model: ModelConfig) -> BlockKind:
    """Return the kind of a model's blocks."""
    kind: BlockKind = BLOCKS[model.block]()
    return kind
