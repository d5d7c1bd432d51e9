"""The job: the complete configuration of a run, typed, without torch, and stored as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from harness.config.checkpoint import CheckpointConfig
from harness.config.cluster import ClusterConfig
from harness.config.component import Component, digest_of, without_folders
from harness.config.data import DataConfig, TokenizerConfig, ValidationSet
from harness.config.data_kinds import errors_of_set, sources_of, with_shared
from harness.config.fields import (
    EXECUTION,
    LONGEST_NAME,
    NUMERICS,
    from_dict,
    identity,
    label,
    leaves,
    part,
)
from harness.config.metrics import MetricsConfig, ProfilingConfig
from harness.config.model import ModelConfig
from harness.config.optimizer import DECAYS, KINDS, OptimizerConfig, ScheduleConfig
from harness.config.parallelism import ParallelismConfig
from harness.config.precision import PrecisionConfig
from harness.config.texts import validate_texts
from harness.config.training import (
    OBSERVERS,
    ActivationCheckpointConfig,
    CompileConfig,
    DebugConfig,
    EvaluationConfig,
    Phase,
    ScaleConfig,
    Sizes,
    TrainingConfig,
    ValidationConfig,
    fewest_and_most_rows,
)
from harness.config.types import UNSET
from harness.util.encoding import parse_object, read_object
from harness.util.errors import ConfigError, UserError
from harness.util.words import plural


@dataclass(frozen=True)
class Job:
    """Configuration of one training run. Each part is documented in the package that it configures."""

    feeds_model: ClassVar[bool] = True
    """Whether batches of the data pass through the model."""
    fits_batch: ClassVar[bool] = False
    """Whether a default batch that the layout cannot split becomes a row for each data-parallel rank."""
    varies: ClassVar[bool] = False
    """Whether the verb makes other jobs from this one. A value without effect here may have one in those."""
    name: str = label("???")
    """Folder inside runs_dir that holds the run folders of jobs with this name."""
    runs_dir: str = label("runs", written="folder")
    """Folder in which run folders are created."""
    notes: str = label("")
    """A sentence about the run, for tables and W&B."""
    tags: list[str] = label(factory=list)
    """Tags of the run, for tables and W&B (without any: WANDB_TAGS)."""
    user: dict[str, Any] = label(factory=dict)
    """Keys of your own, such as ``+user.ticket=123``; they are recorded with the job."""
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
    def fsdp_ranks(self) -> int:
        """Ranks over which FSDP shards or replicates parameters; those of experts, if they are more."""
        layout = self.parallelism
        shards = layout.parameter_shards
        if self.model.moe.enabled and layout.has_expert_mesh:
            shards = max(shards, layout.expert_shards)
        return layout.dp_replicate * shards

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP has anything to shard, replicate, cast or offload."""
        return self.fsdp_ranks > 1 or self.precision.needs_fsdp or self.parallelism.cpu_offload

    @property
    def world_size(self) -> int:
        return self.parallelism.world_size

    @property
    def steps(self) -> int:
        assert self.training.steps is not None, "the job is not resolved"
        return self.training.steps

    @property
    def sizes(self) -> Sizes:
        schedule = self.schedule
        return Sizes(
            self.global_batch_size, self.training.seq_len, schedule.batch_sizes, schedule.seq_lens
        )

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
        if self.parallelism.pp > 1:
            return self.parallelism.pp_microbatch_size
        return self.local_batch_size

    @property
    def microbatches(self) -> int:
        """Microbatches of a forward pass; 1 without a pipeline."""
        return self.local_batch_size // self.microbatch_size

    @property
    def accumulation_steps(self) -> int:
        """Forward and backward passes per optimizer step; with schedule.batch_size, in the last phase."""
        of_pass = self.local_batch_size * self.parallelism.data_parallel
        return -(-self.global_batch_size // of_pass)

    def passes(self, phase: Phase) -> int:
        """Passes of every rank in a step of a phase: as many as the fullest rank needs."""
        ranks = self.parallelism.data_parallel
        _, most = fewest_and_most_rows(ranks, phase, self.global_batch_size)
        return -(-most // self.local_batch_size)

    def rows_per_rank(self, phase: Phase) -> int:
        """Rows of every data-parallel rank in a step of a phase, the empty ones included."""
        return self.passes(phase) * self.local_batch_size

    def empty_share(self, phase: Phase) -> float:
        """Fraction of the rows of a step that are empty."""
        rows = self.rows_per_rank(phase) * self.parallelism.data_parallel
        return 1 - phase.batch_size / rows

    @property
    def empty_in_words(self) -> str | None:
        """What share of the rows is empty, in the phase with the largest; None: no row is."""
        phase = max(self.sizes.phases, key=self.empty_share)
        share = self.empty_share(phase)
        if not share:
            return None
        ranks = plural(self.parallelism.data_parallel, "data-parallel rank")
        rows = plural(self.rows_per_rank(phase), "row")
        return (
            f"{phase.batch_size:,} sequences on {ranks} x {rows}: {share:.1%} of the rows are empty"
        )

    @property
    def validation_sets(self) -> dict[str, ValidationSet]:
        """The validation sets that are read, by name, with the fields that they share with ``data``."""
        sets = self.validation.sets if self.validation.interval else {}
        return {name: with_shared(self.data, sets[name]) for name in sorted(sets)}

    @property
    def inputs(self) -> list[tuple[DataConfig, AbstractContextManager[None]]]:
        """All data that the job reads, each with a context manager that names its fields in errors."""
        sets = self.validation_sets
        return sources_of(self.data) + [(sets[name], errors_of_set(name)) for name in sets]

    @property
    def kinds_of_data(self) -> set[str]:
        """The kinds of all data that the job reads, a mixture's included."""
        return self.data.kinds | {own.kind for own in self.validation_sets.values()}

    def compiles(self, *, on_gpu: bool) -> bool:
        """Whether steps call the compiler.

        They do with ``compile.enable``. On GPUs, FlexAttention and some optimizers call the
        compiler even if ``compile.enable`` is false.
        """
        needs_compiler = self.training.attention == "flex" or self.optimizer.compiles(
            self.precision.master_dtype
        )
        return self.compile.enable or (on_gpu and needs_compiler)

    @property
    def components(self) -> list[Component]:
        """The components in files that the job names."""
        found = [
            *map(KINDS.file, sorted(self.optimizer.kinds)),
            DECAYS.file(self.schedule.decay_type),
            *map(OBSERVERS.file, self.training.observers),
        ]
        return list(filter(None, found))

    @property
    def plain(self) -> Job:
        """The job without the options of a verb."""
        return Job(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Job)})

    def on_accelerator_of(self, cluster: ClusterConfig) -> Self:
        """Return the job on nodes with another cluster's accelerator."""
        changed = dataclasses.replace(
            self.cluster, accelerator=cluster.accelerator, hardware=cluster.hardware
        )
        return dataclasses.replace(self, cluster=changed)

    def validate_folder(self) -> None:
        """Check that the run folder is inside runs_dir."""
        parts = Path(self.name).parts
        if not parts or Path(self.name).is_absolute() or ".." in parts or "://" in self.name:
            rule = "must name a folder inside runs_dir"
            raise ConfigError("name", self.name or "''", rule, self.model.name)
        if any(len(os.fsencode(folder)) > LONGEST_NAME for folder in parts):
            raise ConfigError(
                "name", self.name, f"a folder's name has at most {LONGEST_NAME} bytes"
            )

    def to_dict(self) -> dict[str, Any]:
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
        return cls.from_stored(parse_object(text))

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a ``job.json``.

        Raises:
            FileNotFoundError: there is none.
            UserError: it is damaged, another version wrote it, or it holds an invalid text.
        """
        plain = read_object(path)
        try:
            job = cls.from_stored(plain)
            if missing := [name for name, _, value in leaves(job) if value == UNSET]:
                raise ConfigError(missing[0], None, "must be given")
            validate_texts(job, environment={})
            return job
        except ConfigError as error:
            raise UserError(f"{path}: damaged, or another version wrote it: {error}") from None

    @classmethod
    def from_stored(cls, plain: dict[str, Any]) -> Job:
        """Build a job from the fields of a file.

        Raises:
            ConfigError: an unknown field, or a value of the wrong type.
        """
        job: Job = from_dict(cls, {name: value for name, value in plain.items() if name != "id"})
        return job


def numerics_of(job: Job) -> dict[str, Any]:
    """The numerics fields of a job, by name."""
    return {name: value for name, role, value in leaves(job) if role == NUMERICS}


def differing_numerics(a: Job, b: Job) -> list[str]:
    """Return the names of the numeric fields in which two jobs differ."""
    first = numerics_of(a)
    second = numerics_of(b)
    return [
        name
        for name in {**first, **second}
        if without_folders(first.get(name)) != without_folders(second.get(name))
    ]


def _digest(pairs: list[tuple[str, Any]]) -> str:
    return digest_of(without_folders(pairs).encode())
