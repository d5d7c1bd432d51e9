"""Published figures as multiples of the planned ones, by class of job.

experiments/measure/held_out.py writes this file. Each published row was planned with constants
that were fitted without it; experiments/measure/held_rows.py has the rules.
"""

from harness.tools.plan.plan import Evidence, Resolution

EVIDENCE = {
    "dense models on Ampere": Evidence(rows=8, sources=1, low=0.74, high=1.25, pooled=True),
    "dense models on Blackwell": Evidence(rows=30, sources=4, low=0.58, high=1.38, pooled=False),
    "dense models on CDNA 3": Evidence(rows=4, sources=1, low=0.74, high=1.25, pooled=True),
    "dense models on Hopper": Evidence(rows=75, sources=7, low=0.91, high=1.25, pooled=False),
    "mixtures of experts on Blackwell": Evidence(rows=6, sources=1, low=0.6, high=1.35, pooled=True),
    "mixtures of experts on Hopper": Evidence(rows=9, sources=3, low=0.74, high=1.25, pooled=True),
}
"""Throughput; classes without published rows are not here."""

MEMORY = {
    "dense models": Evidence(rows=44, sources=5, low=0.88, high=1.14, pooled=False),
}
"""Peak memory on a GPU; classes without published rows are not here."""

RESOLUTION = Resolution(off=0.091, pairs=67, tables=8)
"""Below this difference the plan does not know the faster one of two layouts."""
