"""Configuration of the training loop: length, batch, seed, validation, debugging, compiling, recomputing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from importlib.metadata import entry_points
from typing import Any

from harness.config.data import DataConfig, ValidationSet
from harness.config.data_kinds import resolve_each
from harness.config.fields import (
    LARGEST_INTEGER,
    Switch,
    added_execution,
    added_numerics,
    execution,
    label,
    numerics,
)
from harness.config.model import EXPERTS, ROUTED
from harness.config.registry import Registry
from harness.util.errors import ConfigError
from harness.util.words import plural

Changes = Sequence[tuple[int, int]]
"""``(last step, size)`` of the phases before the final size, in order."""


@dataclass(frozen=True)
class Phase:
    """Consecutive steps of one size."""

    first_step: int
    last_step: int | None
    """None: the end of the run."""
    batch_size: int
    """Sequences per step, over all ranks."""
    seq_len: int
    """Tokens per sequence."""

    @property
    def tokens(self) -> int:
        return self.batch_size * self.seq_len

    def steps_until(self, step: int) -> int:
        last = step if self.last_step is None else min(self.last_step, step)
        return max(0, last - self.first_step + 1)

    def begin(self, position: int) -> int:
        """Return the position at which a step begins if the step before it ended at ``position``.

        It is a multiple of seq_len, so that no piece crosses a sample: less than one piece is left
        out.
        """
        return -(-position // self.seq_len) * self.seq_len

    def share(self, rows: range, batch_size: int) -> range:
        """Return the rows of a rank that has ``rows`` of a batch of ``batch_size``.

        It is about the same fraction: row j of this phase belongs to row j * batch_size // B of
        that batch, where B is the phase's size.
        """
        return range(
            -(-rows.start * self.batch_size // batch_size),
            -(-rows.stop * self.batch_size // batch_size),
        )


def rows_of_rank(rank: int, ranks: int, batch_size: int) -> range:
    """Rows of a global batch that a data-parallel rank has: as many as the others, or one more."""
    return range(rank * batch_size // ranks, (rank + 1) * batch_size // ranks)


def fewest_and_most_rows(ranks: int, phase: Phase, batch_size: int) -> tuple[int, int]:
    """Rows of the emptiest and of the fullest rank in a phase; ``batch_size`` is the final one."""
    if batch_size % ranks == 0 or batch_size == phase.batch_size:
        return phase.batch_size // ranks, -(-phase.batch_size // ranks)
    shares = [
        len(phase.share(rows_of_rank(rank, ranks, batch_size), batch_size)) for rank in range(ranks)
    ]
    return min(shares), max(shares)


class Sizes:
    """Sizes of all steps of a run.

    Args:
        batch_size: final number of sequences per step.
        seq_len: final tokens per sequence, T.
        batch_sizes: numbers of sequences before.
        seq_lens: tokens per sequence before; each divides T.
    """

    def __init__(
        self, batch_size: int, seq_len: int, batch_sizes: Changes = (), seq_lens: Changes = ()
    ) -> None:
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.phases: list[Phase] = []
        first = 1
        for last in sorted({last for last, _ in (*batch_sizes, *seq_lens)}):
            sizes = _size_at(first, batch_sizes, batch_size), _size_at(first, seq_lens, seq_len)
            self.phases.append(Phase(first, last, *sizes))
            first = last + 1
        self.phases.append(Phase(first, None, batch_size, seq_len))

    @property
    def lengths(self) -> list[int]:
        return list(dict.fromkeys(phase.seq_len for phase in self.phases))

    def at(self, step: int) -> Phase:
        return next(
            phase for phase in self.phases if phase.last_step is None or step <= phase.last_step
        )

    def changes_length(self, step: int) -> bool:
        """Whether the sequences of a step have another length than those of the step before."""
        return step > 1 and self.at(step).seq_len != self.at(step - 1).seq_len

    def tokens(self, steps: int) -> int:
        """Return the tokens trained in the first ``steps`` steps."""
        return sum(phase.steps_until(steps) * phase.tokens for phase in self.phases)

    def steps_for(self, tokens: int) -> int:
        """Return the smallest number of steps that train at least ``tokens`` tokens."""
        done = 0
        for phase in self.phases:
            steps = -(-(tokens - done) // phase.tokens)
            if phase.last_step is None or steps <= phase.steps_until(phase.last_step):
                break
            done += phase.steps_until(phase.last_step) * phase.tokens
        return phase.first_step - 1 + steps

    def position(self, steps: int) -> int:
        """Return the position after the first ``steps`` steps."""
        position = 0
        for phase in self.phases:
            if number := phase.steps_until(steps):
                position = phase.begin(position) + number * phase.tokens
        return position


def _size_at(step: int, changes: Changes, final: int) -> int:
    return next((size for last, size in changes if step <= last), final)


def require_stride(field: str, stride: int | None, window: int) -> None:
    """Raise ConfigError if windows would leave out tokens."""
    if stride is not None and stride > window:
        raise ConfigError(
            field, stride, f"exceeds the window of {window} tokens", f"at most {window}"
        )


NON_FINITE = ("stop", "skip")
SPIKES = ("off", "log", "skip", "rewind")
FINDS_SPIKES = Switch("debug.spikes", "debug.spikes=log", SPIKES[1:].__contains__)
REWINDS = Switch("debug.spikes", on="rewind")
ROUTINGS = ("uniform", "zipf", "one_hot", "drifting")
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
FLASH = ("default", "FA3", "FA4")
DELTA_RULES = ("plain", "fla")
OBSERVERS: Registry[Any] = Registry(
    "observer",
    {
        "phases": "harness.train.observers.phases:PhaseLog",
        "profiler": "harness.train.observers.profiler:Profiling",
        "flight_recorder": "harness.train.observers.flight_recorder:FlightRecorder",
        "nan_watch": "harness.train.non_finite:NanWatch",
        "tensor_values": "harness.train.observers.tensor_values:TensorValues",
        "activation_values": "harness.train.observers.tensor_values:ActivationValues",
        "memory": "harness.train.observers.values:Memory",
        "validation": "harness.train.observers.values:Validation",
        "evaluation": "harness.tools.inference.scoring:EvaluationInLoop",
        "rank_metrics": "harness.train.observers.values:RankMetrics",
    },
    field="training.observers",
    expects="harness.train.observer:Observer",
    has_files=True,
)
"""Observers of the training loop. Fields of the job add those that are built in."""
MATMUL_PRECISIONS = ("highest", "high")
DEFAULT_STEPS = 100
DEFAULT_LOCAL_BATCH = 8
COUNT_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class TrainingConfig:
    """Length, batch and seed of a run."""

    steps: int | None = numerics(None, least=1)
    """Optimizer steps; null: as many as training.tokens needs, or 100."""
    tokens: int | float | str | None = added_numerics(None)
    """Tokens to train, in place of training.steps: a number, also with K, M, B or T, like 20B. The run ends
    with the first step that reaches it. Resolving the job sets training.steps, and tokens to null."""
    seq_len: int = numerics(2048, least=1)
    """Tokens per sequence."""
    global_batch_size: int | None = numerics(None, least=1)
    """Sequences per optimizer step, over all ranks; null: local_batch_size on every data-parallel
    rank. With schedule.batch_size, that of the last phase. If the ranks do not divide it, some have
    a row more, and the others an empty one, which has no labels, goes to no expert and does not
    count."""
    local_batch_size: int | None = execution(None, least=1)
    """Sequences per data-parallel rank and forward pass; null: the fullest rank's share of the batch
    in one pass, or, with schedule.batch_size, the most that divides its share in every phase. Where
    it does not divide the share, the last pass is filled up with empty rows."""
    max_norm: float = numerics(1.0, least=0)
    """Clip gradients to this global 2-norm; 0 disables clipping."""
    loss_chunks: int = execution(1, least=1)
    """Chunks in which output projection and loss are computed, so that all logits are never in
    memory."""
    z_loss: float = added_numerics(0.0, least=0)
    """Coefficient of the mean over tokens of log(Z)^2, where Z is the softmax's normalizer (PaLM,
    arXiv:2204.02311, section 5: 1e-4). It keeps logits near 0. It changes gradients and is not part of
    the logged loss. The output projection then computes the loss, as with loss_chunks. 0: none."""
    matmul_precision: str = numerics("highest", choices=MATMUL_PRECISIONS)
    """Precision of float32 matrix products: highest (float32), or high (TF32, on GPUs that have
    it)."""
    seed: int = numerics(42)
    """Seed of parameters and data order."""
    attention: str = execution("sdpa", choices=ATTENTION)
    """Backend of attention: ``sdpa``, ``flex`` (FlexAttention) or ``varlen`` (flash attention over
    concatenated documents). All compute the same. The last two need a GPU, and skip the masked
    blocks between documents. flex needs a head dimension of at least 16."""
    flash: str = added_execution("default", choices=FLASH)
    """Flash attention of sdpa, varlen and the ring: torch's (default; sdpa prefers cuDNN's); FA3, of package
    flash_attn_interface, for Hopper; or FA4, of flash_attn.cute, for Hopper and Blackwell."""
    delta_rule: str = added_execution("plain", choices=DELTA_RULES)
    """The operation of layers of Gated DeltaNet: ``plain`` torch, in float32; or ``fla``, kernels of package
    flash-linear-attention, for GPUs. Both compute the same; fla keeps values in the 16-bit format of the
    precision, does not know documents and is not compiled."""
    objective_options: dict[str, Any] = added_numerics(factory=dict)
    """Options of the objective, for an architecture that another package has added."""
    gc_interval: int = execution(50, least=0)
    """Steps between garbage collections, at the same step on all ranks; 0: Python decides when to
    collect."""
    observers: list[str] = label(factory=list, choices=OBSERVERS)
    """More observers of the loop, by name or as FILE.py:NAME. Packages can add observers."""
    observer_digests: list[str] = added_numerics(factory=list)
    """Digests of the files of observers, which resolving the job sets."""

    @property
    def loss_in_head(self) -> bool:
        """Whether the output projection computes the loss, with its gradients."""
        return self.loss_chunks > 1 or self.z_loss > 0

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
        """
        local = self.local_batch_size
        size = self.global_batch_size
        if size is None:
            of_rank = local or DEFAULT_LOCAL_BATCH
            size = of_rank * replicas
        batches = [("training.global_batch_size", size)]
        batches += [("schedule.batch_size", batch) for batch in scheduled]
        shares = []
        for name, batch in batches:
            fewest, most = fewest_and_most_rows(replicas, Phase(1, None, batch, self.seq_len), size)
            if not fewest:
                degrees = f"dp_replicate x dp_shard = {replicas}"
                rule = f"must have a row for each of the data-parallel ranks, {degrees}"
                works = f"{replicas}, or at most {plural(batch, 'data-parallel rank')}"
                raise ConfigError(name, batch, rule, works)
            shares.append(most)
        local = local or math.gcd(*shares)
        observers = [OBSERVERS.recorded(name) for name in self.observers]
        digests = [file.digest for name in observers if (file := OBSERVERS.file(name))]
        if self.observer_digests not in ([], digests):
            rule = "must be those of the files in training.observers"
            raise ConfigError("training.observer_digests", self.observer_digests, rule, [digests])
        return replace(
            self,
            local_batch_size=local,
            global_batch_size=size,
            observers=observers,
            observer_digests=digests,
        )


