"""``python -m harness.evaluate``: evaluate the weights of a run, a checkpoint, or safetensors.

Every layout computes the same metrics.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys

from harness.app import run_verb
from harness.config import with_value
from harness.errors import EXIT_OK, ConfigError, UserError
from harness.evaluate.config import EvaluateJob
from harness.evaluate.names import DATA, is_lm_eval, require_stride
from harness.evaluate.results import append, file_of, rows_of, table
from harness.evaluate.tasks import open_task
from harness.exchange.found import choose_data
from harness.inference.ranks import is_first, run_on_ranks
from harness.inference.source import use_checkpoint
from harness.metrics.encoding import dumps

JSON_FLAG = "--json"


def evaluate(job: EvaluateJob, overrides: list[str], *, as_json: bool = False) -> int:
    """Evaluate, write and print metrics; return the exit code."""
    used = use_checkpoint(job, overrides, "evaluate.checkpoint")
    job = used.job
    library = [name for name in job.evaluate.tasks if is_lm_eval(name)]
    if library and importlib.util.find_spec("lm_eval") is None:
        rule = "needs lm-evaluation-harness, which is not installed"
        raise ConfigError("evaluate.tasks", library[0], rule, "pip install 'harness[eval]'")
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
    results = run_on_ranks(job, "harness.evaluate.rank:evaluate", used.found, tasks)
    if not is_first():
        return EXIT_OK
    rows, file = rows_of(job, used.found, results), file_of(job, used.found)
    append(file, rows)
    if as_json or job.evaluate.json:
        sys.stdout.write("".join(f"{dumps(row)}\n" for row in rows))
    else:
        sys.stdout.write(f"{table(results)}wrote {file}\n")
    return EXIT_OK


def main() -> None:
    """Entry point of ``python -m harness.evaluate`` and of the console script."""

    def verb(job: EvaluateJob, overrides: list[str]) -> int:
        return evaluate(job, overrides, as_json=JSON_FLAG in sys.argv[1:])

    run_verb(verb, config_name="evaluate", schema=EvaluateJob, flags=(JSON_FLAG,))


if __name__ == "__main__":
    main()
