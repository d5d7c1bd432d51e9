"""What the plan says about its errors is what the published rows give."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.compose import compose_job
from harness.plan.evidence import EVIDENCE
from harness.plan.make import make_plan
from harness.plan.render import as_dict, render

FOLDER = Path(__file__).parents[2] / "experiments" / "published"


def test_the_table_is_that_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "errors", raising=False)
    import errors  # type: ignore[import-not-found]

    assert errors.classes([*errors.read(errors.FILE), *errors.torchtitan()]) == EVIDENCE


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("model=llama3_8b cluster=slurm_h100", "published for dense models on Hopper: "),
        ("model=qwen3_30b_a3b cluster=slurm_h100", "published for mixtures of experts on Hopper: "),
        ("model=llama3_8b cluster=slurm_h100 cluster.accelerator=L4", "no published rows of this device"),
        (
            "model=qwen3_30b_a3b cluster=slurm_h100 cluster.accelerator=B200",
            "no published rows of mixtures of experts on Blackwell",
        ),
    ],
)
def test_a_plan_says_how_far_it_can_be_trusted(overrides: str, line: str) -> None:
    made = make_plan(compose_job([*overrides.split(), "data=synthetic", "precision=bf16"]))
    assert line in render(made)
    assert (as_dict(made)["evidence"] is None) == line.startswith("no ")
