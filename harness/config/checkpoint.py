"""The ``checkpoint`` group of a job: what is saved, when and how, and which checkpoint a run starts from."""

import functools
import math
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
PRUNING = Switch("checkpoint.keep_latest_k", "checkpoint.keep_latest_k=2")
COMMAND = Switch("checkpoint.on_save", "checkpoint.on_save=COMMAND")


@dataclass(frozen=True)
class CheckpointConfig:
    """Names and meanings follow torchtitan's ``[checkpoint]`` section where it has the field."""

    enable: bool = label(True)
    """Whether to save checkpoints, and to look for one when a run starts."""
    folder: str = label("checkpoints", nonempty=True)
    """Folder of the checkpoints ``step-<n>``: relative to the run folder, or an absolute path or
    fsspec URL (``s3://bucket/run``), which jobs of different layouts can share."""
    interval: int = saving_label(500, least=1, works="500, or checkpoint=disabled")
    """Optimizer steps between checkpoints. One more is written after the last step and on a
    stop."""
    interval_minutes: float | None = saving_label(None, above=0)
    """Also write a checkpoint when so many minutes have passed since the last one, by the clock of
    rank 0; null: never. It bounds what a failure costs when steps are slow or their time is not
    known."""
    steps: list[int] = saving_label(factory=list)
    """Also write checkpoints after these steps, and keep them all."""
    log2_steps: bool = saving_label(False)
    """Also write checkpoints after steps 1, 2, 4, 8, ..., and keep them all."""
    async_mode: str = saving_label("disabled", choices=ASYNC_MODES)
    """``disabled`` writes while training waits. ``async`` copies the state to host memory during
    the next step's forward and backward, and writes the copy in the background;
    ``async_with_pinned_mem`` copies to pinned memory (needs a GPU)."""
    keep_latest_k: int = saving_label(10, least=0)
    """Number of complete checkpoints to keep; older ones are removed. 0 keeps all."""
    keep_every: int = label(0, least=0, needs=(ENABLE, PRUNING))
    """Keep also the checkpoints of all multiples of this step. Those between them serve restarts
    alone. 0: none."""
    on_save: str | None = saving_label(None, nonempty=True)
    """Shell command to run after each save, on the machine of rank 0 beside the training: an
    evaluation, an upload. It finds CHECKPOINT, STEP and RUN_FOLDER in its environment. Commands run
    one after another, with the lowest priority. What one prints is in
    ``logs/on_save-step-<n>.log``; one that fails is a warning. A checkpoint in a local folder is
    not removed before its command has ended. A command ends with its shell, and with it what it
    left running. At the end of training the run waits for the commands; a stop or a failure ends
    them."""
    on_save_timeout_seconds: int = label(3600, least=1, needs=(ENABLE, COMMAND))
    """Seconds after which a command of on_save is ended."""
    resume: bool = label(True)
    """Whether the same command resumes from the newest complete checkpoint. If false, it starts
    over and moves existing checkpoints to ``superseded/``."""
    load_step: int = saving_label(-1, least=0, also=-1)
    """Step of the checkpoint to resume from; -1 is the newest. Later ones are moved to
    ``superseded/``."""
    initial_load_path: str | None = numerics(None)
    """Initial values of a run without checkpoints of its own: a checkpoint (``.../step-<n>``), a
    run folder, or a Hugging Face folder."""
    initial_load_model_only: bool = numerics(True, needs=INITIAL)
    """Load only the weights of initial_load_path, not the optimizer, step, data position, ..."""
    initial_load_in_hf: bool = numerics(False, needs=INITIAL)
    """Whether initial_load_path holds Hugging Face's safetensors."""
    exclude_from_loading: list[str] = saving_label(factory=list, choices=PARTS)
    """Parts of a checkpoint not to load: any of optimizer, lr_scheduler, data_loader, train_state,
    rng. Checkpoints that the same command writes afterwards are loaded completely again."""
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

    def validate(self, last_step: int) -> None:
        for step in self.steps:
            if not 1 <= step <= last_step:
                rule = f"has step {step}, and the run has the steps 1 to {last_step}"
                raise ConfigError("checkpoint.steps", self.steps, rule, f"[{last_step}]")
        if self.keep_every % self.interval:
            rule = f"must be a multiple of checkpoint.interval={self.interval}"
            works = f"{math.ceil(self.keep_every / self.interval) * self.interval}"
            raise ConfigError("checkpoint.keep_every", self.keep_every, rule, works)
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
        return first or self._is_listed(step) or step % self.interval == 0 or step == last_step

    def keeps(self, step: int) -> bool:
        """Whether the checkpoint of a step is kept however many follow."""
        is_multiple = self.keep_every > 0 and step % self.keep_every == 0
        return is_multiple or self._is_listed(step)

    def _is_listed(self, step: int) -> bool:
        return step in self.steps or (self.log2_steps and step.bit_count() == 1)

    def options_of_loading(self) -> dict[str, object]:
        """Options that select what is loaded; stored in checkpoints that the run saves afterwards."""
        return {
            "load_step": self.load_step,
            "exclude_from_loading": sorted(self.exclude_from_loading),
        }
