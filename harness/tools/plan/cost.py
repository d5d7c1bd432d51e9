"""Dollars and energy of a plan, in words."""

from __future__ import annotations

from harness.tools.plan.plan import Plan
from harness.util.hardware import POWER_SHARE
from harness.util.tables import dollars, figure


def cost_in_words(plan: Plan) -> str:
    """Price and energy of all steps with the assumptions; empty if both are unknown."""
    known = []
    cluster = plan.job.cluster
    if plan.dollars is not None:
        known.append(f"{dollars(plan.dollars)} at ${cluster.dollars_per_gpu_hour:g} a GPU-hour")
    if plan.kwh is not None:
        assert plan.accelerator is not None, "only GPUs have a power"
        pue = "" if cluster.pue is None else f" x PUE {cluster.pue:g}"
        share = f"{POWER_SHARE:.0%} of {plan.accelerator.power_w:g} W each"
        known.append(f"{figure(plan.kwh)} kWh of the GPUs alone ({share}{pue})")
    return "; ".join(known)


def budget_in_words(plan: Plan) -> str:
    """Cost of all steps on one line: ``all 100 steps: 419 GPU-hours; $1,048 at ...``."""
    hours = "unknown" if plan.gpu_hours is None else figure(plan.gpu_hours)
    unit = "rank" if plan.accelerator is None else "GPU"
    cost = cost_in_words(plan)
    return f"all {plan.job.steps:,} steps: {hours} {unit}-hours{cost and f'; {cost}'}"
