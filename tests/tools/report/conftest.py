"""Fixtures that replace real plans by given values."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "experiments" / "gpu_single"))


@pytest.fixture
def plan_with(monkeypatch):
    """Replace ``make_plan`` by a function."""

    def put(make_plan):
        monkeypatch.setitem(
            sys.modules, "harness.tools.plan.make", SimpleNamespace(make_plan=make_plan)
        )

    return put


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Hide GPUs and launchers from this process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
