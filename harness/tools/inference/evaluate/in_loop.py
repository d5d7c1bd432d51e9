"""Evaluation while training, with the model and the layout of the run."""

from __future__ import annotations

from harness.metrics.columns import Metric
from harness.run.evaluations import columns
from harness.tools.inference.evaluate.scoring import Scorer
from harness.tools.inference.evaluate.tasks import Setting, open_task
from harness.train.observer import Periodic, Row, Run


class EvaluationInLoop(Periodic):
    """The tasks of ``evaluation``, which all ranks score together.

    Raises:
        UserError: a task cannot be read.
    """

    metrics = (
        Metric(
            "evaluation.*",
            "number",
            "Metric of a task, `evaluation.<task>.<metric>`; a row of its own with `step`.",
            "evaluation",
            line="{rest} {:.5g}",
        ),
    )

    def __init__(self, run: Run) -> None:
        super().__init__(run, run.job.evaluation.interval)
        job = run.job
        setting = Setting(
            run.tokenizer,
            job.model.vocab_size,
            job.data,
            "validation",
            job.training.seq_len,
            "training.seq_len",
            job.evaluation.stride,
            job.evaluation.limit,
        )
        self.tasks = [open_task(name, setting) for name in job.evaluation.tasks]
        self.scorer = Scorer(run.engine)

    def act(self, step: int) -> Row:
        found = [columns(task.name, task.metrics(self.scorer.score(task.rows))) for task in self.tasks]
        row = {name: value for metrics in found for name, value in metrics.items()}
        self.run.progress.evaluation = row
        return row
