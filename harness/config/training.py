"""Configuration of the training loop: length, batch, seed, validation and debugging."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from harness.config.data import DataConfig
from harness.config.evaluation import DATA, require_stride, require_tasks
from harness.config.fields import LARGEST_INTEGER, execution, label, numerics
from harness.config.registry import Registry
from harness.config.sizes import Sizes
from harness.util.errors import ConfigError, divisors

NON_FINITE = ("stop", "skip")
ATTENTION: Registry[Any] = Registry(
    "attention",
    {
        "sdpa": "harness.model.kernels:SdpaKernel",
        "flex": "harness.model.kernels:FlexKernel",
        "varlen": "harness.model.kernels:VarlenKernel",
    },
    field="training.attention",
    expects="harness.model.kernels:Kernel",
)
"""Backends of the attention operation."""
MATMUL_PRECISIONS = ("highest", "high")
DEFAULT_STEPS = 100
COUNT_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class TrainingConfig:
    """Length, batch and seed of a run."""

    steps: int | None = numerics(None, least=1)
    """Optimizer steps; null: as many as training.tokens needs, or 100."""
    tokens: int | float | str | None = numerics(None, id_omits_default=True)
    """Tokens to train, in place of training.steps: a number, also with K, M, B or T, like 20B. The run ends
    with the first step that reaches it. Resolving the job sets training.steps, and tokens to null."""
    seq_len: int = numerics(2048, least=1)
    """Tokens per sequence."""
    global_batch_size: int | None = numerics(None, least=1)
    """Sequences per optimizer step, over all ranks; null: local_batch_size on every data-parallel rank. With
    schedule.batch_size, that of the last phase."""
    local_batch_size: int | None = execution(None, least=1)
    """Sequences per data-parallel rank and forward pass; null: the rank's share of the batch in one pass, or,
    with schedule.batch_size, the most that divides the rank's share in every phase."""
    max_norm: float = numerics(1.0, least=0)
    """Clip gradients to this global 2-norm; 0 disables clipping."""
    loss_chunks: int = execution(1, least=1)
    """Chunks in which output projection and loss are computed, so that all logits are never in memory."""
    matmul_precision: str = numerics("highest", choices=MATMUL_PRECISIONS)
    """Precision of float32 matrix products: highest (float32), or high (TF32, on GPUs that have it)."""
    seed: int = numerics(42)
    """Seed of parameters and data order."""
    attention: str = execution("sdpa", choices=ATTENTION)
    """Backend of attention: ``sdpa``, ``flex`` (FlexAttention) or ``varlen`` (flash attention over
    concatenated documents). All compute the same. The last two need a GPU, and skip the masked blocks between
    documents. flex needs a head dimension of at least 16."""
    objective_options: dict[str, Any] = numerics(factory=dict, id_omits_default=True)
    """Options of what a model is trained on, for an architecture that another package has added."""
    gc_interval: int = execution(50, least=0)
    """Steps between garbage collections, at the same step on all ranks; 0: Python decides when to collect."""

    def check_device(self, *, on_cpu: bool) -> None:
        """Refuse an attention backend that cannot train on a CPU; each rank checks its own device again."""
        if on_cpu and self.attention in ("flex", "varlen"):
            rule = "trains on GPUs only, and the ranks compute on CPUs"
            raise ConfigError("training.attention", self.attention, rule, ["sdpa"])

    def resolve(self, replicas: int, scheduled: Sequence[int] = ()) -> TrainingConfig:
        """Return the options with the batch sizes set.

        Args:
            replicas: data-parallel ranks.
            scheduled: sequences per step in the phases of schedule.batch_size.

        Raises:
            ConfigError: a batch cannot be split evenly.
        """
        local, size = self.local_batch_size, self.global_batch_size
        if size is None:
            size = (local or 8) * replicas
        unit = replicas * (local or 1)
        sizes = [("training.global_batch_size", size), *(("schedule.batch_size", each) for each in scheduled)]
        for name, each in sizes:
            if each % replicas:
                below = each // unit * unit
                works = [number for number in (below, below + unit) if number]
                raise ConfigError(
                    name,
                    each,
                    f"must be a multiple of the data-parallel ranks, dp_replicate x dp_shard = {replicas}",
                    f"{', '.join(map(str, works))}, or {', '.join(map(str, divisors(each)))} "
                    "data-parallel ranks",
                )
        share = math.gcd(size, *scheduled) // replicas
        local = local or share
        if share % local:
            shares = f"training.global_batch_size={size} / {replicas} data-parallel ranks = {share}"
            if scheduled:
                batches = ", ".join(map(str, [*scheduled, size]))
                shares = f"a rank's share of every batch: {batches} / {replicas} data-parallel ranks"
            raise ConfigError(
                "training.local_batch_size",
                local,
                f"must divide {shares}",
                divisors(share),
            )
        return replace(self, local_batch_size=local, global_batch_size=size)

    def with_length(self, sizes: Sizes) -> TrainingConfig:
        """Return the options with steps set, and without tokens.

        Raises:
            ConfigError: both are given, or tokens is not a number of tokens.
        """
        if self.tokens is None:
            return self if self.steps is not None else replace(self, steps=DEFAULT_STEPS)
        tokens = parse_count("training.tokens", self.tokens)
        if self.steps is not None:
            rule = f"replaces training.steps, which is {self.steps}"
            raise ConfigError("training.tokens", self.tokens, rule, "training.steps=null, or no tokens")
        return replace(self, steps=sizes.steps_for(tokens), tokens=None)


