"""Published throughput as a multiple of the planned one, by class of job: how far a plan can be trusted.

``python experiments/published/errors.py --classes`` prints the table from the published rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.job import Job

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
    tables: int
    low: float
    """Published throughput over planned: the 10th percentile of the rows, or their least with fewer than
    20."""
    high: float
    """The 90th percentile, or their greatest."""


EVIDENCE = {
    "dense models on Ampere": Evidence(rows=8, tables=1, low=1.06, high=1.12),
    "dense models on Blackwell": Evidence(rows=11, tables=3, low=0.52, high=1.11),
    "dense models on CDNA 3": Evidence(rows=4, tables=1, low=0.66, high=0.81),
    "dense models on Hopper": Evidence(rows=75, tables=12, low=0.89, high=1.33),
    "mixtures of experts on Hopper": Evidence(rows=7, tables=2, low=0.78, high=1.41),
}
"""By class of job; the classes without published rows are not here."""


def class_of(job: Job, accelerator: str) -> str | None:
    """Return the class of a job on an accelerator, such as "dense models on Hopper"; None without a
    generation."""
    generation = GENERATIONS.get(accelerator)
    kind = "mixtures of experts" if job.model.moe.enabled else "dense models"
    return None if generation is None else f"{kind} on {generation}"
