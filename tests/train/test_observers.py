"""Observers: they change no number of a run, and packages can add one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from plugins import install

from harness.config.training import OBSERVERS
from harness.launch.pool import RankPool
from harness.metrics.jsonl import read_metrics
from harness.train import trainer
from harness.train.observer import Need, Observer, Run
from harness.train.observers import observers_of
from harness.util.errors import EXIT_BUG, ConfigError

SMALL = ("training.steps=8", "training.seq_len=32", "training.global_batch_size=4", "checkpoint.interval=3")
ALL = (
    *("profiling=on", "profiling.interval=4", "profiling.warmup=1", "profiling.active=1"),
    *("profiling.phases=true", "debug.nan=true", "metrics.all_ranks=true"),
    *("validation.interval=3", "validation.steps=2", "evaluation.interval=4"),
)
# Text, because the task of the evaluation reads documents.
DATA = ("data=text_files", "data.validation_fraction=0.5", "tokenizer=bytes")


@pytest.fixture
def texts(tmp_path: Path) -> str:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.txt").write_text("a line of text\n" * (20 + number))
    return f"data.path={folder}"
