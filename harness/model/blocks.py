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
    from harness.tools.plan.activations import PartActivations
    from harness.tools.plan.operations import Operations


class BlockKind(ABC):
    """One kind of block. Instances have no state."""

    options: type | None = None
    """Dataclass of ``model.block_options``; None: there are none."""

    def validate(self, model: ModelConfig) -> None:  # noqa: B027
        """Raise ConfigError for a model that cannot have these blocks."""

    @abstractmethod
    def modules(self, model: ModelConfig, layer: int) -> Iterator[ModuleSpec]:
        """Every module of a block with its tensors, in order.

        Layouts, initial values, checkpoints, precision, counts and the plan read it.
        """

    @abstractmethod
    def build(self, model: ModelConfig, layer: int) -> Block:
        """Build the modules on the current default device."""

    @abstractmethod
    def activations(self, model: ModelConfig, layer: int, *, on_cpu: bool) -> PartActivations:
        """What a block saves for backward, its input included. The plan's memory needs it.

        Args:
            model: the model.
            layer: number of the block.
            on_cpu: whether kernels are those of CPUs.
        """

    @abstractmethod
    def operations(self, model: ModelConfig, layer: int, seq_len: int) -> Operations:
        """The operations of a block for one token. The plan's time needs them."""


def block_of(model: ModelConfig) -> BlockKind:
    """Return the kind of a model's blocks."""
    kind: BlockKind = BLOCKS[model.block]()
    return kind
