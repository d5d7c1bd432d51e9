"""Peak memory in GiB, of this process and not of its parent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.metrics import memory


def test_peak_follows_an_allocation() -> None:
    script = (
        "from harness.metrics.memory import peak_memory_gib as peak\n"
        "before = peak('cpu'); block = b'x' * 2**27; del block\n"
        "print(peak('cpu') - before)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 0.06 < float(done.stdout) < 0.2


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_units_of_getrusage(
    platform: str, unit: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "missing")
    monkeypatch.setattr(memory.sys, "platform", platform)
    usage = SimpleNamespace(ru_maxrss=2**30 // unit)
    monkeypatch.setattr(memory.resource, "getrusage", lambda who: usage)
    assert memory.peak_memory_gib("cpu") == 1.0
