"""``harness rehearse``: run a job's code on virtual GPUs, and compare it with its plan.

The code is torch's for CUDA, over libraries that compute nothing.

    harness rehearse model=llama3_8b parallelism=fsdp precision=bf16 cluster=slurm_h100
    harness rehearse ... --json                      the result as JSON
    harness rehearse ... rehearse.ranks=[0,5]        only these ranks
    harness rehearse ... cluster.accelerator=B200    on another device
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.compose.verb import Result, Verb
from harness.tools.plan.make import make_plan
from harness.tools.plan.plan import Plan
from harness.tools.rehearse.config import RehearseConfig, RehearseJob, ranks_to_rehearse
from harness.tools.rehearse.figures import RankFigures
from harness.tools.rehearse.render import as_dict, render
from harness.tools.rehearse.server import Rehearsals, require_no_gpu
from harness.util.errors import EXIT_OK, UserError
from harness.util.launcher_env import launched_ranks

EXIT_FAILED = 1


def rehearse(job: RehearseJob, _overrides: list[str]) -> Result:
    """Rehearse a job's ranks on virtual GPUs."""
    if launched_ranks() is not None:
        raise UserError("harness rehearse starts its ranks itself; start it without torchrun")
    plan = make_plan(job.plain)
    ranks = rehearse_ranks(plan, job.rehearse)
    return Result(as_dict(plan, ranks), render(plan, ranks), exit_code(ranks))


def exit_code(ranks: Sequence[RankFigures]) -> int:
    """EXIT_FAILED if any of the ranks failed."""
    return EXIT_FAILED if any(rank.failure is not None for rank in ranks) else EXIT_OK


def rehearse_ranks(plan: Plan, config: RehearseConfig) -> list[RankFigures]:
    """Rehearse the ranks of a plan's job, one after another.

    Raises:
        UserError: this machine has a GPU, or something that rehearsals need is missing.
    """
    require_no_gpu(config)
    with Rehearsals() as rehearsals:
        return [rehearsals.run(plan.job, rank, config) for rank in ranks_to_rehearse(plan.job, config)]


VERB = Verb("rehearse", rehearse, job=RehearseJob, has_json=True)
