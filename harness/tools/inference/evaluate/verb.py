"""``harness evaluate``: evaluate the weights of a run, a checkpoint, or safetensors.

Every layout computes the same metrics.

    harness evaluate checkpoint=runs/NAME/ID
    harness evaluate checkpoint=... data=local_text data.paths=[book.txt] evaluate.split=all
    harness evaluate checkpoint=... evaluate.tasks=[questions.jsonl] --json
    harness evaluate checkpoint=... evaluate.tasks=[lm_eval:hellaswag] parallelism=fsdp
"""

from __future__ import annotations

import dataclasses
import importlib.util

from harness.compose.verb import Result, Verb
from harness.config.fields import with_value
from harness.config.training import DATA, is_lm_eval, require_stride
from harness.tools.inference.evaluate.config import EvaluateJob
from harness.tools.inference.evaluate.results import append, file_of, rows_of, table
from harness.tools.inference.evaluate.tasks import open_task
from harness.tools.inference.ranks import is_first, run_on_ranks
from harness.tools.inference.source import use_checkpoint
from harness.util.errors import EXIT_OK, ConfigError, MachineError, UserError
from harness.weights.detect import choose_data


def evaluate(job: EvaluateJob, overrides: list[str]) -> int | Result:
    """Evaluate weights on tasks, and append the metrics to a file."""
    used = use_checkpoint(job, overrides, "evaluate.checkpoint")
    job = used.job
    library = [name for name in job.evaluate.tasks if is_lm_eval(name)]
    if library and importlib.util.find_spec("lm_eval") is None:
        rule = "needs lm-evaluation-harness, which is not installed"
        raise ConfigError("evaluate.tasks", library[0], rule, "pip install -e '.[eval]'")
    trained = used.found.manifest.get("job") or {}
    recorded = (trained.get("training") or {}).get("seq_len")
    window = job.evaluate.seq_len or min(recorded or job.model.max_seq_len, job.model.max_seq_len)
    require_stride("evaluate.stride", job.evaluate.stride, window)
    job = with_value(job, "evaluate.seq_len", window)
    if DATA in job.evaluate.tasks:
        data = choose_data(job, overrides, used.found)
        if data is None:
            raise UserError(
                f"{used.found.path}: records no data; would work: data=NAME, an option of conf/data"
            )
        job = dataclasses.replace(job, data=data)
    setting = job.setting
    tasks = [open_task(name, setting) for name in job.evaluate.tasks if name not in library]
    longest = max(len(row.tokens) - 1 for task in tasks for row in task.rows) if not library else window
    job = with_value(job, "training.seq_len", job.parallelism.padded(longest))
    results = run_on_ranks(job, "harness.tools.inference.evaluate.rank:evaluate", used.found, tasks)
    if not is_first():
        return EXIT_OK
    rows, file = rows_of(job, used.found, results), file_of(job, used.found)
    try:
        append(file, rows)
    except MachineError as error:
        return Result({"rows": rows, "written": None}, table(results), error=error)
    return Result({"rows": rows, "written": str(file)}, f"{table(results)}wrote {file}\n")


VERB = Verb("evaluate", evaluate, job=EvaluateJob, has_json=True)
