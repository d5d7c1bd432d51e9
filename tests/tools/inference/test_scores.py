"""Scores equal transformers' log-probabilities, for every family and on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families_table import CASES, random_model, to_transformers
from tiers import rest_is_thorough

from harness.compose.composer import compose_job
from harness.config.fields import with_value
from harness.launch.pool import RankPool
from harness.tools.inference.evaluate import EvaluateJob
from harness.tools.inference.model import InferenceModel
from harness.tools.inference.scoring import Scorer
from harness.tools.inference.tasks import Row
from harness.train.setup import process_group
from harness.weights.detect import find_source

WINDOW = 48
LAYOUTS = {
    "tp": ["parallelism=tp", "parallelism.tp=2"],
    "pp": ["parallelism=pp", "parallelism.pp=2"],
    "cp": ["parallelism=cp", "parallelism.cp=2"],
    "tp_pp": ["parallelism=tp", "parallelism.tp=2", "parallelism.pp=2"],
    "tp_cp": ["parallelism=tp", "parallelism.tp=2", "parallelism.cp=2"],
    "ulysses": ["parallelism=cp", "parallelism.cp=2", "parallelism.cp_method=ulysses"],
    "fsdp": ["parallelism=fsdp", "parallelism.dp_shard=2"],
    "ep": ["parallelism=fsdp", "parallelism.dp_shard=2", "parallelism.ep=2"],
}
ROWS = ("llama", "deepseek_v3")


def rows(vocab_size: int) -> list[Row]:
    """Rows of different lengths, more than one batch; some are scored from the middle."""
    generator = np.random.default_rng(3)
    lengths = (49, 12, 30, 2, 33, 40, 7, 20, 25, 49, 5)
    return [Row(generator.integers(0, vocab_size, n), max(1, n // 2 * (n % 2))) for n in lengths]


def expected(theirs: Any, row: Row) -> tuple[float, int]:
    tokens = torch.from_numpy(row.tokens)
    with torch.no_grad():
        logits = theirs(tokens[None, :-1], use_cache=False).logits[0].float()
    logits, labels = logits[row.start - 1 :], tokens[row.start :]
    nats = logits.log_softmax(-1).gather(1, labels[:, None]).sum().item()
    return nats, int((logits.argmax(-1) != labels).sum())


def job_of(folder: Path, *overrides: str) -> EvaluateJob:
    job = compose_job(
        [
            f"checkpoint={folder}",
            "tokenizer=bytes",
            "cluster.device=cpu",
            "evaluate.batch_size=4",
            *overrides,
        ],
        config_name="evaluate",
        schema=EvaluateJob,
    )
    return with_value(job, "training.seq_len", WINDOW)


def on_rank(job: EvaluateJob, folder: str, given: list[Row]) -> np.ndarray:
    model = InferenceModel(job, torch.device("cpu"))
    model.load(find_source(folder))
    return Scorer(model).score(given)


def require_equal(made: np.ndarray, theirs: Any, given: list[Row]) -> None:
    for number, (row, scores) in enumerate(zip(given, made, strict=True)):
        nats, misses = expected(theirs, row)
        assert abs(scores[0] - nats) < 1e-4, f"row {number}: {scores[0]} and not {nats}"
        assert scores[1] == misses, f"row {number}: {scores[1]} and not {misses} tokens are not greedy"


@pytest.mark.parametrize("case", rest_is_thorough(CASES, "llama", "deepseek_v3"))
def test_one_process(case: str, tmp_path: Path) -> None:
    model, given = random_model(CASES[case]), rows(CASES[case].vocab_size)
    theirs = to_transformers(model, tmp_path / "hf")
    job = job_of(tmp_path / "hf", f"evaluate.seq_len={WINDOW}")
    with process_group(job, torch.device("cpu")):
        require_equal(on_rank(job, str(tmp_path / "hf"), given), theirs, given)


TABLE = [f"{case} {layout}" for case in ROWS for layout in LAYOUTS]
IN_CORE = ("llama tp", "llama pp", "llama cp", "llama tp_cp", "deepseek_v3 ep")


@pytest.mark.parametrize("row", rest_is_thorough(TABLE, *IN_CORE))
@pytest.mark.parametrize("chunks", rest_is_thorough([1, 3], 3))
def test_ranks(row: str, chunks: int, tmp_path: Path, pool: RankPool) -> None:
    case, layout = row.split()
    if layout == "ep" and not CASES[case].moe.enabled:
        pytest.skip("the model has no experts")
    if chunks > 1 and layout not in ("tp_cp", "pp"):
        pytest.skip("the loss has nothing more to do with other layouts")
    model, given = random_model(CASES[case]), rows(CASES[case].vocab_size)
    theirs = to_transformers(model, tmp_path / "hf")
    options = [f"evaluate.seq_len={WINDOW}", f"training.loss_chunks={chunks}"]
    job = job_of(tmp_path / "hf", *LAYOUTS[layout], *options)
    for made in pool.run(job.world_size, on_rank, job, str(tmp_path / "hf"), given):
        require_equal(made, theirs, given)