def parse_count(name: str, value: int | float | str) -> int:
    """Return the number that ``1_000_000``, ``1e6``, ``1M`` or ``0.001B`` means.

    Args:
        name: dotted name of the field, for the error.
        value: the field's value.

    Raises:
        ConfigError: it is not an integer of at least 1.
    """
    text = str(value).strip()
    factor = COUNT_SUFFIXES.get(text[-1:].upper(), 1)
    try:
        count = Decimal(text[:-1] if factor > 1 else text) * factor
        is_count = count.is_finite() and 1 <= count <= LARGEST_INTEGER and count == int(count)
    except InvalidOperation:
        is_count = False
    if not is_count:
        raise ConfigError(name, text or "''", "must be an integer of at least 1", "20B, 500M or 1e9")
    return int(count)


@dataclass(frozen=True)
class ValidationConfig:
    """Loss on held-out samples."""

    interval: int = label(0, least=0)
    """Steps between validations (one more after the last step); 0 means none."""
    steps: int = label(10, least=1)
    """Global batches per validation."""
    options: dict[str, Any] = label(factory=dict)
    """Options of validation, for an architecture that another package has added."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation while training, as ``harness evaluate`` does it."""

    interval: int = label(0, least=0)
    """Steps between evaluations (one more after the last step); 0 means none."""
    tasks: list[str] = label(factory=lambda: ["data"])
    """Each is ``data`` (all held-out documents), or a ``.jsonl`` file of questions."""
    stride: int | None = label(None, least=1)
    """Task ``data``: tokens that each window of ``training.seq_len`` scores; null: all."""
    limit: int | None = label(None, least=1)
    """Use the first examples (or documents) of each task only; null: all."""

    def validate(self, data: DataConfig, seq_len: int) -> None:
        """Raise ConfigError for tasks that cannot run in the loop."""
        if not self.interval:
            return
        require_tasks("evaluation.tasks", self.tasks, lm_eval=False)
        require_stride("evaluation.stride", self.stride, seq_len)
        if DATA in self.tasks:
            if not data.has_text:
                rule = f"data.kind={data.kind} has no text"
                raise ConfigError("evaluation.tasks", DATA, rule, "a .jsonl file, or other data")
            if data.kind == "mixture":
                rule = "reads one source, and data.kind is mixture"
                works = "a .jsonl file, or validation.interval, which has the loss of each source"
                raise ConfigError("evaluation.tasks", DATA, rule, works)
            data.require_validation()


@dataclass(frozen=True)
class DebugConfig:
    """Determinism, checks that cost speed, and the reaction to numbers that are not finite."""

    deterministic: bool = execution(False)
    """Use only deterministic kernels: two runs of a job give bitwise the same numbers."""
    anomaly: bool = execution(False)
    """autograd's anomaly mode: stop at the backward function that returns NaN, and show its forward line."""
    nan: bool = execution(False)
    """Check every module's output and its gradient; stop at the first that is not finite, and name it."""
    flight_recorder: int = label(2000, least=0)
    """Collectives that each rank records, to be dumped if one takes too long; 0 disables the recorder."""
    non_finite: str = numerics("stop", choices=NON_FINITE)
    """If the loss or gradient norm is not finite: stop the run, or skip the update. Evidence is saved."""
    max_skipped_steps: int = numerics(10, least=1)
    """With skip: stop the run after more than this many consecutive skipped updates."""

    def validate(self, tp: int, compiled: bool) -> None:
        """Raise ConfigError for a mode that the rest of the job does not allow.

        Args:
            tp: tensor-parallel degree.
            compiled: whether blocks are compiled.
        """
        for name in ("anomaly", "nan"):
            if getattr(self, name) and compiled:
                rule = "compiled blocks cannot be inspected"
                raise ConfigError(f"debug.{name}", True, rule, "compile=off")
        if self.anomaly and tp > 1:
            rule = f"anomaly mode cannot inspect tensors that parallelism.tp={tp} shards"
            raise ConfigError("debug.anomaly", True, rule, "debug=nan, or parallelism.tp=1")
