"""One rank of an evaluation: load the weights, score the rows of every task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from harness.config.training import is_lm_eval
from harness.tools.inference.evaluate.config import EvaluateJob
from harness.tools.inference.evaluate.scoring import Scorer
from harness.tools.inference.evaluate.tasks import Task
from harness.tools.inference.model import InferenceModel
from harness.util.errors import ConfigError, one_line
from harness.weights.detect import WeightFolder


def evaluate(
    job: EvaluateJob, device: torch.device, found: WeightFolder, tasks: Sequence[Task]
) -> list[tuple[str, dict[str, Any]]]:
    """Evaluate on this rank of a process group.

    Args:
        job: the resolved job; training.seq_len is the longest pass.
        device: where this rank computes.
        found: the weights.
        tasks: all tasks but those of lm-evaluation-harness.

    Returns:
        Name and metrics of each task, in the order of the job.
    """
    library = [name for name in job.evaluate.tasks if is_lm_eval(name)]
    loaded = None
    if library:
        # Before the weights: a misspelled name costs nothing.
        try:
            from harness.tools.inference.evaluate.library import Library

            loaded = Library(job, library)
        except ImportError as error:
            rule = (
                f"lm-evaluation-harness or a module of its tasks cannot be imported ({one_line(str(error))})"
            )
            raise ConfigError("evaluate.tasks", library[0], rule, "pip install -e '.[eval]'") from error
    model = InferenceModel(job, device)
    model.load(found)
    scorer = Scorer(model)
    metrics = {task.name: task.metrics(scorer.score(task.rows)) for task in tasks}
    if loaded is not None:
        metrics |= loaded.evaluate(model, scorer, job.setting)
    return [(name, metrics[name]) for name in job.evaluate.tasks]
