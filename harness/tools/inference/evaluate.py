"""The verb ``evaluate``."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from harness.checkpoint.catalog import is_url
from harness.compose.verb import Result, Verb
from harness.config.fields import label, part, with_value
from harness.config.parallelism import degrees_in_words
from harness.config.training import require_stride
from harness.data.tokenizer import build_tokenizer, check_vocab_size
from harness.model.architecture import require_decoder
from harness.run.result import DATA, EVALUATIONS, LM_EVAL, Metrics, shown, versions
from harness.tools.inference.inference import InferenceJob, is_first, run_on_ranks, use_checkpoint
from harness.tools.inference.tasks import SPLITS, Documents, Setting
from harness.util.encoding import dumps, flatten
from harness.util.errors import EXIT_OK, ConfigError, MachineError, UserError
from harness.util.tables import Table, columns_of, to_text
from harness.weights.detect import WeightFolder, choose_data

HELP = """`harness evaluate`: evaluate the weights of a run, a checkpoint, or safetensors.

Every layout computes the same metrics.

    harness evaluate checkpoint=runs/NAME/ID
    harness evaluate checkpoint=... data=local_text 'data.paths=[book.txt]' evaluate.split=all
    harness evaluate checkpoint=... 'evaluate.tasks=[lm_eval:hellaswag]' parallelism=fsdp --json
"""


_COLUMNS = columns_of("""
    task    task
    metric  metric
    value   value   s
""")


@dataclass(frozen=True)
class EvaluateConfig:
    """Weights, tasks, and how they are scored."""

    checkpoint: str | None = label(None)
    """Weights: a run folder (its newest complete checkpoint), a DCP checkpoint, or a folder of
    safetensors. ``checkpoint=PATH`` is short for it."""
    tasks: list[str] = label(factory=lambda: ["data"])
    """Each is ``data`` (loss on the documents of ``data=``), or ``lm_eval:NAME``, a task of
    lm-evaluation-harness."""
    split: str = label("validation", choices=SPLITS)
    """Documents of the task ``data``: those held out for validation, those trained on, or all."""
    seq_len: int | None = label(None, least=2)
    """Window: the most tokens of a pass. Null: the length that the weights were trained with, or
    ``model.max_seq_len`` if they do not record it."""
    stride: int | None = label(None, least=1)
    """Task ``data``: tokens that each window scores; the tokens before them are context. Null: the
    window, with which passes are cheapest and context is shortest."""
    limit: int | None = label(None, least=1)
    """Use the first examples (or documents) of each task only; null: all."""
    batch_size: int = label(8, least=1)
    """Rows per data-parallel rank and pass."""
    num_fewshot: int | None = label(None, least=0)
    """lm_eval: examples in the prompt; null: as the task says."""
    include_path: str | None = label(None)
    """lm_eval: a folder with task files of your own."""
    out: str | None = label(None, written="file")
    """File to which a row for each task is appended. Null: evaluations.jsonl in the run folder that
    the weights are from, else in the working directory."""


@dataclass(frozen=True)
class EvaluateJob(InferenceJob):
    """A job plus the options of an evaluation."""

    WEIGHTS: ClassVar[str] = "evaluate.checkpoint"
    GENERATES: ClassVar[bool] = False

    evaluate: EvaluateConfig = part(EvaluateConfig)
    """Weights, tasks, and how they are scored."""

    def resolve(self, *, launched_ranks: int | None = None, gpus: int | None = None) -> Self:
        """Also check the options of the evaluation; raise ConfigError for a wrong one."""
        require_decoder(self.model, "scores text", "validation.interval of harness.train")
        options = self.evaluate
        most = self.model.max_seq_len
        _check_tasks(options.tasks)
        window = options.seq_len or most
        if window > most:
            rule = f"must not exceed model.max_seq_len={most}"
            raise ConfigError("evaluate.seq_len", window, rule, f"at most {most}")
        require_stride("evaluate.stride", options.stride, window)
        unit = self.parallelism.sequence_unit
        # The longest pass that the model allows; the command shortens it to the longest row.
        length = max(unit, min(self.parallelism.padded(window), most // unit * unit))
        training = dataclasses.replace(
            self.training,
            seq_len=length,
            local_batch_size=options.batch_size,
            global_batch_size=None,
        )
        job = dataclasses.replace(self, training=training)
        return super(EvaluateJob, job).resolve(launched_ranks=launched_ranks, gpus=gpus)

    @property
    def setting(self) -> Setting:
        """How text becomes rows, after ``evaluate.seq_len`` is set."""
        each = self.evaluate
        assert each.seq_len is not None, "the window is not known"
        tokenizer = build_tokenizer(self.tokenizer)
        return Setting(tokenizer, self.data, each.split, each.seq_len, each.stride, each.limit)


def _check_tasks(names: Sequence[str]) -> None:
    kinds = f"{DATA}, {LM_EVAL}NAME"
    if not names:
        raise ConfigError("evaluate.tasks", "[]", "names no task", kinds)
    for name in names:
        if name != DATA and (not name.startswith(LM_EVAL) or name == LM_EVAL):
            raise ConfigError("evaluate.tasks", name, "no such task", kinds)
    columns = [name.removeprefix(LM_EVAL) for name in names]
    if len(set(columns)) < len(columns):
        raise ConfigError("evaluate.tasks", names, "two tasks have one name", "each task once")


def rows_of(
    job: EvaluateJob, found: WeightFolder, results: Sequence[tuple[str, Metrics]]
) -> list[Metrics]:
    """Rows of the file: metrics of each task, and what they were computed with."""
    described = {
        "checkpoint": found.path,
        "step": found.manifest.get("step"),
        "model": job.model.name,
        "seq_len": job.evaluate.seq_len,
        "stride": job.evaluate.stride,
        "limit": job.evaluate.limit,
        "precision": job.precision.param_dtype,
        "layout": degrees_in_words(job.parallelism.degrees),
        "time": time.time(),
        "code": versions(),
    }
    return [flatten({"task": task, **metrics, **described}) for task, metrics in results]


def file_of(job: EvaluateJob, found: WeightFolder) -> Path:
    """The file to append to: ``evaluate.out``, or beside the run that the weights are from."""
    if job.evaluate.out is not None:
        return Path(job.evaluate.out)
    folders = [] if is_url(found.path) else Path(found.path).resolve().parents
    runs = [folder for folder in folders if (folder / "job.json").is_file()]
    return runs[0] / EVALUATIONS if runs else Path(EVALUATIONS)


def append(file: Path, rows: Sequence[Metrics]) -> None:
    """Append rows."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.write("".join(f"{dumps(row)}\n" for row in rows))


