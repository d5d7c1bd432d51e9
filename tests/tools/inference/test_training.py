"""Evaluation while training gives the values of ``harness evaluate`` on the checkpoint of that step."""

import time

import pytest
import torch
from jobs import tiny

from harness.compose.composer import compose_job
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
STEPS = 3


def train(job):
    """The result of one rank."""
    engine = Engine(job, torch.device("cpu"))
    trainer = Trainer(job, RunFolder(job.run_dir), engine, None, time.monotonic())
    assert trainer.train() == "completed"
    return trainer.result()


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
        *("checkpoint.interval=2", "evaluation.interval=2"),
        "evaluation.stride=16",
    )
    (job.run_dir / "checkpoints").mkdir(parents=True)
    (job.run_dir / "job.json").write_text(job.to_json())
    result = pool.run(job.world_size, train, job)[0]
    typed = [f"checkpoint={job.run_dir}", "cluster.device=cpu", "evaluate.stride=16"]
    alone = compose_job(typed, config_name="evaluate", schema=EvaluateJob)
    assert evaluate(alone, typed).code == 0
    after = newest(job.run_dir)
    assert len(after) > 4
    for name, value in after.items():
        close = {"rel": 1e-4} if name.endswith("perplexity") else {"abs": 1e-4, "rel": 0}
        assert result[name] == pytest.approx(value, **close), name
