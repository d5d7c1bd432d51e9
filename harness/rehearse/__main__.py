"""``python -m harness.rehearse``: a job's real code on a virtual GPU, beside its plan."""

from __future__ import annotations

import sys

from harness.app import run_verb
from harness.errors import EXIT_OK, UserError
from harness.launched import launched_ranks
from harness.metrics.encoding import dumps
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from harness.rehearse.config import RehearseConfig, RehearseJob, ranks_to_rehearse
from harness.rehearse.figures import RankFigures
from harness.rehearse.render import as_dict, render
from harness.rehearse.server import Rehearsals, require_no_gpu

JSON_FLAG = "--json"
EXIT_FAILED = 1


def rehearse(job: RehearseJob, *, as_json: bool) -> int:
    """Rehearse a job's ranks and print the results; return 0 if no rank failed."""
    if launched_ranks() is not None:
        raise UserError("harness.rehearse starts its ranks itself; start it without torchrun")
    plan = make_plan(job.plain)
    ranks = rehearse_ranks(plan, job.rehearse)
    sys.stdout.write(f"{dumps(as_dict(plan, ranks), indent=2)}\n" if as_json else render(plan, ranks))
    return EXIT_FAILED if any(rank.failure is not None for rank in ranks) else EXIT_OK


def rehearse_ranks(plan: Plan, config: RehearseConfig) -> list[RankFigures]:
    """Rehearse the ranks of a plan's job, one after another.

    Raises:
        UserError: this machine has a GPU, or something that rehearsals need is missing.
    """
    require_no_gpu(config)
    with Rehearsals() as rehearsals:
        return [rehearsals.run(plan.job, rank, config) for rank in ranks_to_rehearse(plan.job, config)]


def main() -> None:
    """Entry point of ``python -m harness.rehearse`` and of the console script."""

    def verb(job: RehearseJob, _overrides: list[str]) -> int:
        return rehearse(job, as_json=JSON_FLAG in sys.argv[1:])

    run_verb(verb, config_name="rehearse", schema=RehearseJob, flags=(JSON_FLAG,))


if __name__ == "__main__":
    main()
