"""The length of a run: which of the fields that can give it counts, its steps, and the warm-up in it."""

import functools
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from harness.compose.override import Override, last_text
from harness.config.job import Job
from harness.config.training import DEFAULT_STEPS, ScaleConfig, TrainingConfig, parse_count
from harness.util.errors import ConfigError
from harness.util.words import plural

J = TypeVar("J", bound=Job)
LENGTHS = {
    "training.steps": "steps",
    "training.tokens": "tokens",
    "scale.tokens_per_parameter": "scale",
    "scale.flops": "scale",
}
"""Fields that give the length of a run. Only those of one kind can be combined."""
WARMUP = "schedule.warmup_steps"
BATCH = "training.global_batch_size"


def other_lengths(overrides: Iterable[Override]) -> list[str]:
    """Return the lengths of files that a typed one takes the place of; none if several kinds are typed."""
    overrides = list(overrides)
    given = {LENGTHS[name] for name in LENGTHS if last_text(overrides, name) not in (None, "null")}
    return [name for name in LENGTHS if LENGTHS[name] not in given] if len(given) == 1 else []


def with_length(job: J) -> J:
    """Return a job with its steps, and the warm-up that is a fraction of them; batch sizes are set."""
    training = job.training
    schedule = job.schedule
    ratio = job.scale.warmup_ratio
    steps = training.steps or DEFAULT_STEPS
    if training.tokens is not None:
        _require_alone("training.tokens", training.tokens, training, "steps", "null, or no tokens")
        steps = job.sizes.steps_for(parse_count("training.tokens", training.tokens))
    if ratio is not None:
        schedule = replace(schedule, warmup_steps=round(ratio * schedule.curve_steps(steps)))
    training = replace(training, steps=steps, tokens=None)
    return replace(job, training=training, schedule=schedule, scale=ScaleConfig())


def check_length_of_scale(scale: ScaleConfig, training: TrainingConfig) -> None:
    """Refuse a second length beside that of ``scale``."""
    for name in ("tokens_per_parameter", "flops"):
        value = getattr(scale, name)
        for other in ("tokens", "steps"):
            if value is not None:
                _require_alone(f"scale.{name}", value, training, other, "null")


def _require_alone(
    field: str, value: object, training: TrainingConfig, other: str, works: str
) -> None:
    length = getattr(training, other)
    if length is not None:
        rule = f"replaces training.{other}, which is {length}"
        raise ConfigError(field, value, rule, f"training.{other}={works}")


def with_fitting_warmup(job: J) -> J:
    """Shorten a warm-up that no override sets to the length of the run, with a note."""
    steps = job.training.steps
    schedule = job.schedule
    if steps is None or steps < 1 or job.scale.warmup_ratio is not None:
        return job
    curve = schedule.curve_steps(steps)
    decay = schedule.decay_ratio or 0
    most = max(0, curve - round(decay * curve))
    if schedule.warmup_steps <= most:
        return job
    note(f"{WARMUP}={most} instead of {schedule.warmup_steps}, to fit into training.steps={steps}")
    return replace(job, schedule=replace(schedule, warmup_steps=most))


def with_fitting_batch(job: J, resolve: Callable[[J], J]) -> J:
    """Resolve a job with a row for each data-parallel rank in place of the default batch, with a note."""
    rows = job.training.local_batch_size or 1
    training = replace(job.training, global_batch_size=None, local_batch_size=rows)
    fitting = resolve(replace(job, training=training))
    sizes = f"{fitting.training.global_batch_size} instead of {job.training.global_batch_size}"
    note(f"{BATCH}={sizes}: {plural(rows, 'row')} for each data-parallel rank")
    return fitting


@functools.cache
def note(text: str) -> None:
    """Print a note for the user: once in a process, and on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"NOTE {text}\n")
