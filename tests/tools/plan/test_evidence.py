"""What the plan says about its errors is what the published rows give."""

import csv
import math
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.compose.composer import compose_job
from harness.tools.plan import evidence
from harness.tools.plan.constants import Calibration, Constants
from harness.tools.plan.evidence import EVIDENCE, RESOLUTION
from harness.tools.plan.make import make_plan
from harness.tools.plan.plan import Resolution
from harness.tools.plan.render import as_dict, render

sys.path.insert(0, str(Path(__file__).parents[3] / "experiments" / "measure"))

import held_out
import held_rows


def test_the_tables_are_those_of_the_committed_rows():
    rows = held_rows.read()
    assert held_rows.evidence(rows, held_rows.SPEED) == EVIDENCE["throughput"]
    assert held_rows.evidence(rows, held_rows.MEMORY) == EVIDENCE["memory"]
    printed = {}
    exec(held_out.bands(rows), {"Resolution": Resolution}, printed)
    assert printed == {"EVIDENCE": EVIDENCE, "RESOLUTION": RESOLUTION}
    assert held_rows.resolution(rows) == RESOLUTION
    assert held_out.report(rows) in held_out.REPORT.read_text()


def test_the_defaults_are_fitted_to_all_rows():
    constants = Constants()
    says = f"Fitted to all rows: matmul {constants.matmul}, float8 {constants.float8}, hgx {constants.hgx}."
    assert says in held_out.REPORT.read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/measurements.md"])
def test_pages_have_the_errors_of_the_report(page):
    text, report = (held_out.ROOT / page).read_text(), held_out.REPORT.read_text()
    rows, median = re.search(r"^\| all \| (\d+) \| ([\d.]+)%", report, re.MULTILINE).groups()
    assert f"{rows} " in text and f"{median} %" in text


def test_committed_rows_are_planned_as_today():
    """The first row of every table; its constants were fitted without it."""
    firsts = {row["table"]: row for row in reversed(list(csv.DictReader(held_out.FILE.open())))}
    rows = {row.table: row for row in reversed(held_rows.read())}
    for table, now in zip(firsts, held_out.plan_all(list(firsts.values())), strict=True):
        kept = rows[table]
        assert kept.published == pytest.approx(now.published, rel=1e-4)
        assert kept.planned == pytest.approx(now.plan.speed.tokens_per_second_per_rank, rel=0.05), (
            table
        )
        assert kept.memory is None or kept.memory == pytest.approx(
            now.planned_gib / kept.published_gib - 1, abs=1e-3
        ), table


def test_four_of_five_rows_of_one_more_source_are_inside():
    """If sources differ by more than their rows, by less, and if rows do not differ."""
    draw = random.Random(0)
    for between, within in ((0.2, 0.1), (0.05, 0.1), (0.1, 1e-6)):
        inside = 0
        for _ in range(1000):
            means = [draw.gauss(0.1, between) for _ in range(5)]
            *rows, new = [math.exp(draw.gauss(mean, within)) for mean in means for _ in range(3)][
                :13
            ]
            low, high = held_rows.predicted(rows, "aaabbbcccddd")
            inside += low <= new <= high
        assert 0.77 <= inside / 1000 <= 0.84


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("model=llama3_8b", " published rows of dense models on Hopper ("),
        (
            "model=llama3_8b cluster.accelerator=MI300X",
            "by all published rows (dense models on CDNA 3 have 4, of",
        ),
        (
            "model=llama3_8b cluster.accelerator=L4",
            "no evidence: no published throughput of dense models on L4",
        ),
        (
            "model=qwen3_30b_a3b cluster.accelerator=MI300X",
            "no evidence: no published throughput of mixtures of experts on CDNA 3",
        ),
        (
            "experiment=flux_debug data=drawn_shapes",
            "no evidence: no published memory of models of pictures",
        ),
    ],
)
def test_a_plan_says_how_far_it_can_be_trusted(overrides, line):
    typed = ["data=synthetic", "cluster=slurm_h100", *overrides.split(), "precision=bf16"]
    made = make_plan(compose_job(typed))
    assert line in render(made)
    assert (as_dict(made)["bands"]["throughput"]["low"] is None) == line.startswith("no ")


def test_bands_of_a_plan(monkeypatch):
    rows = {
        "throughput": {"dense models on Hopper": (0.5, 2.0, "9 rows")},
        "memory": {"dense models": (0.5, 1.5, "9 rows")},
    }
    monkeypatch.setattr(evidence, "EVIDENCE", rows)
    job = compose_job(["model=llama3_8b", "cluster=slurm_h100", "data=synthetic", "precision=bf16"])
    made = make_plan(job)
    assert made.speed is not None
    plain = as_dict(made)["bands"]
    assert plain["throughput"]["high"] == 2 * made.speed.tokens_per_second_per_rank
    assert plain["memory"] == {"low": made.peak / 2, "high": made.peak * 1.5, "evidence": "9 rows"}
    for limit, doubt in (
        (2.0, ""),
        (1.2, "; it may not fit"),
        (0.8, "; it may fit"),
        (0.4, ""),
    ):
        assert f" GiB, by 9 rows{doubt}\n" in render(replace(made, memory_limit=limit * made.peak))
    own = make_plan(job, Calibration(Constants(), "here"))
    assert "no evidence: the constants were fitted to other runs" in render(own)
    bands = as_dict(own)["bands"]
    assert (bands["throughput"]["low"], bands["memory"]["low"]) == (None, own.peak / 2)
    on_cpu = as_dict(make_plan(compose_job(["model=llama3_tiny"])))["bands"]
    assert on_cpu == {"throughput": None, "memory": None}
