"""``harness generate`` and ``harness evaluate`` on virtual GPUs, where all logits are 0."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_rehearsed_training import run_folder, train

from harness.tools.rehearse.build import library
from harness.tools.rehearse.server import environment

pytestmark = pytest.mark.rehearsal


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    done = train(folder, "checkpoint=sync", "training.steps=2")
    assert done.returncode == 0, done.stderr
    return run_folder(folder)


def run(verb: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "harness", verb, *arguments, "--json"],
        env=environment(library()),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


DOCUMENTS = ("data=python_stdlib", "data.paths=['{stdlib}/json/*.py']", "evaluate.split=all")
LAYOUTS = {
    "single": [],
    "tp": ["parallelism=tp", "parallelism.tp=2"],
    "fsdp": ["parallelism=fsdp", "parallelism.dp_shard=2"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_generation(trained: Path, layout: str) -> None:
    options = ["generate.prompts=[a,bcd]", "generate.max_new_tokens=5", "generate.temperature=0.5"]
    found = run("generate", f"checkpoint={trained}", *options, *LAYOUTS[layout])
    assert [len(text["tokens"]) for text in found["texts"]] == [5, 5]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation(trained: Path, layout: str) -> None:
    found = run(
        "evaluate",
        f"checkpoint={trained}",
        *DOCUMENTS,
        "evaluate.limit=2",
        f"evaluate.out={trained}/e.jsonl",
        *LAYOUTS[layout],
    )
    assert [row["task"] for row in found["rows"]] == ["data"]
