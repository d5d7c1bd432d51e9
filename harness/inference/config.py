"""A job that uses trained weights and trains nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Self

from harness.errors import ConfigError
from harness.job import Job
from harness.overrides import FROM_CONFIG, typed_value


@dataclass(frozen=True)
class InferenceJob(Job):
    """A job whose model and tokenizer are those of a checkpoint."""

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
        for name, value, only, reason in [
            *self._refused(),
            *(self._not_generated() if self.GENERATES else ()),
        ]:
            if value != only:
                works = str(only).lower() if isinstance(only, bool) else only
                raise ConfigError(name, str(value).lower() if value is True else value, reason, [works])
        job = self
        if self.parallelism.pp == self.parallelism.cp == 1:
            # A generated position cannot be split, and every rank chooses from all logits.
            layout = dataclasses.replace(self.parallelism, sequence_parallel=False, loss_parallel=False)
            if self.model.moe.enabled and layout.tp > 1:
                layout = dataclasses.replace(layout, expert_tensor_parallel=True)
            job = dataclasses.replace(self, parallelism=layout)
        return super(InferenceJob, job).resolve(launched_ranks=launched_ranks, gpus=gpus)

    def _refused(self) -> list[tuple[str, object, object, str]]:
        """Fields that must have one value: name, value, that value, reason."""
        return [
            (
                "precision.linear",
                self.precision.linear,
                "none",
                "float8 products need many rows; a pass has few",
            ),
            (
                "compile.blocks",
                self.compile.blocks,
                False,
                "passes have sequences of many lengths, and are not compiled",
            ),
            (
                "model.moe.force_balance",
                self.model.moe.force_balance,
                False,
                "is for measurements of training",
            ),
            (
                "cluster.kind",
                self.cluster.kind,
                "local",
                "starts no SLURM job; use torchrun inside of an allocation",
            ),
        ]

    def _not_generated(self) -> list[tuple[str, object, object, str]]:
        """Like ``_refused``, for jobs with a cache."""
        layout, one_token = self.parallelism, "generation computes one position at a time"
        return [
            ("parallelism.pp", layout.pp, 1, f"{one_token}, so all stages but one would wait"),
            ("parallelism.cp", layout.cp, 1, f"{one_token}, which cannot be split"),
            ("training.attention", self.training.attention, "sdpa", "the cache has a kernel of its own"),
        ]
