"""The job: the complete configuration of a run, typed, without torch, and stored as JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from harness.checkpoint import CheckpointConfig
from harness.cluster.config import ClusterConfig, count_gpus
from harness.config import LABEL, NUMERICS, check_rules, from_dict, label, leaves, part
from harness.data import DataConfig, TokenizerConfig
from harness.errors import ConfigError, UserError
from harness.loop.config import DebugConfig, EvaluationConfig, TrainingConfig, ValidationConfig
from harness.metrics import MetricsConfig, ProfilingConfig
from harness.metrics.encoding import parse_object, read_object
from harness.model.config import ModelConfig
from harness.optimizer.config import OptimizerConfig, ScheduleConfig
from harness.parallelism.block_config import ActivationCheckpointConfig, CompileConfig
from harness.parallelism.config import ParallelismConfig
from harness.precision.config import PrecisionConfig
from harness.precision.hardware import require_hardware
from harness.precision.linears import check_layout, sort_linears
from harness.text import validate_texts

FLEX_HEAD = 16
"""torch._inductor.kernel.flex: "embedding dimension of the query, key, and value must be at least 16"."""
LONGEST_NAME = 255
"""Maximum bytes in a folder's name on Linux file systems."""


@dataclass(frozen=True)
class Job:
    """Configuration of one training run. Each part is documented in the package that it configures."""

    name: str = label("???")
    """Folder inside runs_dir that holds the run folders of jobs with this name."""
    runs_dir: str = label("runs", nonempty=True)
    """Folder in which run folders are created."""
    training: TrainingConfig = part(TrainingConfig)
    validation: ValidationConfig = part(ValidationConfig)
    evaluation: EvaluationConfig = part(EvaluationConfig)
    model: ModelConfig = part(ModelConfig)
    parallelism: ParallelismConfig = part(ParallelismConfig)
    precision: PrecisionConfig = part(PrecisionConfig)
    activation_checkpoint: ActivationCheckpointConfig = part(ActivationCheckpointConfig)
    compile: CompileConfig = part(CompileConfig)
    data: DataConfig = part(DataConfig)
    tokenizer: TokenizerConfig = part(TokenizerConfig)
    optimizer: OptimizerConfig = part(OptimizerConfig)
    schedule: ScheduleConfig = part(ScheduleConfig)
    checkpoint: CheckpointConfig = part(CheckpointConfig)
    metrics: MetricsConfig = part(MetricsConfig)
    profiling: ProfilingConfig = part(ProfilingConfig)
    debug: DebugConfig = part(DebugConfig)
    cluster: ClusterConfig = part(ClusterConfig)

    @property
    def id(self) -> str:
        """Hash of the job, twelve hex digits: covers numerics and execution, but not labels."""
        return _digest([(name, value) for name, role, value in leaves(self) if role != LABEL])

    @property
    def numerics_id(self) -> str:
        """Hash of the numerics only: layouts of one experiment share it."""
        return _digest([(name, value) for name, role, value in leaves(self) if role == NUMERICS])

    @property
    def run_dir(self) -> Path:
        """The run folder: ``runs_dir/name/id``."""
        return Path(self.runs_dir) / self.name / self.id

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP has anything to shard, replicate, cast or offload."""
        layout = self.parallelism
        of_experts = layout.expert_shards if self.model.moe.enabled and layout.has_expert_mesh else 1
        replicas = layout.dp_replicate * max(layout.parameter_shards, of_experts)
        return replicas > 1 or self.precision.needs_fsdp or layout.cpu_offload

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.parallelism.world_size

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step."""
        assert self.training.global_batch_size is not None, "the job is not resolved"
        return self.training.global_batch_size

    @property
    def local_batch_size(self) -> int:
        """Sequences per data-parallel rank and forward pass."""
        assert self.training.local_batch_size is not None, "the job is not resolved"
        return self.training.local_batch_size

    @property
    def accumulation_steps(self) -> int:
        """Forward and backward passes per optimizer step."""
        return self.global_batch_size // (self.local_batch_size * self.parallelism.data_parallel)

    def resolve(self, *, launched_ranks: int | None = None, gpus: int | None = None) -> Self:
        """Return the job with derived fields set, after a check of every rule.

        Args:
            launched_ranks: number of ranks that torchrun started, if it did.
            gpus: GPUs of this machine; counted when None.

        Raises:
            ConfigError: naming the field, its value, the rule, and what would work.
        """
        validate_texts(self)
        check_rules(self)
        self._validate_folder()
        self.cluster.validate()
        model = self.model.resolve()
        model.validate()
        here = self.cluster.kind == "local"
        if gpus is None:
            gpus = count_gpus() if here and self.cluster.device != "cpu" else 0
        default = self.cluster.default_world_size or gpus or None
        layout = self.parallelism.resolve(launched_ranks or self.cluster.world_size, default)
        if launched_ranks is None:
            self.cluster.nodes_for(layout.world_size)
            if here:
                self.cluster.validate_gpus(gpus, layout.world_size)
        job = dataclasses.replace(
            self,
            model=model,
            parallelism=layout,
            training=self.training.resolve(layout.data_parallel),
            optimizer=self.optimizer.resolve(self.precision.master_dtype),
        )
        job._validate()
        on_cpu = job.cluster.device == "cpu" or (here and gpus == 0)
        job._validate_async_tp(on_cpu=on_cpu)
        job.validate_device(on_cpu=on_cpu)
        job._validate_heads_of_flex()
        experts = job.precision.linear != "none" and sort_linears(model, job.precision).has_experts
        require_hardware(job.precision, job.cluster, gpus if here else None, experts=experts)
        return job

    @property
    def plain(self) -> Job:
        """The job without the options of a verb."""
        return Job(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Job)})

    def _validate_folder(self) -> None:
        """Check that the run folder is inside runs_dir."""
        parts = Path(self.name).parts
        if not parts or Path(self.name).is_absolute() or ".." in parts:
            rule = "must name a folder inside runs_dir"
            raise ConfigError("name", self.name or "''", rule, self.model.name)
        if any(len(os.fsencode(part)) > LONGEST_NAME for part in parts):
            raise ConfigError("name", self.name, f"a folder's name has at most {LONGEST_NAME} bytes")
        runs_dir = Path(self.runs_dir)
        no_folders = [
            path for path in (runs_dir, *runs_dir.parents) if os.path.exists(path) and not os.path.isdir(path)
        ]
        if no_folders:
            raise ConfigError("runs_dir", self.runs_dir, f"{no_folders[0]} is not a folder", "runs")

    def _validate(self) -> None:
        """Check every part, and the rules between parts."""
        if self.training.seq_len > self.model.max_seq_len:
            raise ConfigError(
                "training.seq_len",
                self.training.seq_len,
                f"must not exceed model.max_seq_len={self.model.max_seq_len}",
                f"at most {self.model.max_seq_len}",
            )
        share = self.local_batch_size * self.accumulation_steps
        self.parallelism.validate(self.model, self.training.seq_len, self.local_batch_size, share)
        self._validate_attention()
        self._validate_precision()
        self.compile.validate()
        self.activation_checkpoint.validate(self.compile, splits_backward=self.parallelism.splits_backward)
        self._validate_compiled_experts()
        self._validate_chunked_loss()
        self.data.validate()
        self.tokenizer.validate()
        self.optimizer.validate(self.precision.master_dtype)
        self._validate_update_in_backward()
        self.schedule.validate(self.training.steps)
        self.checkpoint.validate()
        self.profiling.validate(self.training.steps, self.world_size)
        if self.cluster.device == "cpu":
            self.checkpoint.refuse_pinned_memory("cluster.device=cpu")
            self.profiling.refuse_snapshots("cluster.device=cpu")
        if self.validation.interval:
            self.data.require_validation()
        self.evaluation.validate(self.data, self.training.seq_len)
        self.debug.validate(self.parallelism.tp, self.compile.blocks)

    def _validate_compiled_experts(self) -> None:
        """Check that selective_op is off if blocks are compiled in pieces, around the exchange of experts."""
        in_pieces = self.compile.blocks and self.model.moe.enabled and self.parallelism.has_expert_mesh
        if in_pieces and self.activation_checkpoint.mode == "selective_op":
            raise ConfigError(
                "activation_checkpoint.mode",
                "selective_op",
                "saves operations by name, which are not visible in blocks with experts on other ranks, "
                "because these are compiled in pieces",
                "full, selective_layer, memory_budget, or compile=off",
            )

    def _validate_chunked_loss(self) -> None:
        """Check that a chunked loss can be computed with a sharded vocabulary."""
        chunks, layout = self.training.loss_chunks, self.parallelism
        if chunks > 1 and layout.tp > 1 and not layout.loss_parallel:
            raise ConfigError(
                "training.loss_chunks",
                chunks,
                f"shards the vocabulary over parallelism.tp={layout.tp}, and parallelism.loss_parallel=false",
                "1, or parallelism.loss_parallel=true",
            )

    def _validate_async_tp(self, *, on_cpu: bool) -> None:
        """Check that asynchronous tensor parallel would have an effect."""
        layout, works = self.parallelism, "parallelism.async_tp=false"
        if not layout.async_tp:
            return
        ranks_per_node = self.cluster.nodes_for(self.world_size)[1]
        for broken, rule, instead in (
            (not layout.uses_sequence_parallel, "needs parallelism.tp and sequence_parallel", works),
            (
                not self.compile.blocks or self.compile.backend != "inductor",
                "is a pass of the compiler, and blocks are not compiled by inductor",
                f"compile=on, or {works}",
            ),
            (on_cpu, "needs GPUs with symmetric memory, and the ranks compute on CPUs", works),
            (
                ranks_per_node % layout.tp != 0,
                f"needs tensor-parallel ranks on one node; there are {ranks_per_node} ranks per node",
                f"{works}, or a parallelism.tp that divides {ranks_per_node}",
            ),
        ):
            if broken:
                raise ConfigError("parallelism.async_tp", True, rule, instead)

    def validate_device(self, *, on_cpu: bool) -> None:
        """Reject an attention backend that cannot train on a CPU; each rank checks its own device again."""
        backend = self.training.attention
        if on_cpu and backend != "sdpa":
            rule = "trains on GPUs only, and the ranks compute on CPUs"
            raise ConfigError("training.attention", backend, rule, ["sdpa"])

    def _validate_heads_of_flex(self) -> None:
        """Check that heads are wide enough for FlexAttention."""
        narrowest = min(self.model.head_width, self.model.value_width)
        if self.training.attention == "flex" and narrowest < FLEX_HEAD:
            raise ConfigError(
                "training.attention",
                "flex",
                f"needs a head dimension of at least {FLEX_HEAD}; model={self.model.name} has {narrowest}",
                ["sdpa"],
            )

    def _validate_attention(self) -> None:
        """Check that the attention backend supports the layout, the precision and the documents."""
        backend, layout = self.training.attention, self.parallelism
        if backend == "varlen" and self.precision.param_dtype == "float32":
            raise ConfigError(
                "training.attention",
                backend,
                "flash attention over documents needs 16-bit formats, and precision.param_dtype is float32",
                "precision=bf16, or sdpa, flex",
            )
        if backend == "varlen" and self.model.attention.sinks:
            rule = f"flash attention does not support sinks, and model={self.model.name} has them"
            raise ConfigError("training.attention", backend, rule, ["sdpa", "flex"])
        if layout.cp > 1 and layout.cp_method == "ring":
            if backend != "sdpa":
                raise ConfigError(
                    "training.attention",
                    backend,
                    f"parallelism.cp={layout.cp} with cp_method=ring has kernels of its own",
                    "sdpa, or parallelism.cp_method=ulysses",
                )
            reach = [self.model.span(layer) for layer in range(self.model.num_blocks)]
            local = any(span.most_reach(self.training.seq_len) < self.training.seq_len for span in reach)
            if local or self.model.attention.sinks:
                what = "sinks" if not local else "window" if self.model.attention.window else "chunk"
                raise ConfigError(
                    "parallelism.cp_method",
                    "ring",
                    f"its kernels support the causal mask only, and model={self.model.name} has "
                    f"model.attention.{what}",
                    ["ulysses"],
                )
            if not self.data.attend_across_documents:
                raise ConfigError(
                    "data.attend_across_documents",
                    False,
                    f"parallelism.cp={layout.cp} with cp_method=ring supports the causal mask only",
                    "true, or parallelism.cp_method=ulysses",
                )

    def _validate_precision(self) -> None:
        """Check the formats, and whether the shapes of the linears, after sharding, fit them."""
        self.precision.validate()
        if self.precision.linear == "none":
            return
        layout, linears = self.parallelism, sort_linears(self.model, self.precision)
        if self.training.loss_chunks > 1 and "output" in linears.converted:
            raise ConfigError(
                "training.loss_chunks",
                self.training.loss_chunks,
                f"chunks multiply the output projection in param_dtype, not in {self.precision.linear}",
                f"1, or precision.filter_fqns=[{','.join([*self.precision.filter_fqns, 'output'])}]",
            )
        check_layout(
            linears,
            self.model,
            self.precision,
            layout.tp,
            layout.pp_microbatch_size if layout.pp > 1 else self.local_batch_size,
            self.training.seq_len // layout.cp,
            splits_experts=layout.splits_experts,
        )

    def _validate_update_in_backward(self) -> None:
        """Check the options that an update during backward does not allow."""
        if not self.optimizer.in_backward:
            return
        for field, value, works, why in (
            ("training.max_norm", self.training.max_norm, 0, "the norm of all gradients is known too late"),
            ("parallelism.pp", self.parallelism.pp, 1, "a pipeline adds the gradients of microbatches"),
            ("debug.non_finite", self.debug.non_finite, "stop", "an update cannot be taken back"),
        ):
            if value != works:
                rule = f"optimizer.in_backward=true updates during backward, and {why}"
                raise ConfigError(field, value, rule, f"{works}, or optimizer.in_backward=false")
        if self.accumulation_steps > 1:
            raise ConfigError(
                "training.local_batch_size",
                self.local_batch_size,
                f"optimizer.in_backward=true updates in every backward pass, and a step has "
                f"{self.accumulation_steps}",
                f"{self.local_batch_size * self.accumulation_steps}, or optimizer.in_backward=false",
            )

    def to_dict(self) -> dict[str, Any]:
        """The job as plain containers."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """The job as written to ``job.json``, with its id."""
        return json.dumps({"id": self.id, **self.to_dict()}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read a job that ``to_json`` wrote.

        Raises:
            ValueError: the text is not a JSON object.
            ConfigError: an unknown field, or a value of the wrong type.
        """
        return cls._from_dict(parse_object(text))

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a ``job.json``.

        Raises:
            FileNotFoundError: there is none.
            UserError: it is damaged, another version wrote it, or it holds an invalid text.
        """
        plain = read_object(path)
        try:
            job = cls._from_dict(plain)
            validate_texts(job)
            return job
        except ConfigError as error:
            raise UserError(f"{path}: damaged, or another version wrote it: {error}") from None

    @classmethod
    def _from_dict(cls, plain: dict[str, Any]) -> Job:
        job: Job = from_dict(cls, {name: value for name, value in plain.items() if name != "id"})
        return job


def differing_numerics(a: Job, b: Job) -> list[str]:
    """Dotted names of the numerics in which two jobs differ."""
    return [
        name
        for (name, role, left), (_, _, right) in zip(leaves(a), leaves(b), strict=True)
        if role == NUMERICS and left != right
    ]


def _digest(pairs: list[tuple[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(pairs, sort_keys=True).encode()).hexdigest()[:12]
