"""Published figures as multiples of the planned ones, by class of job.

tests/measure/held_out.py writes this file. Each published row was planned with constants
that were fitted without it; tests/measure/held_rows.py has the rules.
"""

from harness.tools.plan.plan import Evidence, Resolution

EVIDENCE = {
    "dense models on Ampere": Evidence(rows=8, sources=1, low=0.69, high=1.29, pooled=True),
    "dense models on Blackwell": Evidence(rows=11, sources=3, low=0.69, high=1.29, pooled=True),
    "dense models on CDNA 3": Evidence(rows=4, sources=1, low=0.69, high=1.29, pooled=True),
    "dense models on Hopper": Evidence(rows=75, sources=7, low=0.91, high=1.26, pooled=False),
    "mixtures of experts on Blackwell": Evidence(rows=6, sources=1, low=0.69, high=1.29, pooled=True),
    "mixtures of experts on Hopper": Evidence(rows=9, sources=3, low=0.69, high=1.29, pooled=True),
}
"""Throughput; classes without published rows are not here."""

MEMORY = {
    "dense models": Evidence(rows=27, sources=4, low=0.86, high=1.14, pooled=False),
}
"""Peak memory on a GPU; classes without published rows are not here."""

RESOLUTION = Resolution(off=0.095, pairs=37, tables=7)
"""Below this difference the plan does not know the faster one of two layouts."""
