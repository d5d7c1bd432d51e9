"""Options of an evaluation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

from harness.config.fields import label, part
from harness.config.training import SPLITS, require_stride, require_tasks
from harness.data.tokenizer import build_tokenizer
from harness.model.architecture import require_decoder
from harness.tools.inference.config import InferenceJob
from harness.tools.inference.evaluate.tasks import Setting
from harness.util.errors import ConfigError


@dataclass(frozen=True)
class EvaluateConfig:
    """Weights, tasks, and how they are scored."""

    checkpoint: str | None = label(None)
    """Weights: a run folder (its newest complete checkpoint), a DCP checkpoint, or a folder of safetensors.
    ``checkpoint=PATH`` is short for it."""
    tasks: list[str] = label(factory=lambda: ["data"])
    """Each is ``data`` (loss on the documents of ``data=``), a ``.jsonl`` file of questions, or
    ``lm_eval:NAME``, a task of lm-evaluation-harness."""
    split: str = label("validation", choices=SPLITS)
    """Documents of the task ``data``: those held out for validation, those trained on, or all."""
    seq_len: int | None = label(None, least=2)
    """Window: the most tokens of a pass. Null: the length that the weights were trained with, or
    ``model.max_seq_len`` if they do not record it."""
    stride: int | None = label(None, least=1)
    """Task ``data``: tokens that each window scores; the tokens before them are context. Null: the window,
    with which passes are cheapest and context is shortest."""
    limit: int | None = label(None, least=1)
    """Use the first examples (or documents) of each task only; null: all."""
    batch_size: int = label(8, least=1)
    """Rows per data-parallel rank and pass."""
    special_tokens: bool = label(True)
    """Whether the text of a special token (``<|im_start|>``) in a question is that token, as in transformers;
    false: plain text, as in the documents of ``data``."""
    num_fewshot: int | None = label(None, least=0)
    """lm_eval: examples in the prompt; null: as the task says."""
    include_path: str | None = label(None)
    """lm_eval: a folder with task files of your own."""
    out: str | None = label(None, written="file")
    """File to which a row for each task is appended. Null: evaluations.jsonl in the run folder that the
    weights are from, else in the working directory."""
    json: bool = label(False)
    """Print one JSON object instead of a table, as ``--json`` does."""


@dataclass(frozen=True)
class EvaluateJob(InferenceJob):
    """A job plus the options of an evaluation."""

    WEIGHTS: ClassVar[str] = "evaluate.checkpoint"
    GENERATES: ClassVar[bool] = False

    evaluate: EvaluateConfig = part(EvaluateConfig)
    """Weights, tasks, and how they are scored."""

    def resolve(self, *, launched_ranks: int | None = None, gpus: int | None = None) -> Self:
        """Return the job with derived fields set, after a check of every rule.

        Raises:
            ConfigError: naming the field, its value, the rule, and what would work.
        """
        require_decoder(self.model, "scores text", "validation.interval of harness.train")
        options, most = self.evaluate, self.model.max_seq_len
        require_tasks("evaluate.tasks", options.tasks, lm_eval=True)
        window = options.seq_len or most
        if window > most:
            rule = f"must not exceed model.max_seq_len={most}"
            raise ConfigError("evaluate.seq_len", window, rule, f"at most {most}")
        require_stride("evaluate.stride", options.stride, window)
        unit = self.parallelism.sequence_unit
        # The longest pass that the model allows; the command shortens it to the longest row.
        length = max(unit, min(self.parallelism.padded(window), most // unit * unit))
        training = dataclasses.replace(
            self.training, seq_len=length, local_batch_size=options.batch_size, global_batch_size=None
        )
        job = dataclasses.replace(self, training=training)
        return super(EvaluateJob, job).resolve(launched_ranks=launched_ranks, gpus=gpus)

    @property
    def setting(self) -> Setting:
        """Inputs of the tasks, after ``evaluate.seq_len`` is set."""
        options = self.evaluate
        assert options.seq_len is not None, "the window is not known"
        return Setting(
            build_tokenizer(self.tokenizer),
            self.model.vocab_size,
            self.data,
            options.split,
            options.seq_len,
            "evaluate.seq_len",
            options.stride,
            options.limit,
            options.special_tokens,
        )

    @property
    def wants_json(self) -> bool:
        """Whether the job itself asks for JSON."""
        return self.evaluate.json
