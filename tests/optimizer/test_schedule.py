"""Learning-rate schedules against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from harness.compose.composer import compose_job
from harness.config.optimizer import ScheduleConfig
from harness.optimizer.build import build_schedule, lr_factor
from harness.util.errors import ConfigError


def factors(steps: int, **fields: object) -> list[float]:
    """Fraction of the peak at every step, and one step after the last."""
    config = ScheduleConfig(**fields)  # type: ignore[arg-type]
    config.validate(steps)
    factor = lr_factor(config, steps)
    return [factor(step) for step in range(steps + 1)]


HALF, ROOT = math.sqrt(2) / 2, math.sqrt(0.75)
SHAPES: list[tuple[int, dict[str, object], list[float]]] = [
    (10, {"warmup_steps": 2, "decay_ratio": 0.4}, [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
    (8, {"warmup_steps": 4, "decay_ratio": 0.0, "min_lr_factor": 1.0}, [0.25, 0.5, 0.75, *[1] * 6]),
    (4, {"warmup_steps": 0, "decay_ratio": 0.5}, [1, 1, 1, 0.5, 0]),
    # Without a ratio it decays from the end of the warm-up.
    (6, {"warmup_steps": 2, "decay_ratio": None}, [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
    (4, {"warmup_steps": 4, "decay_ratio": None}, [0.25, 0.5, 0.75, 1, 1]),
    (6, {"warmup_steps": 2, "decay_type": "cosine"}, [0.5, 1, 1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2, 0]),
    (4, {"warmup_steps": 0, "decay_type": "sqrt"}, [1, 0.5, 1 - HALF, 1 - ROOT, 0]),
    (4, {"warmup_steps": 0, "min_lr_factor": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
]


@pytest.mark.parametrize(("steps", "fields", "expected"), SHAPES)
def test_shapes(steps: int, fields: dict[str, object], expected: list[float]) -> None:
    assert factors(steps, **fields) == pytest.approx(expected)


def test_cosine_ends_at_its_floor() -> None:
    made = factors(102, warmup_steps=2, decay_type="cosine", min_lr_factor=0.1)
    assert made[52] == pytest.approx(0.55)
    assert made[-1] == pytest.approx(0.1)
    assert min(made[2:]) == made[-1]


def test_the_last_decay_step_still_learns() -> None:
    """The floor is reached one step after the last, so that a decay to zero wastes no step."""
    for steps in (7, 100, 1000):
        made = factors(steps, warmup_steps=2, decay_ratio=0.2)
        assert made[steps - 1] > 0
        assert made[steps] == pytest.approx(0)


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("decay_ratio", [None, 0.0, 0.3, 1.0])
def test_never_above_the_peak_nor_below_the_floor(decay_type: str, decay_ratio: float | None) -> None:
    warmup = 0 if decay_ratio == 1.0 else 5
    made = factors(
        50, warmup_steps=warmup, decay_ratio=decay_ratio, decay_type=decay_type, min_lr_factor=0.05
    )
    assert max(made) == 1.0
    assert min(made[warmup:]) >= 0.05 - 1e-12
    assert all(a >= b for a, b in zip(made[warmup:], made[warmup + 1 :], strict=False))


def test_a_shortened_run_keeps_the_curve_of_the_long_one() -> None:
    config = ScheduleConfig(warmup_steps=3, decay_ratio=0.5, total_steps=10)
    long, short = compose_job(["training.steps=10", *CURVE]), compose_job(["training.steps=4", *CURVE])
    made = [lr_factor(config, job.schedule.curve_steps(job.steps)) for job in (long, short)]
    assert [made[0](step) for step in range(4)] == [made[1](step) for step in range(4)]
    # A longer run stretches the curve.
    assert config.curve_steps(12) == 12
    assert compose_job(["experiment=quickstart", "training.steps=8"]).steps == 8


CURVE = ["schedule.warmup_steps=3", "schedule.decay_ratio=0.5", "schedule.total_steps=10"]


def test_does_not_fit() -> None:
    config = ScheduleConfig(warmup_steps=9, decay_ratio=0.2)
    config.validate(12)
    with pytest.raises(ConfigError, match=r"at most 8, or training.steps=12, or schedule.total_steps=12"):
        config.validate(10)


@pytest.mark.parametrize("warmup", range(1, 40, 3))
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.25, 0.5, 0.99])
def test_the_suggested_steps_fit(warmup: int, ratio: float) -> None:
    config = ScheduleConfig(warmup_steps=warmup, decay_ratio=ratio)
    with pytest.raises(ConfigError) as caught:
        config.validate(warmup // 2 or 1) if warmup > 1 or ratio > 0.5 else config.validate(0)
    config.validate(int(caught.value.works.split("=")[-1]))


def test_stepped_with_the_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [parameter]}], lr=2.0)
    schedule = build_schedule(ScheduleConfig(warmup_steps=2, decay_ratio=0.5), optimizer, steps=4)
    seen = []
    for _ in range(5):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx([1.0, 2.0, 2.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("option", "middle", "last"),
    [("constant", 1.0, 1.0), ("linear", 0.5, 0.0), ("cosine", 0.55, 0.1), ("wsd", 1.0, 0.0)],
)
def test_shipped_schedules(option: str, middle: float, last: float) -> None:
    job = compose_job([f"schedule={option}", "training.steps=1002"])
    factor = lr_factor(job.schedule, 1002)
    assert factor(job.schedule.warmup_steps - 1) == 1.0
    assert factor(502) == pytest.approx(middle)
    assert factor(1002) == pytest.approx(last)
