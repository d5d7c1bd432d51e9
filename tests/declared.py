"""The verbs that pyproject.toml names, as they are declared."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

PYPROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
MODULES = [
    importlib.import_module(target.removesuffix(":main"))
    for target in PYPROJECT["project"]["scripts"].values()
]
MAINS = {module.VERB.name: module.main for module in MODULES}
VERBS = {module.VERB.name: module.VERB for module in MODULES}
JOBS = {name: verb.job for name, verb in VERBS.items() if verb.job is not None}
"""Dataclasses of the verbs that take a job; each composes conf/NAME.yaml."""
