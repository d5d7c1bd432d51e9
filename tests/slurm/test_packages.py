"""Ranks that SLURM starts find the packages that extend the harness."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from commands import ON_SLURM, Commands
from plugins import install
from scheduler import Scheduler

DECAY = """
from harness.config.optimizer import Decay
HALF = Decay(lambda progress: float(progress < 0.5))
"""


@pytest.mark.thorough
def test_ranks_on_nodes_find_a_package(slurm: Scheduler, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    install(packages, "half_decay", {"harness.schedule": {"half": "half_decay:HALF"}}, DECAY)
    path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", str(Path(__file__).parents[2]))])
    schedule = ("schedule.decay_type=half", "schedule.warmup_steps=0", "schedule.decay_ratio=1")
    commands = Commands(slurm, tmp_path)
    layout = ("name=half", "parallelism=fsdp", "cluster.wait=true", *ON_SLURM, *schedule)
    commands.train(*layout, PYTHONPATH=path)
    rows = (commands.only_run("half") / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(row)["lr"] for row in rows]
    assert rates == [rates[0]] * 3 + [0.0] * 3 and rates[0] > 0
