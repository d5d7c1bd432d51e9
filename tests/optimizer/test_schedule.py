"""Learning-rate schedules against values computed by hand."""

import pytest
import torch
from cases import rows

from harness.compose.composer import compose_job
from harness.config.optimizer import ScheduleConfig
from harness.optimizer.build import build_schedule, lr_factor
from harness.util.errors import ConfigError

# Steps, fields, and the fraction of the peak at every step and one step after the last. Without a ratio it
# decays from the end of the warm-up. Cosines and roots have eight digits.
SHAPES = rows("""
    10  {warmup_steps: 2, decay_ratio: 0.4}                       [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
    8   {warmup_steps: 4, decay_ratio: 0.0, min_lr_factor: 1.0}   [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1]
    4   {warmup_steps: 0, decay_ratio: 0.5}                       [1, 1, 1, 0.5, 0]
    4   {warmup_steps: 0, decay_ratio: 1.0}                       [1, 0.75, 0.5, 0.25, 0]
    6   {warmup_steps: 2, decay_ratio: null}                      [0.5, 1, 1, 0.75, 0.5, 0.25, 0]
    4   {warmup_steps: 4, decay_ratio: null}                      [0.25, 0.5, 0.75, 1, 1]
    6   {warmup_steps: 2, decay_type: cosine}                     [0.5, 1, 1, 0.85355339, 0.5, 0.14644661, 0]
    2   {warmup_steps: 0, decay_type: cosine, min_lr_factor: 0.1}  [1, 0.55, 0.1]
    4   {warmup_steps: 0, decay_type: sqrt}                       [1, 0.5, 0.29289322, 0.13397460, 0]
    4   {warmup_steps: 0, min_lr_factor: 0.2}                     [1, 0.8, 0.6, 0.4, 0.2]
""")


@pytest.mark.parametrize(("steps", "fields", "expected"), SHAPES)
def test_shapes(steps, fields, expected):
    config = ScheduleConfig(**fields)
    config.validate(steps)
    factor = lr_factor(config, steps)
    assert [factor(step) for step in range(steps + 1)] == pytest.approx(expected)


def test_a_shortened_run_keeps_the_curve_of_the_long_one():
    curve = ["schedule.warmup_steps=3", "schedule.decay_ratio=0.5", "schedule.total_steps=10"]
    made = []
    for steps in (10, 4):
        job = compose_job([f"training.steps={steps}", *curve])
        factor = lr_factor(job.schedule, job.schedule.curve_steps(job.steps))
        made.append([factor(step) for step in range(4)])
    assert made[0] == made[1]
    assert job.schedule.curve_steps(12) == 12  # a longer run stretches the curve
    assert compose_job(["experiment=quickstart", "training.steps=8"]).steps == 8


def test_the_suggested_warmup_fits():
    """However the product of ratio and steps is rounded."""
    for ratio in (0.0, 0.1, 0.25, 0.5, 0.99):
        for warmup in range(2, 40, 3):
            steps = warmup // 2
            with pytest.raises(ConfigError) as caught:
                ScheduleConfig(warmup_steps=warmup, decay_ratio=ratio).validate(steps)
            most = int(caught.value.works.split()[2].rstrip(","))
            ScheduleConfig(warmup_steps=most, decay_ratio=ratio).validate(steps)
            with pytest.raises(ConfigError):
                ScheduleConfig(warmup_steps=most + 1, decay_ratio=ratio).validate(steps)


def test_stepped_with_the_optimizer():
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
    rows("""
        constant  1.0   1.0
        linear    0.5   0.0
        cosine    0.55  0.1
        wsd       1.0   0.0
    """),
)
def test_shipped_schedules(option, middle, last):
    job = compose_job([f"schedule={option}", "training.steps=1002"])
    factor = lr_factor(job.schedule, 1002)
    assert factor(job.schedule.warmup_steps - 1) == 1.0
    assert [factor(502), factor(1002)] == pytest.approx([middle, last])
