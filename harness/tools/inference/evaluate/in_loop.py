"""Evaluation while training, with the model and the layout of the run."""

from __future__ import annotations

from typing import Any

from harness.data.tokenizer import Tokenizer
from harness.run.evaluations import columns
from harness.tools.inference.evaluate.scoring import Scorer, Scores
from harness.tools.inference.evaluate.tasks import Setting, open_task


class EvaluationInLoop:
    """The tasks of ``evaluation``; all ranks construct it and call ``evaluate`` together.

    Raises:
        UserError: a task cannot be read.
    """

    def __init__(self, model: Scores, tokenizer: Tokenizer) -> None:
        job = model.job
        setting = Setting(
            tokenizer,
            job.model.vocab_size,
            job.data,
            "validation",
            job.training.seq_len,
            "training.seq_len",
            job.evaluation.stride,
            job.evaluation.limit,
        )
        self.tasks = [open_task(name, setting) for name in job.evaluation.tasks]
        self.scorer = Scorer(model)

    def evaluate(self) -> dict[str, Any]:
        """Return the metrics of all tasks as columns."""
        found = [columns(task.name, task.metrics(self.scorer.score(task.rows))) for task in self.tasks]
        return {name: value for metrics in found for name, value in metrics.items()}