def parse_count(name: str, value: int | float | str) -> int:
    """Return the number that ``1_000_000``, ``1e6``, ``1M`` or ``0.001B`` means."""
    text = str(value).strip()
    factor = COUNT_SUFFIXES.get(text[-1:].upper(), 1)
    try:
        count = Decimal(text[:-1] if factor > 1 else text) * factor
        is_count = count.is_finite() and 1 <= count <= LARGEST_INTEGER and count == int(count)
    except InvalidOperation:
        is_count = False
    if not is_count:
        raise ConfigError(
            name, text or "''", "must be an integer of at least 1", "20B, 500M or 1e9"
        )
    return int(count)


VALIDATION = Switch("validation.interval", "validation.interval=100")
EVALUATION = Switch("evaluation.interval", "evaluation.interval=100")


@dataclass(frozen=True)
class ValidationConfig:
    """Loss on held-out samples."""

    interval: int = label(0, least=0)
    """Steps between validations (one more after the last step); 0 means none."""
    steps: int = label(10, least=1, needs=VALIDATION)
    """Global batches per validation."""
    sets: dict[str, ValidationSet] = label(factory=dict, needs=VALIDATION)
    """More held-out documents by name, each set with the fields of ``data``, such as
    `{code: {kind: local, paths: [code/*.txt]}}`. No document of a set is left out of it; a validation
    takes the first ``steps`` batches of each, and the job's batch size. A set has the column
    ``validation_loss.NAME``. With sets, ``data`` itself need not hold out documents."""
    options: dict[str, Any] = label(factory=dict)
    """Options of validation, for an architecture that another package has added."""

    def resolve(self) -> ValidationConfig:
        """Return validation with the defaults of the options of its sets."""
        return replace(self, sets=resolve_each("validation.sets", self.sets))


