"""The verb ``rehearse``."""

from harness.compose.verb import Result, Verb
from harness.tools.plan.make import make_plan
from harness.tools.plan.plan import Plan
from harness.tools.rehearse.config import RehearseConfig, RehearseJob, ranks_to_rehearse
from harness.tools.rehearse.render import as_dict, render
from harness.tools.rehearse.server import rehearse_rank, require_no_gpu
from harness.util.errors import EXIT_OK

HELP = """`harness rehearse`: run a job's code on virtual GPUs, and compare it with its plan.

The code is torch's for CUDA, over libraries that compute nothing.

    harness rehearse model=llama3_8b parallelism=fsdp precision=bf16 cluster=slurm_h100
    harness rehearse ... --json                      the result as JSON
    harness rehearse ... rehearse.ranks=[0,5]        only these ranks
    harness rehearse ... cluster.accelerator=B200    on another device
"""

EXIT_FAILED = 1


def rehearse(job: RehearseJob, _overrides: list[str]) -> Result:
    """Rehearse a job's ranks on virtual GPUs."""
    return rehearse_plan(make_plan(job.plain), job.rehearse)


def rehearse_plan(plan: Plan, config: RehearseConfig | None = None) -> Result:
    """Rehearse ranks of a plan's job, one after another, and compare each with the plan.

    Raises:
        UserError: this machine has a GPU, or something that rehearsals need is missing.
    """
    config = config or RehearseConfig()
    require_no_gpu(config)
    ranks = [rehearse_rank(plan.job, rank, config) for rank in ranks_to_rehearse(plan.job, config)]
    failed = any(rank.failure is not None for rank in ranks)
    return Result(as_dict(plan, ranks), render(plan, ranks), EXIT_FAILED if failed else EXIT_OK)


VERB = Verb("rehearse", rehearse, help=HELP, job=RehearseJob, has_json=True, is_alone=True)
