"""How far a plan can be trusted: bands from its errors on published rows, by class of job.

Each published row was planned with constants that were fitted without it;
experiments/measure/held_out.py prints the bands: published figures divided by planned ones.
"""

from collections.abc import Callable
from typing import NamedTuple

from harness.config.job import Job
from harness.tools.plan.costs import costs_of
from harness.tools.plan.plan import Plan, Resolution

GENERATIONS = dict.fromkeys(("H100", "H200", "GH200"), "Hopper") | {"A100": "Ampere"}
GENERATIONS |= dict.fromkeys(("B200", "GB200", "B300", "GB300"), "Blackwell")
GENERATIONS |= dict.fromkeys(("MI300X", "MI325X"), "CDNA 3")
"""Generations with published rows, by the first word of an accelerator's name."""

EVIDENCE = {
    "throughput": {
        "dense models on Ampere": (
            0.74,
            1.25,
            "all published rows (dense models on Ampere have 8, of 1 source)",
        ),
        "dense models on Blackwell": (
            0.58,
            1.38,
            "30 published rows of dense models on Blackwell (4 sources)",
        ),
        "dense models on CDNA 3": (
            0.74,
            1.25,
            "all published rows (dense models on CDNA 3 have 4, of 1 source)",
        ),
        "dense models on Hopper": (
            0.91,
            1.25,
            "75 published rows of dense models on Hopper (7 sources)",
        ),
        "mixtures of experts on Blackwell": (
            0.6,
            1.35,
            "all published rows (mixtures of experts on Blackwell have 6, of 1 source)",
        ),
        "mixtures of experts on Hopper": (
            0.74,
            1.25,
            "all published rows (mixtures of experts on Hopper have 9, of 3 sources)",
        ),
    },
    "memory": {
        "dense models": (0.88, 1.14, "44 published rows of dense models (5 sources)"),
    },
}
"""Low and high end of each band, and the rows that it comes from, by class. A class without published rows is
not here; one of few sources has the band of all rows."""

RESOLUTION = Resolution(off=0.091, pairs=67, tables=8)
"""If two layouts differ by less than this, the plan cannot tell which one is faster."""


class Band(NamedTuple):
    """Where published figures lie around a planned one: the 10th to the 90th percentile."""

    low: float | None
    high: float | None
    evidence: str
    """The rows that it comes from, or why there are none."""

    def in_words(self, form: Callable[[float], str], unit: str) -> str:
        if self.low is None or self.high is None:
            return f"no evidence: {self.evidence}"
        return f"10 to 90 %: {form(self.low)} to {form(self.high)} {unit}, by {self.evidence}"


def class_of(job: Job, accelerator: str) -> str:
    """Return the class of a job: ``dense models on Hopper``."""
    first = accelerator.split()[0]
    return f"{_kind_of(job)} on {GENERATIONS.get(first, first)}"


def bands_of(plan: Plan) -> dict[str, Band | None]:
    """Bands of the throughput (tokens/s and device) and the memory (bytes).

    None on CPUs; that of an unknown throughput, too.
    """
    bands: dict[str, Band | None] = {"throughput": None, "memory": None}
    if plan.accelerator is None:
        return bands
    bands["memory"] = _band("memory", _kind_of(plan.job), plan.peak)
    if plan.is_calibrated:
        bands["throughput"] = Band(None, None, "the constants were fitted to other runs")
    elif plan.speed is not None:
        name = class_of(plan.job, plan.accelerator.name)
        bands["throughput"] = _band("throughput", name, plan.speed.tokens_per_second_per_rank)
    return bands


def _kind_of(job: Job) -> str:
    return costs_of(job.model).kind(job.model)


def _band(figure: str, name: str, planned: float) -> Band:
    if name not in EVIDENCE[figure]:
        return Band(None, None, f"no published {figure} of {name}")
    low, high, evidence = EVIDENCE[figure][name]
    return Band(planned * low, planned * high, evidence)
