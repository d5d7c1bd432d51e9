"""Runs of one job in several rounds: medians, ranges, and ratios within a round."""

import pytest
from jobs import tiny

from harness.launch.rows import as_planned, completed
from harness.tools.report.rounds import Spread, tables_of_rounds


def ran(rate, seed, *typed):
    """The row of a run; it failed if there is no rate."""
    typed = (f"training.seed={seed}", *typed)
    row = as_planned(
        " ".join(typed).replace("training.", ""), tiny("checkpoint=disabled", *typed), list(typed)
    )
    if rate is None:
        return {**row, "state": "failed"}
    return completed(
        {**row, "state": "completed", "window.tokens_per_second": rate, "memory_gib": 1.5}
    )


def test_ratios_are_of_the_same_round():
    """A machine that slows down for both does not change their ratio; a run that failed has none."""
    rates = {1: (100.0, 110.0), 2: (50.0, 60.0), 3: (10.0, 9.0), 4: (1.0, None)}
    rows = []
    for seed, (base, other) in rates.items():
        rows += [ran(base, seed), ran(other, seed, "precision=bf16")]
    [table] = tables_of_rounds(rows)
    first, second = table.rows
    assert (first["point"], first["rounds"], first["range"]) == ("llama3_tiny", 4, "1.0 to 100.0")
    assert first["tokens_per_second_per_rank"] == 30.0 and first.get("ratio") is None
    assert (second["point"], second["rounds"]) == ("precision=bf16", 3)
    assert (second["ratio"], second["ratio_range"]) == (pytest.approx(1.1), "0.900 to 1.200")
    assert first["memory_gib"] == 1.5 and first["mfu"] is None


def test_jobs_that_ran_once_have_no_rounds():
    assert (
        tables_of_rounds([ran(100.0, 1), ran(90.0, 1, "precision=bf16"), {"point": "no job"}]) == []
    )


def test_an_unknown_figure_stays_unknown():
    assert Spread.of([None, None]) is None
    assert Spread.of([3.0, None, 1.0]) == Spread(2.0, 1.0, 3.0)
