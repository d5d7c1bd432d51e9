"""The formats in which a job computes, which say how exact it is."""

from typing import Any

from harness.config.fields import NUMERICS, leaves
from harness.config.job import Job
from harness.config.optimizer import EIGHT_BIT


def formats_of(job: Job) -> dict[str, Any]:
    """Formats in which a job computes, by field; those of data and checkpoints are not among them."""
    return {n: value for n, role, value in leaves(job) if role == NUMERICS and n.endswith("_dtype")}


def lowest_format(job: Job) -> str:
    """The least exact format in which a job computes, also where only its optimizer or reductions do."""
    if job.precision.linear != "none":
        return job.precision.linear
    for name in (EIGHT_BIT, "bfloat16"):
        if name in formats_of(job).values():
            return name
    return "float32"
