"""Where things are; importing it makes them importable, here and in processes that are started."""

from __future__ import annotations

import importlib.util
import os
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXPERIMENTS = HERE.parent
ROOT = EXPERIMENTS.parent
PACKAGES = ROOT / "packages"
"""Of a folder that make first-gpu built; a checkout has none."""

# numpy is large, and most machines have it: it is unpacked where it is missing.
if importlib.util.find_spec("numpy") is None:
    for wheel in PACKAGES.glob("numpy-*.whl"):
        zipfile.ZipFile(wheel).extractall(PACKAGES / "unpacked")
FOLDERS = [ROOT, EXPERIMENTS / "gpu_single", PACKAGES, PACKAGES / "unpacked"]
sys.path[1:1] = map(str, FOLDERS)
os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, FOLDERS), os.environ.get("PYTHONPATH", "")])
importlib.invalidate_caches()
