"""Plans with given figures, in the place of real ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def plan_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Any]], None]:
    """Puts a function in the place of ``make_plan``."""

    def put(make_plan: Callable[[Any], Any]) -> None:
        monkeypatch.setitem(sys.modules, "harness.plan.make", SimpleNamespace(make_plan=make_plan))

    return put


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, and no launcher around this process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
