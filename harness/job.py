"""The job: the complete configuration of a run, typed, without torch, and stored as JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from harness import job_rules
from harness.checkpoint import CheckpointConfig
from harness.cluster.config import ClusterConfig, count_gpus
from harness.config import (
    EXECUTION,
    LONGEST_NAME,
    NUMERICS,
    check_rules,
    from_dict,
    identity,
    label,
    leaves,
    part,
)
from harness.data import DataConfig, TokenizerConfig
from harness.data.sizes import Sizes
from harness.errors import ConfigError, UserError
from harness.loop.config import DebugConfig, EvaluationConfig, TrainingConfig, ValidationConfig
from harness.metrics import MetricsConfig, ProfilingConfig
from harness.metrics.encoding import parse_object, read_object
from harness.model.architecture import architecture_of, check_data
from harness.model.config import ModelConfig
from harness.optimizer.config import OptimizerConfig, ScheduleConfig
from harness.parallelism.block_config import ActivationCheckpointConfig, CompileConfig
from harness.parallelism.config import ParallelismConfig
from harness.precision.config import PrecisionConfig
from harness.precision.hardware import require_hardware
from harness.precision.linears import sort_linears
from harness.scale import ScaleConfig
from harness.text import validate_texts


@dataclass(frozen=True)
class Job:
    """Configuration of one training run. Each part is documented in the package that it configures."""

    feeds_model: ClassVar[bool] = True
    """Whether batches of the data pass through the model."""

    name: str = label("???")
    """Folder inside runs_dir that holds the run folders of jobs with this name."""
    runs_dir: str = label("runs", written="folder")
    """Folder in which run folders are created."""
    training: TrainingConfig = part(TrainingConfig)
    validation: ValidationConfig = part(ValidationConfig)
    evaluation: EvaluationConfig = part(EvaluationConfig)
    scale: ScaleConfig = part(ScaleConfig)
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
        return _digest(identity(self, (NUMERICS, EXECUTION)))

    @property
    def numerics_id(self) -> str:
        """Hash of the numerics only: layouts of one experiment share it."""
        return _digest(identity(self, (NUMERICS,)))

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
    def steps(self) -> int:
        """Optimizer steps."""
        assert self.training.steps is not None, "the job is not resolved"
        return self.training.steps

    @property
    def sizes(self) -> Sizes:
        """Batch size and sequence length of every step."""
        schedule = self.schedule
        return Sizes(self.global_batch_size, self.training.seq_len, schedule.batch_sizes, schedule.seq_lens)

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step; with schedule.batch_size, in the last phase."""
        assert self.training.global_batch_size is not None, "the job is not resolved"
        return self.training.global_batch_size

    @property
    def local_batch_size(self) -> int:
        """Sequences per data-parallel rank and forward pass."""
        assert self.training.local_batch_size is not None, "the job is not resolved"
        return self.training.local_batch_size

    @property
    def microbatch_size(self) -> int:
        """Sequences that a model part processes at once; without a pipeline, all of a forward pass."""
        return self.parallelism.pp_microbatch_size if self.parallelism.pp > 1 else self.local_batch_size

    @property
    def microbatches(self) -> int:
        """Microbatches of a forward pass; 1 without a pipeline."""
        return self.local_batch_size // self.microbatch_size

    @property
    def accumulation_steps(self) -> int:
        """Forward and backward passes per optimizer step; with schedule.batch_size, in the last phase."""
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
        if (scaled := self.scaled()) is not self:
            return Job.resolve(scaled, launched_ranks=launched_ranks, gpus=gpus)
        self.validate_folder()
        self.cluster.validate()
        self.schedule.validate_phases()
        return self.resolve_layout(launched_ranks=launched_ranks, gpus=gpus)

    def resolve_layout(self, *, launched_ranks: int | None = None, gpus: int | None = None) -> Self:
        """The part of ``resolve`` that layout and batch have an effect on, for a job that passed the rest."""
        model = self.model.resolve()
        model.validate()
        here = self.cluster.is_here
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
            cluster=self.cluster.resolve(),
            data=self.data.resolve(),
            metrics=self.metrics.resolve(),
            parallelism=layout,
            training=self.training.resolve(
                layout.data_parallel, [size for _, size in self.schedule.batch_sizes]
            ),
            optimizer=self.optimizer.resolve(self.precision.master_dtype, self.precision.param_dtype),
            schedule=self.schedule.resolve(),
        )
        job = dataclasses.replace(job, training=job.training.with_length(job.sizes))
        schedule = self.scale.warmed_up(job.schedule, job.steps)
        job = dataclasses.replace(job, schedule=schedule, scale=ScaleConfig())
        job._validate()
        on_cpu = job.cluster.device == "cpu" or (here and gpus == 0)
        job_rules.check_async_tp(job, on_cpu=on_cpu)
        job_rules.check_device(job, on_cpu=on_cpu)
        job_rules.check_heads_of_flex(job)
        experts = job.precision.linear != "none" and sort_linears(model, job.precision).has_experts
        require_hardware(job.precision, job.cluster, gpus if here else None, experts=experts)
        return job

    def scaled(self) -> Self:
        """Return the job with ``scale`` applied, but for the warm-up, which depends on the steps.

        Raises:
            ConfigError: the fields contradict each other or the job, or no model has the size.
        """
        left = ScaleConfig(warmup_ratio=self.scale.warmup_ratio)
        if self.scale == left:
            return self
        model = self.model.resolve()
        model.validate()
        model, training, optimizer = self.scale.apply(model, self.training, self.optimizer)
        return dataclasses.replace(self, scale=left, model=model, training=training, optimizer=optimizer)

    @property
    def plain(self) -> Job:
        """The job without the options of a verb."""
        return Job(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Job)})

    def on_accelerator_of(self, cluster: ClusterConfig) -> Self:
        """Return the job on nodes with another cluster's accelerator."""
        own = dataclasses.replace(self.cluster, accelerator=cluster.accelerator, hardware=cluster.hardware)
        return dataclasses.replace(self, cluster=own)

    def validate_folder(self) -> None:
        """Check that the run folder is inside runs_dir."""
        parts = Path(self.name).parts
        if not parts or Path(self.name).is_absolute() or ".." in parts or "://" in self.name:
            rule = "must name a folder inside runs_dir"
            raise ConfigError("name", self.name or "''", rule, self.model.name)
        if any(len(os.fsencode(part)) > LONGEST_NAME for part in parts):
            raise ConfigError("name", self.name, f"a folder's name has at most {LONGEST_NAME} bytes")

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
        job_rules.check_torch(self)
        job_rules.check_attention(self)
        job_rules.check_conversations(self)
        job_rules.check_precision(self)
        self.compile.validate()
        self.activation_checkpoint.validate(self.compile, splits_backward=self.parallelism.splits_backward)
        job_rules.check_compiled_experts(self)
        job_rules.check_chunked_loss(self)
        self.data.validate()
        if self.feeds_model:
            check_data(self)
            architecture_of(self.model).check(self)
        self.tokenizer.validate()
        job_rules.check_tokenizer(self)
        self.optimizer.validate(self.precision.master_dtype)
        job_rules.check_optimizer_groups(self)
        job_rules.check_scheduled_sizes(self)
        job_rules.check_update_in_backward(self)
        self.schedule.validate(self.steps)
        self.checkpoint.validate()
        self.profiling.validate(self.steps, self.world_size)
        job_rules.check_slow_ranks(self)
        if self.cluster.device == "cpu":
            self.checkpoint.refuse_pinned_memory("cluster.device=cpu")
            self.profiling.refuse_snapshots("cluster.device=cpu")
        if self.validation.interval:
            self.data.require_validation()
        self.evaluation.validate(self.data, self.training.seq_len)
        self.debug.validate(self.parallelism.tp, self.compile.blocks)

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
            if missing := [name for name, _, value in leaves(job) if value == "???"]:
                raise ConfigError(missing[0], None, "must be given")
            validate_texts(job, environment={})
            return job
        except ConfigError as error:
            raise UserError(f"{path}: damaged, or another version wrote it: {error}") from None

    @classmethod
    def _from_dict(cls, plain: dict[str, Any]) -> Job:
        job: Job = from_dict(cls, {name: value for name, value in plain.items() if name != "id"})
        return job


def differing_numerics(a: Job, b: Job) -> list[str]:
    """Dotted names of the numerics in which two jobs differ."""
    first, second = ({name: value for name, role, value in leaves(job) if role == NUMERICS} for job in (a, b))
    return [name for name in {**first, **second} if first.get(name) != second.get(name)]


def _digest(pairs: list[tuple[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(pairs, sort_keys=True).encode()).hexdigest()[:12]
