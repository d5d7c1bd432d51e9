"""The table of architectures: everything that the rest of the harness asks a kind of model for (no torch).

``model.architecture`` names an entry. Code outside of an architecture's own package never compares names: it
calls a method of ``Architecture``. Methods that build torch modules import torch when they are called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.config.data_kinds import DATA_KINDS
from harness.config.fields import default_of, leaf_fields
from harness.config.model import ARCHITECTURES, ModelConfig, of_one_model
from harness.util.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from harness.checkpoint.rank_group import RankGroup
    from harness.config.data import DataConfig
    from harness.config.job import Job
    from harness.config.training import TrainingConfig
    from harness.contrib.flux.sheet import SampleSheet
    from harness.data.batch import AnyBatch, Loader
    from harness.data.tokenizer import Tokenizer
    from harness.model.accounting import Accounting
    from harness.model.part import ModelPart
    from harness.model.spec import ModuleSpec, TensorSpec
    from harness.parallelism.execute import Executor
    from harness.parallelism.loss import Loss
    from harness.parallelism.mesh import Mesh
    from harness.tools.plan.activations import PartActivations
    from harness.tools.plan.operations import Operations
    from harness.train.engine import Engine


class Architecture(ABC):
    """One kind of model. Instances have no state."""

    takes_pictures: bool = False
    """Whether batches are encoded pictures (``ImageBatch``), not tokens."""

    def resolve(self, model: ModelConfig) -> ModelConfig:
        """Return the model with derived fields set."""
        return model

    def at_depth(self, model: ModelConfig, n_layers: int) -> ModelConfig:
        """Return the model with another number of blocks, those of each kind in proportion."""
        return replace(model, n_layers=n_layers)

    @abstractmethod
    def validate(self, model: ModelConfig) -> None:
        """Raise ConfigError when the resolved fields do not describe a model."""

    def check(self, job: Job) -> None:  # noqa: B027
        """Raise ConfigError for parts of the job that the architecture does not allow."""

    def for_generation(
        self, data: DataConfig, training: TrainingConfig, model: ModelConfig
    ) -> dict[str, Any]:
        """Return parts of a job that generates and trains nothing, with values that the model allows."""
        return {}

    def build_sheet(
        self, job: Job, engine: Engine, loader: Loader, ranks: RankGroup, run_dir: Path
    ) -> SampleSheet | None:
        """Make the writer of validation.pictures; None for models that make no pictures."""
        return None

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
    def fsdp_groups(self, model: ModelConfig, *, experts_apart: bool) -> dict[str, str]:
        """The FSDP group of every module that FSDP wraps, as ``spec.fsdp_groups``."""

    @abstractmethod
    def account(self, model: ModelConfig, seq_len: int) -> Accounting:
        """Count parameters and FLOPs."""

    @abstractmethod
    def block_kind(self, model: ModelConfig, layer: int) -> Hashable:
        """A key for each block; blocks with equal keys have the same modules and operations."""

    @abstractmethod
    def block_activations(
        self, model: ModelConfig, layer: int, seq_len: int, *, on_cpu: bool
    ) -> PartActivations:
        """What a block saves for backward, per token, its input included."""

    @abstractmethod
    def entry_activations(self, model: ModelConfig, seq_len: int) -> PartActivations:
        """What the modules before the blocks save."""

    @abstractmethod
    def head_activations(self, model: ModelConfig, seq_len: int) -> PartActivations:
        """What the modules after the blocks save, without the outputs."""

    @abstractmethod
    def block_operations(self, model: ModelConfig, layer: int, seq_len: int) -> Operations:
        """The operations of a block for one token."""

    def row_share(self, model: ModelConfig, tensor: TensorSpec, seq_len: int) -> float:
        """Rows that a matrix multiplies, as a fraction of a sequence's tokens."""
        return 1.0

    def outputs(self, model: ModelConfig) -> int:
        """Outputs of the model for a token."""
        return model.vocab_size

    def stage_module(self, module: str) -> str:
        """The name in ``parallelism/stages.py`` of a module outside of the blocks."""
        return module

    def sample_bytes(self, model: ModelConfig, seq_len: int) -> float:
        """Bytes of one sample of a batch: inputs and labels, int64."""
        return 2.0 * 8 * seq_len

    @abstractmethod
    def fake_batch(self, job: Job, rows: int) -> AnyBatch:
        """A batch of zeros with ``rows`` rows."""

    def without_values(self) -> AbstractContextManager[Any]:
        """Context manager in which passes run on tensors that have no values."""
        return nullcontext()

    @abstractmethod
    def build_part(self, job: Job, modules: Collection[str] | None) -> ModelPart:
        """Build the named modules (a pipeline stage; None: all) on the current default device."""

    @abstractmethod
    def build_loss(self, job: Job, mesh: Mesh, parts: Sequence[Any]) -> Loss:
        """Make the loss of a job."""

    @abstractmethod
    def build_executor(
        self, job: Job, mesh: Mesh, parts: Sequence[Any], loss: Any, device: torch.device
    ) -> Executor:
        """Return the executor of passes for the job's layout."""

    @abstractmethod
    def build_loader(self, job: Job, tokenizer: Tokenizer, rows: range, split: str, **process: Any) -> Loader:
        """Return the loader of ``rows`` of every global batch.

        Args:
            job: the resolved job.
            tokenizer: the job's tokenizer.
            rows: rows of the global batch.
            split: ``train`` or ``validation``.
            process: ``wait_for_all`` and ``is_builder`` of ``harness.data.loader.build_loader``.
        """


def architecture_of(model: ModelConfig) -> Architecture:
    """Return the entry of a model."""
    entry: Architecture = ARCHITECTURES[model.architecture]()
    return entry


def resolve_model(model: ModelConfig) -> ModelConfig:
    """Return the model with derived fields, such as head_dim, set, after a check of its rules.

    Raises:
        ConfigError: the fields do not describe a model.
    """
    architecture = architecture_of(model)
    resolved = architecture.resolve(model)
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
    """Raise ConfigError for a model that makes pictures; ``does``: what only models of text do."""
    if architecture_of(model).takes_pictures:
        rule = f"model={model.name} makes pictures, and this command {does}"
        raise ConfigError("model.architecture", model.architecture, rule, works)


def check_data(job: Job) -> None:
    """Check that the data has batches that the model takes."""
    takes_pictures = architecture_of(job.model).takes_pictures
    for kind in sorted(job.data.kinds - {"mixture"}):
        if DATA_KINDS[kind].has_pictures != takes_pictures:
            works = [name for name in DATA_KINDS if DATA_KINDS[name].has_pictures == takes_pictures]
            rule = f"model={job.model.name} is a {job.model.architecture}, which does not train on this data"
            raise ConfigError("data.kind", kind, rule, works)
