"""What only a GPU can show: the same job there gives the loss a CPU gives, in float32 and in bfloat16."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = [
    *("model=llama3_tiny", "data=synthetic", "tokenizer=bytes", "training.steps=4", "optimizer.lr=0"),
    *("training.seq_len=64", "training.global_batch_size=4", "metrics.console=none"),
]


def result_of(tmp_path: Path, *overrides: str) -> dict:
    runs = tmp_path / "-".join(overrides).replace("/", "_")
    command = [sys.executable, "-m", "harness.train", *SMALL, *overrides, f"runs_dir={runs}"]
    subprocess.run(command, check=True)
    [path] = runs.rglob("result.json")
    return json.loads(path.read_text())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["single", "fsdp"])
def test_gpu_trains_and_counts_memory(tmp_path: Path, precision: str, layout: str) -> None:
    """Initial values are drawn on the device, so only the level of the loss can be compared."""
    job = [f"precision={precision}", f"parallelism={layout}"]
    gpu = result_of(tmp_path, *job, "cluster.device=cuda", "cluster.ranks_per_node=1")
    cpu = result_of(tmp_path, f"precision={precision}", "cluster.device=cpu")
    assert gpu["loss"] == pytest.approx(cpu["loss"], rel=0.05)
    assert gpu["memory_gib"] > 0
    assert gpu["tokens_per_second_per_rank"] > 0


@pytest.mark.gpu
def test_gpu_is_deterministic_when_asked(tmp_path: Path) -> None:
    overrides = ["cluster.device=cuda", "debug=deterministic", "optimizer.lr=1e-3"]
    losses = [result_of(tmp_path / name, *overrides)["loss"] for name in ("a", "b")]
    assert losses[0] == losses[1]