@dataclass(frozen=True)
class EvaluationConfig:
    """Loss of all held-out documents while training, as ``harness evaluate`` computes it."""

    interval: int = label(0, least=0)
    """Steps between evaluations (one more after the last step); 0 means none."""
    stride: int | None = label(None, least=1, needs=EVALUATION)
    """Tokens that each window of ``training.seq_len`` scores; null: all."""
    limit: int | None = label(None, least=1, needs=EVALUATION)
    """Use the first documents only; null: all."""

    def validate(self, data: DataConfig, seq_len: int) -> None:
        if not self.interval:
            return
        require_stride("evaluation.stride", self.stride, seq_len)
        if not data.has_text:
            rule = f"data.kind={data.kind} has no text"
            raise ConfigError("evaluation.interval", self.interval, rule, "0, or other data")
        if data.sources:
            rule = f"reads one source, and data.kind is {data.kind}"
            works = "0, or validation.interval, which has the loss of each source"
            raise ConfigError("evaluation.interval", self.interval, rule, works)
        data.require_validation()


@dataclass(frozen=True)
class DebugConfig:
    """Determinism, checks that cost speed, and the reaction to spikes and numbers that are not finite."""

    deterministic: bool = execution(False)
    """Use only deterministic kernels: two runs of a job give bitwise the same numbers."""
    anomaly: bool = execution(False)
    """autograd's anomaly mode: stop at the backward function that returns NaN, and show its forward
    line."""
    nan: bool = execution(False)
    """Check every module's output and its gradient; stop at the first that is not finite, and name
    it."""
    flight_recorder: int = label(2000, least=0)
    """Collectives that each rank records, to be dumped if one takes too long; 0 disables the
    recorder."""
    non_finite: str = numerics("stop", choices=NON_FINITE)
    """If the loss or gradient norm is not finite: stop the run, or skip the update, at most ten in a row.
    Evidence is saved."""
    spikes: str = added_numerics("off", choices=SPIKES)
    """What follows a spike, a step whose loss or gradient norm is far above the steps before. log: a row with
    its z-scores. skip: its update is skipped too, at most ten in a row. rewind: the run goes back to its
    newest checkpoint, and leaves out the step's batch for ever. skip and rewind save evidence."""
    spike_zscore: float = added_numerics(6.0, above=0, needs=FINDS_SPIKES)
    """A spike exceeds the median of `spike_window` steps by so many robust standard deviations: 1.4826 times
    the median distance from the median. OLMo's SkipStepOptimizer takes 6, and 128 steps."""
    spike_window: int = added_numerics(128, least=4, needs=FINDS_SPIKES)
    """Steps that a step is compared with, up to the second before it. Spikes are not among them. The first
    half of the window has no verdict."""
    spike_batches: int = added_numerics(1, least=1, needs=REWINDS)
    """rewind: batches to leave out, of which the spike's is the last; those before the checkpoint stay."""
    routing: str | None = added_numerics(None, choices=ROUTINGS, needs=(EXPERTS, ROUTED))
    """Experts that tokens go to, regardless of scores, to measure uneven loads: uniform (any, at
    random); zipf (the n-th with a weight of 1/n); one_hot (all to the first one, their other choices
    are uniform); drifting (zipf, with the next expert as the first after each step). They depend on
    the seed, the step, the layer and the position in the sequence. null: the router's choice."""

    def validate(self, tp: int, compiled: bool, writes: bool) -> None:
        if self.spikes == "rewind" and not writes:
            rule = "goes back to a checkpoint, and the job writes none"
            works = "checkpoint=sync, or debug.spikes=skip"
            raise ConfigError("debug.spikes", self.spikes, rule, works)
        for name in ("anomaly", "nan"):
            if getattr(self, name) and compiled:
                rule = "compiled blocks cannot be inspected"
                raise ConfigError(f"debug.{name}", True, rule, "compile=off")
        if self.anomaly and tp > 1:
            rule = f"anomaly mode cannot inspect tensors that parallelism.tp={tp} shards"
            raise ConfigError("debug.anomaly", True, rule, "debug=nan, or parallelism.tp=1")


