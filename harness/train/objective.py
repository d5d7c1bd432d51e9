"""Objectives of kinds of models: their loader, loss and passes (no torch until they are built).

``model.architecture`` names an entry here too. An architecture without one cannot be trained.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.config.data_kinds import errors_of_set
from harness.config.registry import Registry, resolve_options
from harness.metrics.columns import Metric
from harness.util.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from harness.config.data import DataConfig
    from harness.config.job import Job
    from harness.config.model import ModelConfig
    from harness.config.training import TrainingConfig, ValidationConfig
    from harness.data.loader import Loader
    from harness.data.tokenizer import Tokenizer
    from harness.parallelism.execute import Executor
    from harness.parallelism.loss import Loss, TokenLoss
    from harness.parallelism.mesh import Mesh


class Objective(ABC):
    """How models of an architecture are trained. Instances have no state."""

    options: type | None = None
    """Dataclass of ``training.objective_options``; None: there are none."""
    validation_options: type | None = None
    """Dataclass of ``validation.options``; None: there are none."""
    metrics: Sequence[Metric] = ()
    """Columns that ``rates`` returns."""

    def rates(self, samples_per_second: float | None) -> dict[str, float | None]:
        """Return the throughput in units of the model's own, beside tokens; None is unknown."""
        return {}

    def resolve(
        self, training: TrainingConfig, validation: ValidationConfig, model: ModelConfig
    ) -> dict[str, Any]:
        """Return ``training`` and ``validation`` with the defaults of their options."""
        owner = f"model.architecture={model.architecture}"
        options = resolve_options(
            training.objective_options, self.options, "training.objective_options", owner
        )
        of_validation = resolve_options(
            validation.options, self.validation_options, "validation.options", owner
        )
        return {
            "training": replace(training, objective_options=options),
            "validation": replace(validation, options=of_validation),
        }

    def check(self, job: Job) -> None:  # noqa: B027
        """Raise ConfigError for parts of the job that such a model does not allow."""

    def for_generation(
        self, data: DataConfig, training: TrainingConfig, model: ModelConfig
    ) -> dict[str, Any]:
        """Return parts of a job that generates and trains nothing, with values that the model allows."""
        return {}

    def observers(self, job: Job) -> Sequence[str]:
        """Names of more observers of the training loop, which such a model has (``harness.observer``)."""
        return ()

    @abstractmethod
    def build_loader(
        self, job: Job, tokenizer: Tokenizer, rows: range, split: str, **process: Any
    ) -> Loader:
        """Return the loader of ``rows`` of every global batch.

        Args:
            process: ``wait_for_all`` and ``is_builder`` of ``harness.data.samples.Reading``.
        """

    @abstractmethod
    def build_loss(self, job: Job, mesh: Mesh, parts: Sequence[Any]) -> Loss:
        """Make the loss of a job."""

    @abstractmethod
    def build_executor(
        self, job: Job, mesh: Mesh, parts: Sequence[Any], loss: Any, device: torch.device
    ) -> Executor:
        """Return the executor of passes for the job's layout."""


class NextToken(Objective):
    """The decoder's: predict the next token."""

    def build_loss(self, job: Job, mesh: Mesh, parts: Sequence[Any]) -> TokenLoss:
        from harness.parallelism.loss import build_loss

        return build_loss(job, mesh, parts)

    def build_executor(
        self, job: Job, mesh: Mesh, parts: Sequence[Any], loss: TokenLoss, device: torch.device
    ) -> Executor:
        from harness.parallelism.execute import build_executor

        return build_executor(job, mesh, parts, loss, device)

    def build_loader(
        self, job: Job, tokenizer: Tokenizer, rows: range, split: str, **process: Any
    ) -> Loader:
        from harness.config.training import Sizes
        from harness.data.kinds import build_loader
        from harness.data.samples import Reading

        seq_len = job.training.seq_len
        batch_size = job.global_batch_size
        reading = Reading(
            job.data,
            tokenizer,
            seq_len,
            batch_size,
            job.training.seed,
            rows,
            split,
            job.model.vocab_size,
            job.sizes if split == "train" else Sizes(batch_size, seq_len),
            **process,
        )
        return build_loader(reading)


OBJECTIVES: Registry[type[Objective]] = Registry(
    "objective",
    {"decoder": NextToken},
    field="model.architecture",
    expects="harness.train.objective:Objective",
)
"""Objectives by the name of the architecture."""


def objective_of(model: ModelConfig) -> Objective:
    """Return the entry of a model."""
    return OBJECTIVES[model.architecture]()


def loader_of(job: Job, tokenizer: Tokenizer, rows: range, split: str = "train") -> Loader:
    """Return a loader of the given rows of every global batch.

    Raises:
        ConfigError: it would not leave out the batches that the job leaves out.
    """
    from harness.train.setup import local_rank

    loader = objective_of(job.model).build_loader(
        job, tokenizer, rows, split, wait_for_all=_wait_for_all, is_builder=local_rank() == 0
    )
    if split == "train" and not loader.leaves_out:
        rule = f"{type(loader).__name__} of data.kind={job.data.kind} leaves out no batches"
        if job.data.leave_out:
            raise ConfigError("data.leave_out", job.data.leave_out, rule, "[]")
        if job.debug.spikes == "rewind":
            raise ConfigError("debug.spikes", "rewind", rule, ["log", "skip"])
    return loader


def validation_loaders(job: Job, tokenizer: Tokenizer, rows: range) -> dict[str, Loader]:
    """Return a loader of the given rows of each validation set, by name."""
    loaders = {}
    for name, own in job.validation_sets.items():
        with errors_of_set(name):
            loaders[name] = loader_of(replace(job, data=own), tokenizer, rows, "validation")
    return loaders


_ARRIVED = "tokens are there"
_LONGEST_POLL_SECONDS = 1.0


def _wait_for_all() -> None:
    """Wait until every rank has called this, however long one of them tokenizes.

    Uses a counter in the rendezvous store. A collective would time out and end the job.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    if not dist.is_initialized():
        return
    store = _get_default_store()
    ranks = dist.get_world_size()
    pause = 0.01
    arrived = store.add(_ARRIVED, 1)
    # The counter covers all calls so far. No rank calls again before all ranks have made the same
    # call.
    expected = -(-arrived // ranks) * ranks
    while arrived < expected:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)
        arrived = store.add(_ARRIVED, 0)
