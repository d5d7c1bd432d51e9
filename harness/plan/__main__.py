"""``python -m harness.plan``: what a job will be like, told in seconds and without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

from harness.app import run_verb
from harness.errors import EXIT_OK, UserError
from harness.job import launched_ranks
from harness.metrics.encoding import dumps
from harness.plan.config import PlanJob

JSON_FLAG = "--json"


def plan(job: PlanJob, overrides: list[str], *, as_json: bool) -> int:
    """Prints the plan of a job, or of the best layouts for it; returns the exit code."""
    if launched_ranks() is not None:
        raise UserError("harness.plan is one process; start it without torchrun")
    if job.search:
        return _search(job, overrides, as_json=as_json)
    from harness.plan.make import make_plan
    from harness.plan.render import as_dict, render

    made = make_plan(job.plain)
    if job.picture is not None:
        from harness.plan.picture import draw

        draw(Path(job.picture), made)
    if job.verify:
        return _verify(job, made, as_json=as_json)
    sys.stdout.write(f"{dumps(as_dict(made), indent=2)}\n" if as_json else render(made))
    return EXIT_OK


def main() -> None:
    """Entry point of ``python -m harness.plan`` and of the console script."""
    as_json = JSON_FLAG in sys.argv[1:]
    # Hydra knows nothing of it.
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument != JSON_FLAG]

    def verb(job: PlanJob, overrides: list[str]) -> int:
        return plan(job, overrides, as_json=as_json)

    run_verb(verb, config_name="plan", schema=PlanJob)


if __name__ == "__main__":
    main()