COUNTED = ("non_embedding", "all", "active")
HYPERPARAMETERS = ("none", "step_law")


@dataclass(frozen=True)
class ScaleConfig:
    """Model size, tokens and hyperparameters from a few numbers, for scaling experiments.

    Resolving the job sets the model's shape, training.tokens and hyperparameters, and these fields
    to their defaults: the run is the same as one with its fields set by hand.
    """

    parameters: int | float | str | None = added_numerics(None)
    """Resize the model to about this many parameters, like 300M, and keep its proportions: width of heads,
    query heads per key head, and the ratios of all other widths and of depth to width."""
    tokens_per_parameter: float | None = added_numerics(None, least=1e-3, most=1e9)
    """Train this many tokens for each parameter (about 20: arXiv:2203.15556), in place of
    training.tokens. With flops: also choose the model's size, so that both are met."""
    flops: float | None = added_numerics(None, above=0)
    """Train as many tokens as this compute allows: tokens x FLOPs per token, with full attention, as MFU
    counts it; about 6 x parameters x tokens."""
    counted: str = added_numerics("non_embedding", choices=COUNTED)
    """Parameters that count: non_embedding (without the tables of vocabulary), all, or active (those of
    non_embedding that one token uses, for mixtures of experts)."""
    hyperparameters: str = added_numerics("none", choices=HYPERPARAMETERS)
    """Rule that sets optimizer.lr and training.global_batch_size: step_law (arXiv:2503.04715), fitted with
    60M to 1B parameters; the batch is rounded to a power of two of sequences."""
    warmup_ratio: float | None = added_numerics(None, least=0, most=1)
    """Set schedule.warmup_steps to this fraction of the steps."""


