"""A tokenizer with more tokens than the model's vocabulary is refused before ranks are started."""

from __future__ import annotations

import pytest

from harness import train
from harness.compose import compose_job, compose_points
from harness.data.vocabulary import require_vocabulary
from harness.errors import ConfigError

TEXT = ["data=python_stdlib", "model=llama3_tiny", "model.vocab_size=256"]
REFUSED = r"model.vocab_size=256: the tokenizer has 258 tokens.*; would work: 258 and more, another tokenizer"


def test_a_job_that_reads_text() -> None:
    with pytest.raises(ConfigError, match=REFUSED):
        require_vocabulary(compose_job([*TEXT, "tokenizer=bytes"]))
    require_vocabulary(compose_job([*TEXT, "tokenizer=bytes", "model.vocab_size=258"]))
    require_vocabulary(compose_job([*TEXT[1:], "tokenizer=bytes", "data=synthetic"]))


def test_points_of_a_sweep_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("harness.sweep.run.sweep", seen.extend)
    train.train_sweep(compose_points([*TEXT, "tokenizer=bytes", "model.vocab_size=256,258"]))
    refused, legal = seen
    assert refused.job is None and "the tokenizer has 258 tokens" in refused.reason
    assert legal.job is not None
