"""What the training loop is told: how long, how much at once, from which seed."""

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
    """Sequences per data-parallel rank and forward pass; null means all of the rank's share at once."""
    max_norm: float = numerics(1.0)
    """Gradients are clipped to this global 2-norm; 0 leaves them alone."""
    loss_chunks: int = execution(1)
    """Pieces in which output projection and loss are computed together, so that logits never stand whole."""
    matmul_precision: str = numerics("highest")
    """How float32 matrix products are computed: highest (float32), or high (TF32, on GPUs that have it)."""
    seed: int = numerics(42)
    """Seed of parameters and data order."""
    attention: str = execution("sdpa")
    """Backend of attention: ``sdpa``, ``flex`` (FlexAttention) or ``varlen`` (flash attention over documents
    laid end to end). All compute the same; the last two need a GPU, and skip what documents do not see. flex
    takes heads of 16 values or more."""
    gc_interval: int = execution(50)
    """Steps between garbage collections, which all ranks do together; 0 leaves it to Python."""

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
    """Global batches per validation; every rank does the same number."""

    def validate(self) -> None:
        """Raises ConfigError for negative counts."""
        if self.interval < 0:
            raise ConfigError("validation.interval", self.interval, "must not be negative")
        if self.steps < 1:
            raise ConfigError("validation.steps", self.steps, "must be at least 1")


@dataclass
class DebugConfig:
    """What to do for certainty at the cost of speed, and when numbers go wrong."""

    deterministic: bool = execution(False)
    """Use only deterministic kernels: two runs of a job give bitwise the same numbers."""
    anomaly: bool = execution(False)
    """autograd's anomaly mode: stop at the backward function that gives NaN, and show its line of forward."""
    nan: bool = execution(False)
    """Look at every module's output and gradient, and stop at the first that is not finite, by name."""
    flight_recorder: int = label(2000)
    """Collectives that each rank remembers, to be written down if one takes too long; 0 writes nothing."""
    non_finite: str = numerics("stop")
    """When loss or gradient norm are not finite: stop the run, or skip the update; evidence is kept."""
    max_skipped_steps: int = numerics(10)
    """With skip: consecutive skipped updates after which the run stops all the same."""

    def validate(self, tp: int, compiled: bool) -> None:
        """Checks every field, and what the rest of the job allows.

        Args:
            tp: ranks of tensor parallel.
            compiled: whether blocks are compiled.

        Raises:
            ConfigError: a policy that is not known, or a mode that cannot be had.
        """
        for name in ("anomaly", "nan"):
            if getattr(self, name) and compiled:
                rule = "what happens inside of compiled blocks cannot be looked at"
                raise ConfigError(f"debug.{name}", True, rule, "compile=off")
        if self.anomaly and tp > 1:
            rule = f"autograd cannot look into tensors that parallelism.tp={tp} splits"
            raise ConfigError("debug.anomaly", True, rule, "debug=nan, or parallelism.tp=1")
        if self.non_finite not in NON_FINITE:
            raise ConfigError("debug.non_finite", self.non_finite, "no such policy", NON_FINITE)
        if self.flight_recorder < 0:
            works = "0 to switch it off, 2000"
            raise ConfigError("debug.flight_recorder", self.flight_recorder, "must not be negative", works)
        if self.max_skipped_steps < 1:
            raise ConfigError("debug.max_skipped_steps", self.max_skipped_steps, "must be at least 1")
