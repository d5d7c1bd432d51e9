"""Evaluation while training gives the values of ``harness evaluate`` on the checkpoint of that step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from jobs import tiny

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.metrics.recorder import Recorder
from harness.run.folder import RunFolder
from harness.run.result import newest
from harness.tools.inference.evaluate import EvaluateJob, evaluate
from harness.train.engine import Engine
from harness.train.trainer import Trainer

LAYOUTS = {
    "tp": ["parallelism=tp", "parallelism.tp=2"],
    "pp": ["parallelism=pp", "parallelism.pp=2"],
    "cp": ["parallelism=cp", "parallelism.cp=2"],
}
STEPS, INTERVAL = 3, 2


class Rows(Recorder):
    """Keeps the rows that a trainer logs."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def begin(self, start_step: int, metrics: Any = (), *, has_curve: bool = False) -> None:
        return

    def log(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))

    def message(self, text: str) -> None:
        return


def train(job: Job) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of metrics and the result of one rank."""
    recorder, engine = Rows(), Engine(job, torch.device("cpu"))
    trainer = Trainer(job, RunFolder(job.run_dir), engine, recorder, time.monotonic())
    assert trainer.train() == "completed"
    return recorder.rows, trainer.result()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_verb(layout, tmp_path, pool):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(
            f"document {number} has words, words and words\n" * 8
        )
    job = tiny(
        *LAYOUTS[layout],
        *("model.vocab_size=258", "data=local_text", "data.validation_fraction=0"),
        *(f"data.paths=[{tmp_path}/*.txt]", f"data.validation_paths=[{tmp_path}/1.txt]"),
        *(f"data.cache_dir={tmp_path}/cache", f"runs_dir={tmp_path}/runs", "optimizer.lr=0.05"),
        *(f"training.steps={STEPS}", "training.seq_len=64", "training.global_batch_size=8"),
        *(f"checkpoint.interval={INTERVAL}", f"evaluation.interval={INTERVAL}"),
        "evaluation.stride=16",
    )
    (job.run_dir / "checkpoints").mkdir(parents=True)
    (job.run_dir / "job.json").write_text(job.to_json())
    rows, result = pool.run(job.world_size, train, job)[0]
    inside = {
        row.pop("step"): row for row in rows if any(name.startswith("evaluation.") for name in row)
    }
    assert list(inside) == [INTERVAL, STEPS]
    assert len(inside[STEPS]) > 4
    typed = [f"checkpoint={job.run_dir}", "cluster.device=cpu", "evaluate.stride=16"]
    alone = compose_job(typed, config_name="evaluate", schema=EvaluateJob)
    assert evaluate(alone, typed).code == 0
    after = newest(job.run_dir)
    assert after.keys() == inside[STEPS].keys()
    for name, value in inside[STEPS].items():
        close = {"rel": 1e-4} if name.endswith("perplexity") else {"abs": 1e-4, "rel": 0}
        assert after[name] == pytest.approx(value, **close), name
    assert {name: result[name] for name in after} == inside[STEPS]
