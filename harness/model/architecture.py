"""Kinds of models and blocks, by ``model.architecture`` and ``model.block`` (no torch until one is built).

Code outside of an architecture's own file never compares names: it calls a method of
``Architecture``. Rooms above have tables of their own by the same names: ``OBJECTIVES`` what such a
model is trained on, and the plan what it costs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from harness.config.fields import default_of, leaf_fields
from harness.config.model import ARCHITECTURES, BLOCKS, ModelConfig, of_one_model
from harness.config.parallelism import CP_METHODS
from harness.util.errors import ConfigError

if TYPE_CHECKING:
    from harness.config.job import Job
    from harness.model.accounting import Accounting
    from harness.model.decoder import Block
    from harness.model.part import ModelPart
    from harness.model.spec import ModuleSpec

J = TypeVar("J", bound="Job")


class Architecture(ABC):
    """One kind of model. Instances have no state."""

    batches: str = "tokens"
    """What its batches hold, as ``DataKind.batches``."""
    makes: str = "texts"
    """What its models make, in the plural, for messages."""
    options: type | None = None
    """Dataclass of ``model.options``; None: there are none."""
    context_methods: Sequence[str] = CP_METHODS
    """Values of ``parallelism.cp_method`` that its attention works with."""

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


def with_context_method(job: J) -> J:
    """Return a job with the method that it needs, if its sequences are split."""
    layout = job.parallelism
    if layout.cp == 1 or layout.cp_method is not None:
        return job
    return replace(job, parallelism=replace(layout, cp_method=context_methods(job)[0]))


def context_methods(job: Job) -> list[str]:
    """Methods that support a job; the first one is its default.

    A ring hides what it sends behind attention, and takes no more memory with more ranks. Without
    it, what sends less is the default: ``ulysses`` all of a rank's heads, ``gather`` the keys and
    values of all ranks.
    """
    model = job.model
    layout = job.parallelism
    allowed = architecture_of(model).context_methods
    unsupported = []
    if limit_of_ring(job) is not None:
        unsupported.append("ring")
    if layout.balances_documents or not layout.can_exchange_heads(model):
        unsupported.append("ulysses")
    supported = [method for method in allowed if method not in unsupported] or list(allowed)
    keys = model.n_kv_heads * (model.head_width + model.value_width)
    outputs = model.n_heads * (model.head_width + model.value_width)
    # Values of a token, times (cp - 1) / cp.
    sent = {"ring": 0, "ulysses": keys + outputs, "gather": layout.cp * keys}
    return sorted(supported, key=sent.__getitem__)


def limit_of_ring(job: Job) -> str | None:
    """What a job has that a ring does not support; None if there is nothing."""
    if job.training.attention != "sdpa":
        return f"training.attention={job.training.attention}"
    model = job.model
    if "ring" not in architecture_of(model).context_methods:
        return f"model.architecture={model.architecture}"
    length = job.training.seq_len
    spans = map(model.span, model.attention_layers)
    if any(span.most_reach(length) < length for span in spans):
        return "model.attention.window" if model.attention.window else "model.attention.chunk"
    if model.attention.sinks:
        return "model.attention.sinks"
    if model.attention.score_cap is not None:
        return "model.attention.score_cap"
    return None if job.data.attend_across_documents else "data.attend_across_documents=false"


def method_in_words(job: Job) -> str | None:
    """The line that says which method a job has in place of a ring; None if it may have a ring."""
    limit = limit_of_ring(job)
    if job.parallelism.cp == 1 or limit is None:
        return None
    return f"context parallel by {job.parallelism.cp_method}: a ring does not support {limit}"


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
