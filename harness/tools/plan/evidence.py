"""How far a plan can be trusted: bands from its errors on published rows, by class of job.

Each published row was planned with constants that were fitted without it;
experiments/measure/held_out.py prints the bands: published figures divided by planned ones.
"""

import dataclasses
from typing import Any

from harness.config.job import Job
from harness.tools.plan.costs import costs_of
from harness.tools.plan.plan import Evidence, Plan, Resolution
from harness.util.words import figure, gib, plural

GENERATIONS = dict.fromkeys(("H100", "H200", "GH200"), "Hopper") | {"A100": "Ampere"}
GENERATIONS |= dict.fromkeys(("B200", "GB200", "B300", "GB300"), "Blackwell")
GENERATIONS |= dict.fromkeys(("MI300X", "MI325X"), "CDNA 3")
"""Generations with published rows, by the first word of an accelerator's name."""

EVIDENCE = {
    "dense models on Ampere": Evidence(rows=8, sources=1, low=0.74, high=1.25, pooled=True),
    "dense models on Blackwell": Evidence(rows=30, sources=4, low=0.58, high=1.38, pooled=False),
    "dense models on CDNA 3": Evidence(rows=4, sources=1, low=0.74, high=1.25, pooled=True),
    "dense models on Hopper": Evidence(rows=75, sources=7, low=0.91, high=1.25, pooled=False),
    "mixtures of experts on Blackwell": Evidence(
        rows=6, sources=1, low=0.6, high=1.35, pooled=True
    ),
    "mixtures of experts on Hopper": Evidence(rows=9, sources=3, low=0.74, high=1.25, pooled=True),
}
"""Bands of the throughput, by class. A class without published rows is not here."""

MEMORY = {
    "dense models": Evidence(rows=44, sources=5, low=0.88, high=1.14, pooled=False),
}
"""Bands of the peak memory on a GPU, by class. A class without published rows is not here."""

RESOLUTION = Resolution(off=0.091, pairs=67, tables=8)
"""If two layouts differ by less than this, the plan cannot tell which one is faster."""


def class_of(job: Job, accelerator: str) -> str | None:
    """Return the class of a job, such as "dense models on Hopper"; None without a generation."""
    generation = GENERATIONS.get(accelerator.split()[0])
    return None if generation is None else f"{costs_of(job.model).kind(job.model)} on {generation}"


def throughput_band(plan: Plan) -> str | None:
    """The 10th to 90th percentile of the throughput; None on CPUs and without a throughput."""
    if plan.accelerator is None or plan.speed is None:
        return None
    name, found = _throughput(plan)
    if found is None:
        reason = f"no published rows of {name or 'this device'}"
        if plan.is_calibrated:
            reason = "the constants were fitted to other runs"
        return f"no evidence: {reason}"
    rate = plan.speed.tokens_per_second_per_rank
    low = figure(rate * found.low)
    high = figure(rate * found.high)
    return f"10 to 90 %: {low} to {high} tokens/s a GPU, {_rows_in_words(name or '', found)}"


def memory_band(plan: Plan) -> str | None:
    """The 10th to 90th percentile of the peak memory, and whether the limit is between them; None on CPUs."""
    if plan.accelerator is None:
        return None
    name, found = _memory(plan)
    if found is None:
        return f"no evidence: no published memory of {name}"
    low = plan.peak * found.low
    high = plan.peak * found.high
    doubt = ""
    if plan.memory_limit is not None and low <= plan.memory_limit < high:
        doubt = f"; it may {'not fit' if plan.fits else 'fit'}"
    return f"10 to 90 %: {gib(low)} to {gib(high)} GiB, {_rows_in_words(name, found)}{doubt}"


def bands_as_dict(plan: Plan) -> dict[str, Any]:
    """Bands of the throughput (tokens/s and device) and the memory (bytes); None without published rows."""
    rate = None if plan.speed is None else plan.speed.tokens_per_second_per_rank
    figures = {"throughput": (rate, *_throughput(plan)), "memory": (plan.peak, *_memory(plan))}
    bands: dict[str, Any] = dict.fromkeys(figures)
    for kind, (value, name, found) in figures.items():
        if found is None or value is None:
            continue
        scaled = {"class": name, "low": value * found.low, "high": value * found.high}
        bands[kind] = dataclasses.asdict(found) | scaled
    return bands


def _throughput(plan: Plan) -> tuple[str | None, Evidence | None]:
    name = None if plan.accelerator is None else class_of(plan.job, plan.accelerator.name)
    return name, None if plan.is_calibrated else EVIDENCE.get(name or "")


def _memory(plan: Plan) -> tuple[str, Evidence | None]:
    kind = costs_of(plan.job.model).kind(plan.job.model)
    return kind, None if plan.accelerator is None else MEMORY.get(kind)


def _rows_in_words(name: str, found: Evidence) -> str:
    """Say which published rows a band comes from."""
    sources = plural(found.sources, "source")
    if found.pooled:
        return f"by all published rows ({name} have {found.rows}, of {sources})"
    return f"by {plural(found.rows, 'published row')} of {name} ({sources})"
