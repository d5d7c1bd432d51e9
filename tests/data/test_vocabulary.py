"""A tokenizer with more tokens than the model's vocabulary is refused before ranks are started."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.compose.composer import compose_job, compose_points
from harness.launch import train
from harness.launch.begin import require_vocabulary
from harness.util.errors import ConfigError, UserError

TEXT = ["data=python_stdlib", "model=llama3_tiny", "model.vocab_size=256"]
REFUSED = r"model.vocab_size=256: the tokenizer has 258 tokens.*; would work: 258 and more, another tokenizer"


def test_a_job_that_reads_text() -> None:
    with pytest.raises(ConfigError, match=REFUSED):
        require_vocabulary(compose_job([*TEXT, "tokenizer=bytes"]))
    require_vocabulary(compose_job([*TEXT, "tokenizer=bytes", "model.vocab_size=258"]))
    require_vocabulary(compose_job([*TEXT[1:], "tokenizer=bytes", "data=synthetic"]))


def test_points_of_a_sweep_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("harness.launch.sweep.run.sweep", seen.extend)
    train.train_sweep(compose_points([*TEXT, "tokenizer=bytes", "model.vocab_size=256,258"]))
    refused, legal = seen
    assert refused.job is None and "the tokenizer has 258 tokens" in refused.reason
    assert legal.job is not None


def test_a_missing_file_is_found_before_ranks_start(tmp_path: Path) -> None:
    missing = ["tokenizer=llama3", f"tokenizer.path={tmp_path}/tokenizer.model", "model.vocab_size=128256"]
    with pytest.raises(UserError, match=r"^tokenizer file .*/tokenizer.model: No such file"):
        require_vocabulary(compose_job([*TEXT, *missing]))
    require_vocabulary(compose_job([*TEXT, *missing, "cluster=slurm_cpu"]))  # nodes may have it


def test_a_dry_run_of_a_local_job_does_not_train() -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.dry_run=true: shows a job for SLURM, .*cluster=slurm"):
        train.train(compose_job([*TEXT, "cluster.dry_run=true", "data=synthetic"]), [])
