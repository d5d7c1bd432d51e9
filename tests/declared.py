"""The verbs that pyproject.toml names, as they are declared."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

from harness.app import Verb

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def _declared() -> dict[str, Verb]:
    targets = tomllib.loads(PYPROJECT.read_text())["project"]["scripts"].values()
    verbs = [importlib.import_module(target.removesuffix(":main")).VERB for target in targets]
    return {verb.name: verb for verb in verbs}


VERBS = _declared()
JOBS = {name: verb.job for name, verb in VERBS.items() if verb.job is not None}
"""Dataclasses of the verbs that take a job; each composes conf/NAME.yaml."""
