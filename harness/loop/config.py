"""Configuration of the training loop: length, batch, seed, validation and debugging."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config import execution, label, numerics
from harness.errors import ConfigError

NON_FINITE = ("stop", "skip")
ATTENTION = ("sdpa", "flex", "varlen")
MATMUL_PRECISIONS = ("highest", "high")


@dataclass
class TrainingConfig:
    """Length, batch and seed of a run."""

    steps: int = numerics(1000)
    """Optimizer steps."""
    seq_len: int = numerics(2048)
    """Tokens per sequence."""
    global_batch_size: int | None = numerics(None)
    """Sequences per optimizer step, over all ranks; null: local_batch_size on every data-parallel rank."""
    local_batch_size: int | None = execution(None)
    """Sequences per data-parallel rank and forward pass; null: the rank's share of the batch in one pass."""
    max_norm: float = numerics(1.0)
    """Clip gradients to this global 2-norm; 0 disables clipping."""
    loss_chunks: int = execution(1)
    """Chunks in which output projection and loss are computed, so that all logits are never in memory."""
    matmul_precision: str = numerics("highest")
    """Precision of float32 matrix products: highest (float32), or high (TF32, on GPUs that have it)."""
    seed: int = numerics(42)
    """Seed of parameters and data order."""
    attention: str = execution("sdpa")
    """Backend of attention: ``sdpa``, ``flex`` (FlexAttention) or ``varlen`` (flash attention over
    concatenated documents). All compute the same. The last two need a GPU, and skip the masked blocks between
    documents. flex needs a head dimension of at least 16."""
    gc_interval: int = execution(50)
    """Steps between garbage collections, at the same step on all ranks; 0: Python decides when to collect."""

    def validate(self) -> None:
        """Raises ConfigError for lengths that are not positive."""
        for name in ("steps", "seq_len", "loss_chunks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"training.{name}", getattr(self, name), "must be at least 1")
        for name in ("global_batch_size", "local_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"training.{name}", value, "must be at least 1, or null")
        if self.attention not in ATTENTION:
            raise ConfigError("training.attention", self.attention, "no such backend", ATTENTION)
        if self.matmul_precision not in MATMUL_PRECISIONS:
            rule = "no such precision"
            raise ConfigError("training.matmul_precision", self.matmul_precision, rule, MATMUL_PRECISIONS)
        for name in ("max_norm", "gc_interval"):
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    f"training.{name}", getattr(self, name), "must not be negative; 0 switches it off"
                )


@dataclass
class ValidationConfig:
    """Loss on held-out samples."""

    interval: int = label(0)
    """Steps between validations (one more after the last step); 0 means none."""
    steps: int = label(10)
    """Global batches per validation."""

    def validate(self) -> None:
        """Raises ConfigError for negative counts."""
        if self.interval < 0:
            raise ConfigError("validation.interval", self.interval, "must not be negative")
        if self.steps < 1:
            raise ConfigError("validation.steps", self.steps, "must be at least 1")


@dataclass
class DebugConfig:
    """Determinism, checks that cost speed, and the reaction to numbers that are not finite."""

    deterministic: bool = execution(False)
    """Use only deterministic kernels: two runs of a job give bitwise the same numbers."""
    anomaly: bool = execution(False)
    """autograd's anomaly mode: stop at the backward function that returns NaN, and show its forward line."""
    nan: bool = execution(False)
    """Check every module's output and its gradient; stop at the first that is not finite, and name it."""
    flight_recorder: int = label(2000)
    """Collectives that each rank records, to be dumped if one takes too long; 0 disables the recorder."""
    non_finite: str = numerics("stop")
    """If the loss or gradient norm is not finite: stop the run, or skip the update. Evidence is saved."""
    max_skipped_steps: int = numerics(10)
    """With skip: stop the run after more than this many consecutive skipped updates."""

    def validate(self, tp: int, compiled: bool) -> None:
        """Check every field, also against the rest of the job.

        Args:
            tp: tensor-parallel degree.
            compiled: whether blocks are compiled.

        Raises:
            ConfigError: an unknown policy, or a mode that the job does not allow.
        """
        for name in ("anomaly", "nan"):
            if getattr(self, name) and compiled:
                rule = "compiled blocks cannot be inspected"
                raise ConfigError(f"debug.{name}", True, rule, "compile=off")
        if self.anomaly and tp > 1:
            rule = f"anomaly mode cannot inspect tensors that parallelism.tp={tp} shards"
            raise ConfigError("debug.anomaly", True, rule, "debug=nan, or parallelism.tp=1")
        if self.non_finite not in NON_FINITE:
            raise ConfigError("debug.non_finite", self.non_finite, "no such policy", NON_FINITE)
        if self.flight_recorder < 0:
            works = "0 to switch it off, 2000"
            raise ConfigError("debug.flight_recorder", self.flight_recorder, "must not be negative", works)
        if self.max_skipped_steps < 1:
            raise ConfigError("debug.max_skipped_steps", self.max_skipped_steps, "must be at least 1")
