"""``harness generate`` and ``harness evaluate`` on virtual GPUs, where all logits are 0."""

import json

import pytest
from processes import python
from test_rehearsed_training import run_folder, train

from harness.tools.rehearse.build import library
from harness.tools.rehearse.server import environment

pytestmark = pytest.mark.rehearsal


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    done = train(folder, "checkpoint=sync", "training.steps=2")
    assert done.returncode == 0, done.stderr
    return run_folder(folder)


@pytest.mark.parametrize("layout", ["single", "tp parallelism.tp=2", "fsdp parallelism.dp_shard=2"])
def test_generation_and_evaluation(trained, layout):
    def run(verb, *arguments):
        typed = [
            verb,
            f"checkpoint={trained}",
            *f"parallelism={layout}".split(),
            *arguments,
            "--json",
        ]
        done = python("-m", "harness", *typed, **environment(library()))
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    options = ["generate.prompts=[a,bcd]", "generate.max_new_tokens=5", "generate.temperature=0.5"]
    assert [len(text["tokens"]) for text in run("generate", *options)["texts"]] == [5, 5]
    documents = ("data=python_stdlib", "data.paths=['{stdlib}/json/*.py']", "evaluate.split=all")
    found = run("evaluate", *documents, "evaluate.limit=2", f"evaluate.out={trained}/e.jsonl")
    assert [row["task"] for row in found["rows"]] == ["data"]
