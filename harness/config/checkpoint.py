"""The ``checkpoint`` group of a job: what is saved, when and how, and which checkpoint a run starts from."""

import functools
from dataclasses import dataclass

from harness.config.fields import Switch, label, numerics
from harness.util.errors import ConfigError

ASYNC_MODES = ("disabled", "async", "async_with_pinned_mem")
EXPORT_DTYPES = ("float32", "bfloat16", "float16")
PARTS = ("optimizer", "lr_scheduler", "data_loader", "train_state", "rng")

ENABLE = Switch("checkpoint.enable")
saving_label = functools.partial(label, needs=ENABLE)
WEIGHTS_ONLY = Switch("checkpoint.last_save_model_only")
INITIAL = Switch("checkpoint.initial_load_path", "checkpoint.initial_load_path=FOLDER")


@dataclass(frozen=True)
class CheckpointConfig:
    """Names and meanings follow torchtitan's ``[checkpoint]`` section where it has the field."""

    enable: bool = label(True)
    """Whether to save checkpoints, and to look for one when a run starts."""
    folder: str = label("checkpoints", nonempty=True)
    """Folder of the checkpoints ``step-<n>``: relative to the run folder, or an absolute path or fsspec URL
    (``s3://bucket/run``), which jobs of different layouts can share."""
    interval: int = saving_label(500, least=1, works="500, or checkpoint=disabled")
    """Optimizer steps between checkpoints. One more is written after the last step and on a
    stop."""
    async_mode: str = saving_label("disabled", choices=ASYNC_MODES)
    """``disabled`` writes while training waits. ``async`` copies the state to host memory during the next
    step's forward and backward, and writes the copy in the background; ``async_with_pinned_mem``
    copies to pinned memory (needs a GPU)."""
    keep_latest_k: int = saving_label(10, least=0)
    """Number of complete checkpoints to keep; older ones are removed. 0 keeps all."""
    resume: bool = label(True)
    """Whether the same command resumes from the newest complete checkpoint. If false, it starts over
    and moves existing checkpoints to ``superseded/``."""
    load_step: int = saving_label(-1, least=0, also=-1)
    """Step of the checkpoint to resume from; -1 is the newest. Later ones are moved to
    ``superseded/``."""
    initial_load_path: str | None = numerics(None)
    """Initial values of a run without checkpoints of its own: a checkpoint (``.../step-<n>``), a run folder,
    or a Hugging Face folder."""
    initial_load_model_only: bool = numerics(True, needs=INITIAL)
    """Load only the weights of initial_load_path, not the optimizer, step, data position, ..."""
    initial_load_in_hf: bool = numerics(False, needs=INITIAL)
    """Whether initial_load_path holds Hugging Face's safetensors."""
    exclude_from_loading: list[str] = saving_label(factory=list, choices=PARTS)
    """Parts of a checkpoint not to load: any of optimizer, lr_scheduler, data_loader, train_state, rng.
    Checkpoints that the same command writes afterwards are loaded completely again."""
    allow_changed: list[str] = saving_label(factory=list)
    """Numerics fields that may differ from the job that wrote the checkpoint, e.g.
    [training.steps, optimizer.lr]."""
    last_save_model_only: bool = saving_label(False)
    """Whether the checkpoint after the last step holds the weights alone, in export_dtype."""
    export_dtype: str = label("float32", choices=EXPORT_DTYPES, needs=(ENABLE, WEIGHTS_ONLY))
    """Format of the weights in a model-only last checkpoint: float32, bfloat16 or float16."""
    last_save_in_hf: bool = label(False, needs=(ENABLE, WEIGHTS_ONLY))
    """Write the model-only last checkpoint as Hugging Face safetensors, with config.json and
    tokenizer."""
    create_seed_checkpoint: bool = label(False)
    """Write the initial state as ``step-0`` and stop."""
    enable_first_step_checkpoint: bool = saving_label(False)
    """Also write a checkpoint after step 1, to find saving errors early."""
    load_only: bool = saving_label(False)
    """Load, but write nothing."""
    timeout_seconds: int = label(3600, least=1)
    """Timeout of collectives while saving and loading."""

    def validate(self) -> None:
        if self.last_save_in_hf and "://" in self.folder:
            rule = "last_save_in_hf writes to local file systems only"
            raise ConfigError("checkpoint.folder", self.folder, rule, "a local path")
        if self.initial_load_in_hf and not self.initial_load_model_only:
            rule = "Hugging Face's format holds only weights"
            raise ConfigError("checkpoint.initial_load_model_only", False, rule, "true")
        if self.initial_load_path is not None and not self.enable:
            raise ConfigError(
                "checkpoint.enable",
                False,
                "nothing is loaded without it",
                "checkpoint.load_only=true",
            )
        if self.create_seed_checkpoint and not self.writes:
            raise ConfigError(
                "checkpoint.create_seed_checkpoint", True, "nothing is written in this job", "false"
            )

    def refuse_pinned_memory(self, why: str) -> None:
        """Raise ConfigError if pinned memory is requested without a GPU."""
        if self.enable and self.async_mode == "async_with_pinned_mem":
            rule = f"pinned memory needs a GPU: {why}"
            raise ConfigError("checkpoint.async_mode", self.async_mode, rule, "async")

    @property
    def writes(self) -> bool:
        return self.enable and not self.load_only

    def is_due(self, step: int, last_step: int) -> bool:
        if not self.writes:
            return False
        first = step == 1 and self.enable_first_step_checkpoint
        return first or step % self.interval == 0 or step == last_step

    def options_of_loading(self) -> dict[str, object]:
        """Options that select what is loaded; stored in checkpoints that the run saves afterwards."""
        return {
            "load_step": self.load_step,
            "exclude_from_loading": sorted(self.exclude_from_loading),
        }
