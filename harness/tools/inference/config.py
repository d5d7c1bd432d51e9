"""A job that uses trained weights and trains nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Self

from harness.compose.overrides import FROM_CONFIG, typed_value
from harness.compose.resolve import resolve
from harness.config.fields import label
from harness.config.job import Job
from harness.util.errors import ConfigError

FIXED: dict[str, tuple[Any, str]] = {
    "precision.linear": ("none", "float8 products need many rows; a pass has few"),
    "compile.blocks": (False, "passes have sequences of many lengths, and are not compiled"),
    "model.moe.force_balance": (False, "is for measurements of training"),
    "cluster.kind": ("local", "starts no SLURM job; use torchrun inside of an allocation"),
}
"""Fields that must have one value, with the reason."""
ONE_POSITION = "generation computes one position at a time"
FIXED_TO_GENERATE: dict[str, tuple[Any, str]] = {
    "parallelism.pp": (1, f"{ONE_POSITION}, so all stages but one would wait"),
    "parallelism.cp": (1, f"{ONE_POSITION}, which cannot be split"),
    "training.attention": ("sdpa", "the cache has a kernel of its own"),
}
"""The same, for jobs with a cache."""


@dataclass(frozen=True)
class InferenceJob(Job):
    """A job whose model and tokenizer are those of a checkpoint."""

    ema: bool = label(False)
    """Use the moving average of the weights (optimizer.ema_decay) that the checkpoint has."""

    WEIGHTS: ClassVar[str] = ""
    """The field with the path of the weights."""
    GENERATES: ClassVar[bool] = True
    """Whether the job computes one position at a time, with a cache."""

    @classmethod
    def spelled_out(cls, overrides: Iterable[str]) -> list[str]:
        """Return overrides with ``checkpoint=PATH`` as the field it is short for, and the weights' model."""
        spelled = [
            f"{cls.WEIGHTS}={each.removeprefix('checkpoint=')}" if each.startswith("checkpoint=") else each
            for each in overrides
        ]
        if typed_value(spelled, cls.WEIGHTS) and typed_value(spelled, "model") is None:
            spelled.insert(0, f"model={FROM_CONFIG}")
        return spelled

    def resolve(self, *, launched_ranks: int | None = None, gpus: int | None = None) -> Self:
        """Return the job with derived fields set, after a check of every rule.

        Raises:
            ConfigError: naming the field, its value, the rule, and what would work.
        """
        fixed = FIXED | FIXED_TO_GENERATE if self.GENERATES else FIXED
        for name, (only, reason) in fixed.items():
            value = attrgetter(name)(self)
            if value != only:
                works = str(only).lower() if isinstance(only, bool) else only
                raise ConfigError(name, value, reason, [works])
        # An experiment's scheduled sizes need not fit sequences of other lengths.
        job = dataclasses.replace(
            self, schedule=dataclasses.replace(self.schedule, batch_size=[], seq_len=[])
        )
        if self.parallelism.pp == self.parallelism.cp == 1:
            # A generated position cannot be split, and every rank chooses from all logits.
            layout = dataclasses.replace(self.parallelism, sequence_parallel=False, loss_parallel=False)
            if self.model.moe.enabled and layout.tp > 1:
                layout = dataclasses.replace(layout, expert_tensor_parallel=True)
            job = dataclasses.replace(job, parallelism=layout)
        job = resolve(job, launched_ranks=launched_ranks, gpus=gpus)
        # Nothing is updated or reduced: weights are loaded in the format of their products, and held once.
        width = job.precision.param_dtype
        return dataclasses.replace(
            job, precision=dataclasses.replace(job.precision, master_dtype=width, reduce_dtype=width)
        )
