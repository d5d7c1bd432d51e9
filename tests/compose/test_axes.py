"""Hydra's functions: the points that its documentation says, or one line."""

from __future__ import annotations

import pytest

from harness.compose.composer import compose_job, compose_points
from harness.util.errors import UserError

COMMON = ["model=llama3_tiny", "data=synthetic", "tokenizer=none", "cluster.device=cpu"]


@pytest.mark.parametrize(
    ("axis", "seeds"),
    [
        # https://hydra.cc/docs/advanced/override_grammar/extended
        ("range(1,4)", [1, 2, 3]),
        ("range(3)", [0, 1, 2]),
        ("range(1,10,4)", [1, 5, 9]),
        ("range(5,1,-2)", [5, 3]),
        ("choice(3,1)", [3, 1]),
        ("sort(3,1,2)", [1, 2, 3]),
        ("sort(range(1,4),reverse=true)", [3, 2, 1]),
        ("tag(a,b,choice(2,1))", [2, 1]),
        ("int(choice(1.0,2.0))", [1, 2]),
    ],
)
def test_functions_of_numbers(axis: str, seeds: list[int]) -> None:
    points = compose_points([*COMMON, f"training.seed={axis}"])
    assert [point.job.training.seed for point in points] == seeds


def test_functions_of_options_and_order() -> None:
    jobs = [each.job for each in compose_points([*COMMON, "precision=glob([bf16*,fp32],exclude=*full)"])]
    assert [(each.precision.param_dtype, each.precision.master_dtype) for each in jobs] == [
        ("bfloat16", "float32"),
        ("float32", "float32"),
    ]
    shuffled = [
        each.job.training.seed for each in compose_points([*COMMON, "training.seed=shuffle(range(1,9))"])
    ]
    assert sorted(shuffled) == list(range(1, 9))


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("training.seed=range(1,3)", ": is a sweep; would work: -m, which runs one job for each value"),
        ("training.seed=choice(1,2)", ": is a sweep; would work: -m"),
        ("model=glob(llama3*)", ": is a sweep; would work: -m"),
        (
            "optimizer.lr=interval(0,1)",
            ": interval() is a range for sweepers that optimize (sweep",
        ),
        ("training.seed=shuffle(1,2)", ": has several values; would work: -m "),
        ("training.seed=sort(2,1)", ": has several values; would work: -m "),
        ("training.seed=nope(1)", ": Unknown function 'nope'"),
        ("training.seed=range(a)", ": mismatch type argument start: str is incompatible with "),
        ("training.seed=[1]2", ": cannot be read, extraneous input '2'"),
    ],
)
def test_without_a_multirun(typed: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        compose_job([*COMMON, typed])
    assert str(caught.value).startswith(f"{typed}{message}") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            "optimizer.lr=interval(0,1)",
            ": interval() is a range for sweepers that optimize (sweep=optuna), ",
        ),
        ("optimizer.lr=tag(log,interval(0.1,1))", ": interval() is a range for sweepers that optimize"),
        ("training.seed=glob(*)", ": glob() chooses options of a group, and training.seed is a field"),
        ("model=glob(nope*)", ": an axis without values; would work: "),
        ("training.seed=range(3,1)", ": an axis without values; would work: "),
        ("training.seed=range(1,3,0)", ": the step of a range must not be 0; would work: "),
        ("training.seed=choice()", ": empty choice is not legal; would work: "),
    ],
)
def test_no_axis_of_a_grid(typed: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        compose_points([*COMMON, typed])
    assert str(caught.value).startswith(f"{typed}{message}") and "\n" not in str(caught.value)
