"""Commands in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with this checkout, without GPUs and a launcher's variables."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**kept, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
    )
