"""Classes of jobs, and the evidence for their plans.

``evidence_table.py`` has the values.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.job import Job
from harness.model.architecture import architecture_of

GENERATIONS = {
    "A100 SXM 40GB": "Ampere",
    "A100 SXM 80GB": "Ampere",
    "A100 PCIe 40GB": "Ampere",
    "A100 PCIe 80GB": "Ampere",
    "H100 SXM": "Hopper",
    "H100 96GB": "Hopper",
    "H100 PCIe": "Hopper",
    "H100 NVL": "Hopper",
    "H200 SXM": "Hopper",
    "H200 NVL": "Hopper",
    "B200": "Blackwell",
    "GB200": "Blackwell",
    "MI300X": "CDNA 3",
}
"""Hardware generation of each accelerator with published rows."""


@dataclass(frozen=True)
class Evidence:
    """Published rows of a class of jobs."""

    rows: int
    sources: int
    """Documents that the rows come from, each about one cluster."""
    low: float
    """Published figure over planned: the 10th percentile."""
    high: float
    """The 90th percentile."""
    pooled: bool
    """Whether ``low`` and ``high`` are those of all classes, since this one has few sources."""


@dataclass(frozen=True)
class Resolution:
    """Error of the planned speed of one layout relative to another of the same table."""

    off: float
    """The largest error in four of five pairs, as a fraction."""
    pairs: int
    tables: int


def kind_of(job: Job) -> str:
    """Return the kind of model: "dense models", "mixtures of experts" or "models of pictures"."""
    if architecture_of(job.model).batches != "tokens":
        return "models of pictures"
    return "mixtures of experts" if job.model.moe.enabled else "dense models"


def class_of(job: Job, accelerator: str) -> str | None:
    """Return the class of a job on an accelerator, such as "dense models on Hopper"; None without a
    generation."""
    generation = GENERATIONS.get(accelerator)
    return None if generation is None else f"{kind_of(job)} on {generation}"
