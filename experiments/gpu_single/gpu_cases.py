"""What is measured on a GPU: shapes, ways to run them, what each takes of the memory, and the targets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.compose.composer import compose_job
from harness.config.fields import with_value
from harness.config.job import Job
from harness.model.accounting import block_parameters
from harness.util.tables import GIB

WARMUP_STEPS = 5
LOSS_CHUNKS = 8


@dataclass(frozen=True)
class Shape:
    """A model and a sequence length; not ``whole``: as many of its layers as fit."""

    model: str
    seq_len: int
    whole: bool = True


SHAPES = {
    "1B": Shape("llama32_1b", 8192),
    "3B": Shape("llama32_3b", 8192),
    "8B": Shape("llama3_8b", 8192, whole=False),
    "tiny": Shape("llama3_tiny", 64, whole=False),
}
DEFAULT_SHAPES = ("1B", "3B", "8B")
TARGET_SHAPE = "8B"

# The hungriest first: what does not fit shows in the first run of a round.
MODES = {
    "bf16": ["precision=bf16", "compile=off"],
    "bf16_compile": ["precision=bf16", "compile=on"],
    "float8_tensorwise": ["precision=float8_tensorwise", "compile=on"],
    "float8_rowwise": ["precision=float8_rowwise", "compile=on"],
}
BASELINE = "bf16_compile"
ACTIVATION_CHECKPOINTS = ("none", "selective_op", "full")


@dataclass(frozen=True)
class Targets:
    """The project's targets on an H200, at the shape of Llama 3 8B."""

    device: str = "H200"
    mfu: float = 0.55
    float8: float = 1.25
    torchtitan: float = 1.05


@dataclass(frozen=True)
class Case:
    """One way to run one shape."""

    shape: str
    activation_checkpoint: str
    mode: str
    n_layers: int | None = None
    """Layers of the model; None: all of them."""
    batch: int = 1
    steps: int = 20
    device: str = "cuda"

    @property
    def compiled(self) -> bool:
        return "compile=on" in MODES[self.mode]

    @property
    def precision(self) -> str:
        """The name of the precision group's option."""
        return MODES[self.mode][0].removeprefix("precision=")

    def overrides(self) -> list[str]:
        """The job, as ``harness.train`` takes it."""
        shape = SHAPES[self.shape]
        # Where there is no float8, its rounding can still be tried.
        emulated = self.device == "cpu" and self.precision.startswith("float8")
        return [
            f"model={shape.model}",
            *([f"model.n_layers={self.n_layers}"] if self.n_layers is not None else []),
            *MODES[self.mode],
            *(["precision.emulate=true"] if emulated else []),
            f"activation_checkpoint={self.activation_checkpoint}",
            *("data=synthetic", "tokenizer=bytes", "checkpoint=disabled", f"cluster.device={self.device}"),
            *(f"training.seq_len={shape.seq_len}", f"training.global_batch_size={self.batch}"),
            *(f"training.steps={self.steps}", f"training.loss_chunks={LOSS_CHUNKS}"),
            *(f"metrics.warmup_steps={WARMUP_STEPS}", f"metrics.log_interval={self.steps}"),
            "metrics.console=none",
        ]

    def job(self) -> Job:
        """The composed job.

        Raises:
            UserError: this machine, or this version, cannot do it.
        """
        return compose_job(self.overrides())

    def with_layers(self, n_layers: int | None) -> Case:
        return replace(self, n_layers=n_layers)


def estimated_bytes(job: Job, *, whole_logits: bool) -> float:
    """Device memory that a job of one rank will take, roughly.

    Args:
        job: one rank, computing in bfloat16.
        whole_logits: count the logits of all tokens at once, whatever the job says, as torchtitan has them.
    """
    model, tokens = job.model, job.local_batch_size * job.training.seq_len
    block = block_parameters(model)
    tables = model.vocab_size * model.dim * (1 if model.tied_embeddings else 2)
    # Masters, gradients and both moments of AdamW, all float32.
    state = 16 * (model.n_layers * block + tables)
    # bfloat16 copies of the parameters in use, and their gradients: the tables, and two blocks in flight.
    copies = (2 + 2) * (tables + 2 * block)
    # Logits in bfloat16, their float32 copy, log-probabilities and gradient (harness/parallelism/loss.py).
    chunks = 1 if whole_logits else job.training.loss_chunks
    logits = 12 * tokens / chunks * model.vocab_size
    kept = model.n_layers * kept_per_token(job) + block_activations(job)
    return state + copies + logits + 2 * tokens * kept + 1.5 * GIB


def block_activations(job: Job) -> int:
    """Numbers that one block keeps for backward, per token, without recomputation.

    Inputs of the norms and their outputs, queries, keys, values, what attention gives, and four of the
    feed-forward's width: both halves of SwiGLU, its activation, and the product.
    """
    model = job.model
    kv_width = model.n_kv_heads * model.head_width
    return 6 * model.dim + 2 * kv_width + 4 * model.ffn_hidden_dim


def kept_per_token(job: Job) -> int:
    """The same under the job's activation checkpointing."""
    model, mode = job.model, job.activation_checkpoint.mode
    kv_width = model.n_kv_heads * model.head_width
    if mode == "full":
        return model.dim
    if mode == "selective_op":
        # The block's input, what attention gives, and every second matrix product.
        return 2 * model.dim + (3 * model.dim + 2 * kv_width + 2 * model.ffn_hidden_dim) // 2
    return block_activations(job)


def layers_that_fit(case: Case, memory_bytes: float, *, whole_logits: bool) -> int:
    """The most layers of a case's model whose estimate leaves a twelfth of the memory free; 0: not one."""
    job = case.with_layers(None).job()
    for n_layers in range(job.model.n_layers, 0, -1):
        fewer = with_value(job, "model.n_layers", n_layers)
        if estimated_bytes(fewer, whole_logits=whole_logits) <= memory_bytes * 11 / 12:
            return n_layers
    return 0