def table(results: Sequence[tuple[str, Metrics]]) -> str:
    """Metrics as aligned text, one line for each."""
    lines = []
    for task, metrics in results:
        for name, value in metrics.items():
            lines.append({"task": task, "metric": name, "value": shown(value)})
    return to_text(Table(_COLUMNS, lines, missing=""))


def evaluate(job: EvaluateJob, overrides: list[str]) -> int | Result:
    """Evaluate weights on tasks, and append the metrics to a file."""
    job, found = use_checkpoint(job, overrides)
    library = [name for name in job.evaluate.tasks if name != DATA]
    trained = found.manifest.get("job") or {}
    recorded = (trained.get("training") or {}).get("seq_len")
    window = job.evaluate.seq_len or min(recorded or job.model.max_seq_len, job.model.max_seq_len)
    require_stride("evaluate.stride", job.evaluate.stride, window)
    job = with_value(job, "evaluate.seq_len", window)
    if DATA in job.evaluate.tasks:
        data = choose_data(job, overrides, found)
        if data is None:
            raise UserError(
                f"{found.path}: records no data; would work: data=NAME, an option of conf/data"
            )
        job = dataclasses.replace(job, data=data)
    setting = job.setting
    documents = None
    longest = window
    check_vocab_size(setting.tokenizer.vocab_size, job.model.vocab_size)
    if DATA in job.evaluate.tasks:
        documents = Documents(setting)
        if not library:
            longest = max(len(row.tokens) for row in documents.rows) - 1
    job = with_value(job, "training.seq_len", job.parallelism.padded(longest))
    results = run_on_ranks(job, "harness.tools.inference.scoring:evaluate", found, documents)
    if not is_first():
        return EXIT_OK
    rows = rows_of(job, found, results)
    file = file_of(job, found)
    try:
        append(file, rows)
    except OSError as error:
        failure = MachineError(f"{file}: cannot be written: {error.strerror}")
        return Result({"rows": rows, "written": None}, table(results), error=failure)
    return Result({"rows": rows, "written": str(file)}, f"{table(results)}wrote {file}\n")


VERB = Verb("evaluate", evaluate, help=HELP, job=EvaluateJob, has_json=True)
