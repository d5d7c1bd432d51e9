"""Errors, rank correlation, and what one change does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.tools.report.experiment import delta
from harness.tools.report.published import Recipe
from harness.tools.report.runs import effects, errors_in_words, spearman

BASE = Recipe("llama3_8b", 8, 8, 1, 1, 1, 2, 8192, "full", False, "none", False, "")


def test_delta() -> None:
    assert delta(110.0, 100.0) == pytest.approx(0.1)
    assert delta(None, 100.0) is None
    assert delta(1.0, None) is None


def test_errors_are_median_and_worst_by_amount() -> None:
    rows = [{"x": -0.3}, {"x": 0.1}, {"x": 0.02}, {"x": None}, {}]
    assert errors_in_words(rows, "x") == "median error 10.0%, worst 30.0% (3 rows)"
    assert errors_in_words([{}], "x") == ""


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(1, 10), (2, 20), (3, 300)], 1.0),
        ([(1, 3), (2, 2), (3, 1)], -1.0),
        # 1 - 6 * (1 + 1 + 0 + 1 + 1) / (5 * 24)
        ([(1, 2), (2, 1), (3, 3), (4, 5), (5, 4)], 0.8),
        # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: covariance 4.5, variances 4.5 and 5.
        ([(1, 1), (2, 2), (2, 3), (4, 4)], 4.5 / (4.5 * 5) ** 0.5),
        ([(1, 1), (1, 2), (1, 3)], None),
        ([(1, 1), (2, 2)], None),
    ],
)
def test_spearman(pairs: list[tuple[float, float]], expected: float | None) -> None:
    found = spearman(pairs)
    assert found == (None if expected is None else pytest.approx(expected))


def figures(published: float, predicted: float | None) -> dict[str, float | None]:
    name = "tokens_per_second_per_rank"
    return {f"published.{name}": published, f"predicted.{name}": predicted}


def test_effects_are_of_one_change() -> None:
    compiled = replace(BASE, compiled=True)
    float8 = replace(compiled, linear="float8_tensorwise")
    found = effects(
        "table1", [(BASE, figures(100, 100)), (compiled, figures(120, 90)), (float8, figures(150, 99))]
    )
    # Eager bf16 and compiled float8 differ in two things.
    assert [each.what for each in found] == ["compile", "float8"]
    assert [each.is_right for each in found] == [False, True]
    assert (found[0].published, found[0].predicted) == (pytest.approx(0.2), pytest.approx(-0.1))
    longer = replace(BASE, seq_len=16384)
    assert effects("table1", [(BASE, figures(1, 1)), (longer, figures(2, 2))]) == []
    [unknown] = effects("table1", [(BASE, figures(100, None)), (compiled, figures(120, None))])
    assert unknown.is_right is None


def test_schedules_are_named() -> None:
    one, other = (replace(BASE, pp=8, schedule=name) for name in ("1F1B", "Interleaved1F1B"))
    [found] = effects("table1", [(one, figures(100, 100)), (other, figures(128, 120))])
    assert found.what == "schedule: 1F1B to Interleaved1F1B"
