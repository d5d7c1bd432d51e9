"""Comparisons of layouts with one process."""

import tempfile
from functools import cache

from omegaconf import OmegaConf
from tiers import THOROUGH

from harness.compose.paths import conf_dir
from harness.tools.parity import parity
from harness.tools.parity.parity import (
    ParityConfig,
    compare,
    compose_layouts,
    single_process,
    trace,
)

CONF = OmegaConf.to_container(OmegaConf.load(f"{conf_dir()}/parity.yaml"))
MATRIX = CONF["parity"]["matrix"]
EXPERT_MATRIX = CONF["parity"]["expert_matrix"]
# `make parity` runs ten. An error of scale or placement shows in the first step, one of state in the second.
STEPS = 2
TOLERANCES = parity.TOLERANCES["float32"]

_references = {}


@cache
def layout(name, *overrides):
    """Compose a row of ``MATRIX`` or ``EXPERT_MATRIX``."""
    config = ParityConfig(matrix=MATRIX | EXPERT_MATRIX, layouts=[name])
    return compose_layouts(config, list(overrides))[name]


def reference(pool, job, steps=STEPS):
    """Trace the job on one process, once for equal numerics."""
    key = (job.numerics_id, steps)
    if key not in _references:
        [_references[key]] = pool.run(1, trace, single_process(job).to_json(), steps)
    return _references[key]


def verdict_of(
    pool,
    name,
    job,
    *,
    steps=STEPS,
    tolerances=TOLERANCES,
    run=trace,
    resume=True,
):
    """Compare a layout, traced by ``run``, with one process.

    Args:
        resume: whether the layout resumes in the middle, which is 40 % of a row's time; always with
            ``make thorough``. Rows need it whose state others do not have.
    """
    with tempfile.TemporaryDirectory() as folder:
        resume_in = folder if resume or THOROUGH else None
        traces = pool.run(job.world_size, run, job.to_json(), steps, resume_in)
    return compare(name, job.world_size, reference(pool, job, steps), traces, tolerances)


def require_parity(pool, name, job, **options):
    """Fail unless a layout agrees with one process; options are those of ``verdict_of``."""
    require_agreement(verdict_of(pool, name, job, **options))


def require_agreement(verdict, note=""):
    """Fail with the layout, the parameter whose gradient differs most, and all relative differences."""
    assert verdict.passed, (
        f"{verdict.layout} on {verdict.ranks} ranks differs from one process; relative differences: "
        f"loss {verdict.loss:.1e}, gradient of {verdict.worst_parameter} {verdict.gradient:.1e}, "
        f"norm of the gradients {verdict.norm:.1e}{note and f' ({note})'}"
    )
