"""Names of other tools: every row of elsewhere.txt is typed, and what it says is typed too."""

import re
from operator import attrgetter

import pytest

from harness.compose.composer import Composer, compose_job
from harness.compose.help import help_text
from harness.compose.overrides import no_such_option
from harness.compose.verb import VERBS
from harness.config.elsewhere import HYDRA, rows
from harness.util.errors import UserError, as_typed

pytestmark = pytest.mark.usefixtures("alone")
EXAMPLES = {"training.tokens": "1M", "scale.warmup_ratio": "0.1", "cluster.ranks_per_node": "8"}
NOT_TYPED = re.compile(r"=\[?[A-Z]{4,}|\.NAME=|^-m")
"""Answers with a place for a value of one's own, and those for several jobs."""
NEEDS = {
    "parallelism.loss_parallel=false": "parallelism.tp=2",
    "parallelism.expert_tensor_parallel=true": "parallelism.tp=2",
    "parallelism.cp_load_balance=false": "parallelism.cp=2",
    "parallelism.cp_load_balance=documents": (
        "parallelism.cp=2 data=python_stdlib data.attend_across_documents=false"
    ),
    "cluster.device=cuda": "cluster=slurm cluster.ranks_per_node=8",
    "precision=float8": "precision.emulate=true",
    "precision=mxfp8": "precision.emulate=true",
}
"""What some answers take part with."""


@pytest.fixture(scope="module")
def usual():
    return compose_job(["runs_dir=runs"])


def value_of(row, usual):
    """What is typed for a name: what the field here has without it."""
    fields = [part for part in row.here.split() if row.takes_value(part)]
    if "=" in row.typed or not fields or fields[0].startswith("sweep."):
        return row.typed.partition("=")[2] or "3"
    return EXAMPLES.get(fields[0]) or as_typed(attrgetter(fields[0])(usual)) or "a"


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.tool}: {row.typed}")
def test_a_name_elsewhere_leads_to_the_name_here(row, usual):
    value = value_of(row, usual)
    typed = row.typed.partition("=")[0]
    if "pip install" in row.note:
        # The package may be installed here.
        answer = f"{row.typed}: {no_such_option(typed, value)}"
    else:
        with pytest.raises(UserError) as caught:
            compose_job([f"{typed}={value}"])
        answer = str(caught.value)
    rule = "Hydra only composes here" if row.tool == HYDRA else "name"
    assert rule in answer and row.note in answer and len(answer) <= 210
    if row.here == "-":
        assert "has no counterpart" in answer
    elif row.here.startswith("--help"):
        assert row.here in answer
        assert help_text(row.here.split()[1], [], VERBS["train"].parser(), Composer())
    else:
        shown = "VALUE" if value.startswith("[") else value
        parts = row.here.split()
        works = " ".join(f"{part}={shown}" if row.takes_value(part) else part for part in parts)
        assert f"; would work: {works}" in answer
        if not NOT_TYPED.search(works) and "pip install" not in row.note:
            needs = [text for start, text in NEEDS.items() if works.startswith(start)]
            compose_job(" ".join([*needs, works]).split())