MODES = ("none", "full", "selective_op", "selective_layer", "memory_budget")
BACKENDS = ("inductor", "aot_eager", "eager", "aot_eager_decomp_partition", "cudagraphs")
"""Backends that ship with torch; packages can add their own."""
COMPONENTS = ("blocks", "loss")
TUNING = ("default", "coordinate-descent", "max-autotune-no-cudagraphs")

COMPILE = Switch("compile.enable")
INDUCTOR = Switch("compile.backend", on="inductor")


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile, block by block: equal blocks share compiled code, so depth adds no compile time."""

    enable: bool = execution(False)
    """Compile the components below."""
    components: list[str] = execution(
        factory=lambda: list(COMPONENTS), choices=COMPONENTS, needs=COMPILE
    )
    """What is compiled: blocks, loss, or both."""
    backend: str = execution("inductor", needs=COMPILE)
    """Backend of torch.compile: inductor, or aot_eager and eager, which need no C++ compiler."""
    cuda_graphs: bool = added_execution(False)
    """Capture the passes of a step in one CUDA graph and its update in another, which the host launches in
    place of their kernels; with or without compiled components."""
    mode: str = added_execution("default", choices=TUNING, needs=(COMPILE, INDUCTOR))
    """What inductor tunes on the GPU in the first step: default, little; coordinate-descent, its Triton
    kernels; max-autotune-no-cudagraphs, also matrix products, which Triton may then compute."""

    @property
    def blocks(self) -> bool:
        return self.enable and "blocks" in self.components

    @property
    def loss(self) -> bool:
        return self.enable and "loss" in self.components

    def validate(self) -> None:
        if self.enable and not self.components:
            raise ConfigError(
                "compile.components", "[]", "nothing is left to compile", "compile=off"
            )
        # Reading entry points takes milliseconds, and a search checks thousands of jobs.
        if self.backend in BACKENDS:
            return
        if self.backend not in entry_points(group="torch_dynamo_backends").names:
            raise ConfigError("compile.backend", self.backend or "''", "no such choice", BACKENDS)


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """Activations that are recomputed in backward instead of saved (arXiv:1604.06174)."""

    mode: str = execution("none", choices=MODES)
    """What is recomputed. none; full: every block; selective_layer: every n-th block; selective_op: every
    block except expensive results (attention, collectives, every n-th matrix product);
    memory_budget: what torch's partitioner chooses, in compiled blocks only."""
    every_nth_layer: int = execution(
        2, least=1, needs=Switch("activation_checkpoint.mode", on="selective_layer")
    )
    """selective_layer: recompute the blocks whose index is a multiple of this."""
    save_every_nth_matmul: int = execution(
        2, least=0, needs=Switch("activation_checkpoint.mode", on="selective_op")
    )
    """selective_op: save every n-th matrix product of a block; 0 saves none."""
    memory_budget: float = execution(
        0.5, least=0, most=1, needs=Switch("activation_checkpoint.mode", on="memory_budget")
    )
    """memory_budget: fraction of the activation memory that may be used, 0 (like full) to 1 (like
    none)."""

    def covers(self, layer: int) -> bool:
        """Whether anything of this block is recomputed."""
        if self.mode == "selective_layer":
            return layer % self.every_nth_layer == 0
        return self.mode != "none"

    def validate(self, compiler: CompileConfig) -> None:
        if self.mode == "memory_budget" and not (compiler.blocks and compiler.backend != "eager"):
            rule = "is applied by the compiler's partitioner, and blocks are not compiled"
            works = "compile=on, or activation_checkpoint=selective_op"
            raise ConfigError("activation_checkpoint.mode", self.mode, rule, works)
