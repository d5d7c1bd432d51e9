"""``python -m harness.plan``: predict memory, traffic and speed of a job in seconds, without a GPU."""

from __future__ import annotations

import dataclasses
import gc
import sys
from pathlib import Path

from harness.app import run_verb
from harness.errors import EXIT_OK, ConfigError, UserError
from harness.launched import launched_ranks
from harness.metrics.encoding import dumps
from harness.plan.config import PlanJob
from harness.plan.constants import Calibration
from harness.plan.plan import Plan

JSON_FLAG = "--json"


def plan(job: PlanJob, overrides: list[str], *, as_json: bool) -> int:
    """Print the plan of a job, or of the best layouts for it; return the exit code."""
    if launched_ranks() is not None:
        raise UserError("harness.plan is one process; start it without torchrun")
    if job.calibrate is not None:
        return _calibrate(Path(job.calibrate), job.calibration)
    if job.search:
        return _search(job, overrides, as_json=as_json)
    from harness.plan.make import make_plan
    from harness.plan.render import as_dict, render

    made = make_plan(job.plain, _calibration(job))
    if job.picture is not None:
        from harness.plan.picture import draw

        draw(Path(job.picture), made)
    if job.verify:
        return _verify(made, step=job.verify_step, as_json=as_json)
    if job.rehearse:
        return _rehearse(made, as_json=as_json)
    sys.stdout.write(f"{dumps(as_dict(made), indent=2)}\n" if as_json else render(made))
    return EXIT_OK


def _search(job: PlanJob, overrides: list[str], *, as_json: bool) -> int:
    """Print the best layouts, and write the sweep that measures them."""
    from harness.plan.found import found_as_dict, render_found, sweep_path, write_sweep
    from harness.plan.search import search
    from harness.plan.space import Space

    found = search(Space.of(job.plain, overrides), job.top, _calibration(job))
    path = sweep_path(job.name, job.sweep_file)
    if job.picture is not None:
        from harness.plan.picture import draw

        draw(Path(job.picture), found.best[0].plan)
    if as_json:
        sys.stdout.write(f"{dumps(found_as_dict(found) | {'sweep_file': path}, indent=2)}\n")
    else:
        sys.stdout.write(f"{render_found(found)}\n")
    # Print the result even if the file cannot be written.
    sys.stdout.flush()
    command = write_sweep(found, path, overrides)
    if not as_json:
        sys.stdout.write(f"to measure the {len(found.best)}: {path}\n  {command}\n")
    return EXIT_OK


def _calibration(job: PlanJob) -> Calibration | None:
    """Read the constants to plan with; None for the defaults.

    Raises:
        ConfigError: they were fitted on other hardware than ``cluster.accelerator``.
    """
    if job.calibration is None:
        return None
    read, named = Calibration.read(job.calibration), job.cluster.accelerator
    if read.accelerator is not None and named is not None:
        rule = f"was fitted on {read.accelerator.name}, and cluster.accelerator is {named}"
        raise ConfigError("calibration", job.calibration, rule, "null, or cluster.accelerator=null")
    return read


def _calibrate(folder: Path, target: str | None) -> int:
    """Fit constants to measured runs, print the errors, and write the constants."""
    from harness.plan.calibrate import Measured, calibrate, render_fit
    from harness.report.rows import job_of, load

    rows = load(folder)
    found = [(job_of(row), row.get("measured.tokens_per_second_per_rank"), row) for row in rows]
    measured = [Measured(job, rate, row["device"]) for job, rate, row in found if job and rate is not None]
    calibration, runs = calibrate(measured, folder)
    path = target or str(folder / "calibration.json")
    calibration.write(path)
    left_out = f"{len(rows) - len(runs)} rows without a throughput left out"
    sys.stdout.write(f"{render_fit(calibration, runs)}\n{left_out}\nwritten: {path}\n")
    return EXIT_OK


def _verify(made: Plan, *, step: bool, as_json: bool) -> int:
    """Build the job on a fake process group, and print how it compares with the plan."""
    from harness.plan.verify import render_verified, verify

    gc.enable()
    verified = verify(made, step=step)
    if as_json:
        sys.stdout.write(f"{dumps(dataclasses.asdict(verified), indent=2)}\n")
    else:
        sys.stdout.write("\n".join(render_verified(verified, made)) + "\n")
    return EXIT_OK


def _rehearse(made: Plan, *, as_json: bool) -> int:
    """Rehearse one rank of each kind, and print plan and rehearsal."""
    from harness.plan.render import as_dict, render
    from harness.rehearse.__main__ import EXIT_FAILED, rehearse_ranks
    from harness.rehearse.config import RehearseConfig
    from harness.rehearse.render import as_dict as rehearsed_as_dict
    from harness.rehearse.render import render as render_rehearsed

    gc.enable()
    ranks = rehearse_ranks(made, RehearseConfig())
    if as_json:
        rehearsed = {"rehearsed": rehearsed_as_dict(made, ranks)["ranks"]}
        sys.stdout.write(f"{dumps(as_dict(made) | rehearsed, indent=2)}\n")
    else:
        sys.stdout.write(f"{render(made)}\n{render_rehearsed(made, ranks)}")
    return EXIT_FAILED if any(rank.failure is not None for rank in ranks) else EXIT_OK


def main() -> None:
    """Entry point of ``python -m harness.plan`` and of the console script."""
    # Garbage collection takes a quarter of the time of importing torch, and a third of a search, and finds
    # little.
    gc.disable()

    def verb(job: PlanJob, overrides: list[str]) -> int:
        return plan(job, overrides, as_json=JSON_FLAG in sys.argv[1:])

    run_verb(verb, config_name="plan", schema=PlanJob, flags=(JSON_FLAG,))


if __name__ == "__main__":
    main()
