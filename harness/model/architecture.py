"""Kinds of models and blocks, by ``model.architecture`` and ``model.block`` (no torch until one is built).

Code outside of an architecture's own file never compares names: it calls a method of
``Architecture``. Rooms above have tables of their own by the same names: ``OBJECTIVES`` what such a
model is trained on, and the plan what it costs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.config.fields import default_of, leaf_fields
from harness.config.model import ARCHITECTURES, BLOCKS, ModelConfig, of_one_model
from harness.util.errors import ConfigError

if TYPE_CHECKING:
    from harness.config.job import Job
    from harness.model.accounting import Accounting
    from harness.model.decoder import Block
    from harness.model.part import ModelPart
    from harness.model.spec import ModuleSpec


class Architecture(ABC):
    """One kind of model. Instances have no state."""

    batches: str = "tokens"
    """What its batches hold, as ``DataKind.batches``."""
    makes: str = "texts"
    """What its models make, in the plural, for messages."""
    options: type | None = None
    """Dataclass of ``model.options``; None: there are none."""

    def resolve(self, model: ModelConfig) -> ModelConfig:
        """Return the model with derived fields set."""
        return model

    def at_depth(self, model: ModelConfig, n_layers: int) -> ModelConfig:
        """Return the model with another number of blocks, those of each kind in proportion."""
        return replace(model, n_layers=n_layers)

    @abstractmethod
    def validate(self, model: ModelConfig) -> None:
        """Raise ConfigError when the resolved fields do not describe a model."""

    @abstractmethod
    def modules(self, model: ModelConfig) -> Iterator[ModuleSpec]:
        """Every module that tensor parallelism treats in some way, in order."""

    @abstractmethod
    def block_modules(self, model: ModelConfig, layer: int) -> Iterator[ModuleSpec]:
        """Every module of one block."""

    def block_prefix(self, model: ModelConfig, layer: int) -> str:
        """The prefix of the names in a block."""
        return f"layers.{layer}."

    @abstractmethod
    def block_kind(self, model: ModelConfig, layer: int) -> Hashable:
        """A key for each block; blocks with equal keys have the same modules and operations."""

    @abstractmethod
    def fsdp_groups(self, model: ModelConfig, experts_apart: bool) -> dict[str, str]:
        """The FSDP group of every module that FSDP wraps, inner modules before outer ones.

        FSDP gathers the parameters of a group at once. A parameter belongs to the group of the
        innermost wrapped module around it; "" is the model itself.

        Args:
            experts_apart: whether experts have another mesh than the other parameters, so another
                group.
        """

    @abstractmethod
    def account(self, model: ModelConfig, seq_len: int) -> Accounting:
        """Count parameters and FLOPs."""

    @abstractmethod
    def build_part(self, job: Job, modules: Collection[str] | None) -> ModelPart:
        """Build the named modules (a pipeline stage; None: all) on the current default device."""


class BlockKind(ABC):
    """One kind of block. Instances have no state."""

    options: type | None = None
    """Dataclass of ``model.block_options``; None: there are none."""

    def validate(self, model: ModelConfig) -> None:  # noqa: B027
        """Raise ConfigError for a model that cannot have these blocks."""

    @abstractmethod
    def modules(self, model: ModelConfig, layer: int) -> Iterator[ModuleSpec]:
        """Every module of a block with its tensors, in order.

        Layouts, initial values, checkpoints, precision and counts read it. The plan needs
        ``BlockCosts`` too.
        """

    @abstractmethod
    def build(self, model: ModelConfig, layer: int) -> Block:
        """Build the modules on the current default device."""


def block_of(model: ModelConfig) -> BlockKind:
    """Return the kind of a model's blocks."""
    kind: BlockKind = BLOCKS[model.block]()
    return kind


def architecture_of(model: ModelConfig) -> Architecture:
    """Return the entry of a model."""
    entry: Architecture = ARCHITECTURES[model.architecture]()
    return entry


def resolve_model(model: ModelConfig) -> ModelConfig:
    """Return the model with derived fields, such as head_dim, set, after a check of its rules."""
    architecture = architecture_of(model)
    options = ARCHITECTURES.resolve_options(model.architecture, model.options)
    resolved = architecture.resolve(replace(model, options=options))
    architecture.validate(resolved)
    return model if resolved == model else resolved


@of_one_model
def block_kinds(model: ModelConfig) -> list[tuple[Hashable, ...]]:
    """A key for each block; blocks with equal keys have the same modules and operations."""
    architecture = architecture_of(model)
    return [(architecture.block_kind(model, layer),) for layer in range(model.num_blocks)]


def changed(config: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value and default of every leaf field that has another value than its default."""
    for name, field, value in leaf_fields(config, prefix):
        if value != default_of(field):
            yield name, value, default_of(field)


def require_decoder(model: ModelConfig, does: str, works: str) -> None:
    """Raise ConfigError for a model of something else than text; ``does``: what only models of text do."""
    architecture = architecture_of(model)
    if architecture.batches != "tokens":
        rule = f"model={model.name} makes {architecture.makes}, and this command {does}"
        raise ConfigError("model.architecture", model.architecture, rule, works)
