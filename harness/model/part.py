"""The interface of a model part: a complete model, or one pipeline stage of it, of any architecture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from harness.config.model import ModelConfig
from harness.model.delta import DeltaRule
from harness.model.kernels import Kernel

if TYPE_CHECKING:
    from harness.model.moe import MoE


class ModelPart(nn.Module, ABC):
    """Modules with the names of the full model (``layers.7``), so parameter names, and with them initial
    values, gradients and checkpoints, do not depend on how the model is split.

    Attributes:
        layers: the blocks, by number in the full model.
        uncompiled: functions that the compiler has replaced, each with its module and name.
    """

    config: ModelConfig
    seq_len: int
    layers: nn.ModuleDict
    output: Any
    """The last module; None in earlier stages of a pipeline."""
    uncompiled: Sequence[tuple[nn.Module, str, Any]] = ()

    @property
    def entries(self) -> list[nn.Module]:
        """Modules that map inputs to the residual stream; empty in later stages of a pipeline."""
        return []

    @property
    def segments(self) -> tuple[int, ...]:
        """Lengths of the pieces of a sequence; context parallel splits each of them over the ranks."""
        return (self.seq_len,)

    @property
    def blocks(self) -> dict[int, Any]:
        """This part's blocks, by number in the full model."""
        return {int(name): block for name, block in self.layers.items()}

    @property
    def mixtures(self) -> dict[int, MoE]:
        """This part's mixtures of experts, by the block's number in the full model."""
        return {}

    @property
    def kernels(self) -> list[Any]:
        """Every module whose attribute ``inner`` is a kernel of attention."""
        return [
            each
            for each in self.modules()
            if isinstance(getattr(each, "inner", None), Kernel) and not isinstance(each, Kernel)
        ]

    @property
    def scans(self) -> list[Any]:
        """Every mixer whose attribute ``inner`` is the operation of Gated DeltaNet."""
        return [
            each for each in self.modules() if isinstance(getattr(each, "inner", None), DeltaRule)
        ]

    def use_kernel(self, kernel: type[Kernel]) -> None:
        """Set the attention backend."""
        for module in self.kernels:
            module.inner = kernel(module.inner.spec)

    def tie_embeddings(self) -> None:
        """Tie parameters that the model shares, again after every step that replaces parameters."""

    def take_loads(self) -> dict[int, Tensor]:
        """Return the tokens per expert by layer, counted in passes with gradients since the last call."""
        return {}

    def take_needed(self) -> dict[int, Tensor]:
        """Return the largest ``MoE.capacity_needed`` by layer, of all passes since the last call."""
        return {}

    @abstractmethod
    def set_length(self, length: int, positions_T: Tensor | None) -> None:
        """Set the length of the sequences, and the positions that this part computes, in order; None: all."""

    @abstractmethod
    def materialize_buffers(self, device: torch.device) -> None:
        """Compute the buffers, which ``to_empty`` leaves uninitialized."""
