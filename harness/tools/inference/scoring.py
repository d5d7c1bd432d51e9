"""Score rows of tokens with a model on any layout, trained or loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from harness.data.batch import IGNORE_INDEX, Batch
from harness.metrics.columns import Metric
from harness.parallelism.execute import computes_loss
from harness.run.result import DATA, columns
from harness.tools.inference.evaluate import EvaluateJob
from harness.tools.inference.model import InferenceModel
from harness.tools.inference.tasks import Documents, ScoredRow, Setting
from harness.train import observer
from harness.util.errors import ConfigError, one_line
from harness.weights.detect import WeightFolder

if TYPE_CHECKING:
    from harness.train.engine import Engine

PADDING = 0
LENGTH_UNIT = 32
"""Passes are padded to a multiple of it, so that few different shapes occur."""


class Scorer:
    """Scores rows on all ranks together.

    A batch has rows of similar length, padded at the end, where no scored token sees it.
    Data-parallel ranks share the rows, and every rank takes part in every pass.
    """

    def __init__(self, model: Engine | InferenceModel) -> None:
        self.model = model
        self.job = model.job
        self.has_scores = computes_loss(model.mesh, model.parts)

    def score(self, rows: Sequence[ScoredRow]) -> np.ndarray:
        """Return the scores of all rows on every rank, as ``Documents.metrics`` takes them."""
        scores = torch.zeros(len(rows), 2, dtype=torch.float64, device=self.model.device)
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number].tokens))
        size = self.job.local_batch_size
        replicas = self.job.parallelism.data_parallel
        for start in range(0, len(rows), size * replicas):
            batch = order[start : start + size * replicas]
            mine = batch[self.model.mesh.data_rank :: replicas]
            length = self._length(len(rows[batch[0]].tokens) - 1)
            made = self.model.score(_batch([rows[number] for number in mine], size, length))
            if self.has_scores and mine:
                scores[torch.tensor(mine, device=scores.device)] += made[: len(mine)]
        if self.job.world_size > 1:
            dist.all_reduce(scores)
        return scores.cpu().numpy()

    def _length(self, longest: int) -> int:
        """Length of a pass; one for all with pipelines, split sequences or compiled kernels."""
        job = self.job
        layout = job.parallelism
        varies = layout.pp == layout.cp == 1 and not job.compile.enable
        if not varies or job.precision.linear != "none" or job.training.attention != "sdpa":
            return job.training.seq_len
        unit = math.lcm(LENGTH_UNIT, layout.tp)
        return min(-(-longest // unit) * unit, job.training.seq_len)


def _batch(rows: Sequence[ScoredRow], size: int, length: int) -> Batch:
    """Inputs and labels of the rows, padded to ``size`` rows of ``length`` tokens."""
    inputs_BT = torch.full((size, length), PADDING)
    labels_BT = torch.full((size, length), IGNORE_INDEX)
    for i, (tokens, start) in enumerate(rows):
        ids = torch.from_numpy(tokens.astype(np.int64))
        inputs_BT[i, : len(ids) - 1] = ids[:-1]
        labels_BT[i, start - 1 : len(ids) - 1] = ids[start:]
    return Batch(inputs_BT, labels_BT)


def evaluate(
    job: EvaluateJob, device: torch.device, found: WeightFolder, documents: Documents | None
) -> list[tuple[str, dict[str, Any]]]:
    """Evaluate on this rank of a process group; return name and metrics of each task, in the job's order.

    Args:
        job: the resolved job; training.seq_len is the longest pass.
        documents: of the task ``data``; None: that task is not asked for.
    """
    library = [name for name in job.evaluate.tasks if name != DATA]
    loaded = None
    if library:
        # Before the weights: a misspelled name costs nothing.
        try:
            from harness.tools.inference.library import Library

            loaded = Library(job, library)
        except ImportError as error:
            rule = f"lm-evaluation-harness or a module of its tasks: {one_line(str(error))}"
            works = "pip install -e '.[eval]'"
            raise ConfigError("evaluate.tasks", library[0], rule, works) from error
    model = InferenceModel(job, device)
    model.load(found)
    scorer = Scorer(model)
    metrics = {}
    if documents is not None:
        metrics[DATA] = documents.metrics(scorer.score(documents.rows))
    if loaded is not None:
        metrics |= loaded.evaluate(model, scorer, job.setting)
    return [(name, metrics[name]) for name in job.evaluate.tasks]


class EvaluationInLoop(observer.Periodic):
    """Loss of the held-out documents, which all ranks score together.

    Raises:
        UserError: there are none.
    """

    meaning = (
        "Loss of the held-out documents, `evaluation.data.<metric>`; a row of its own with `step`."
    )
    metrics = (Metric("evaluation.*", "number", meaning, "evaluation", line="{rest} {:.5g}"),)

    def __init__(self, run: observer.Run) -> None:
        super().__init__(run, run.job.evaluation.interval)
        job = run.job
        options = job.evaluation
        window = job.training.seq_len
        self.documents = Documents(
            Setting(run.tokenizer, job.data, "validation", window, options.stride, options.limit)
        )
        self.scorer = Scorer(run.engine)

    def act(self, step: int) -> observer.Row:
        engine = self.run.engine
        scores = self.scorer.score(self.documents.rows)
        engine.require_room(engine.balance.take_needed(), "the evaluation")
        row = self.run.progress.evaluation = columns(DATA, self.documents.metrics(scores))
        return row
