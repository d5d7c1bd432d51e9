"""The verb ``plan``."""

import dataclasses
import gc
from dataclasses import replace
from pathlib import Path

from harness.compose.verb import Result, Verb
from harness.config.cluster import ClusterConfig
from harness.config.registry import load_attribute
from harness.tools.plan.compare import (
    compare,
    differences_as_dict,
    job_against,
    render_differences,
)
from harness.tools.plan.config import REHEARSE, PlanJob
from harness.tools.plan.layouts import find_layouts, layouts_as_dict, render_layouts
from harness.tools.plan.loads import COLUMN, measured_imbalance
from harness.tools.plan.make import (
    Measured,
    calibrate,
    calibration_of,
    faster_method,
    make_plan,
    render_fit,
)
from harness.tools.plan.picture import draw
from harness.tools.plan.remedies import remedies, remedies_as_dict, render_remedies
from harness.tools.plan.render import as_dict, render
from harness.tools.plan.search import search
from harness.tools.plan.search_result import commands, render_search, search_as_dict, sweep_path
from harness.tools.plan.space import Space
from harness.util.errors import HarnessError, UserError
from harness.util.words import plural

HELP = """`harness plan`: predict memory, traffic and speed of a job in seconds, without a GPU.

harness plan model=llama3_8b parallelism=fsdp_tp cluster=slurm_h100
harness plan ... --json                        the plan as JSON
harness plan -m parallelism.tp=1,2,4 ...       one table of several jobs
harness plan ... against="parallelism.tp=8"    line by line beside the job with these
harness plan ... picture=plan.png              memory by stage, and the pipeline's timeline
harness plan ... search=true cluster.nodes=32  the fastest layouts on 32 nodes
harness plan ... rehearse=true                 compared with a run on virtual GPUs
harness plan calibrate=runs/NAME               fit the constants to runs, and read loads of experts
"""


def plan(job: PlanJob, overrides: list[str]) -> Result:
    """Plan a job, or search for the best layouts for it."""
    if job.calibrate is not None:
        return _calibrate(Path(job.calibrate), job.calibration, job.cluster)
    if job.search:
        return _search(job, overrides)
    calibration = calibration_of(job)
    made = make_plan(job.plain, calibration)
    if faster := faster_method(made, calibration):
        made = replace(made, notes=[*made.notes, faster])
    if job.against is not None:
        other = job_against(job, overrides)
        second = make_plan(other.plain, calibration_of(other))
        return Result(differences_as_dict(made, second), render_differences(made, second))
    data = as_dict(made)
    text = render(made) + draw(job.picture, made)
    if job.cluster.on_node_loss == "continue":
        layouts = find_layouts(job.plain)
        data["layouts"] = layouts_as_dict(layouts)
        text += f"\n{render_layouts(layouts)}"
    if job.rehearse:
        gc.enable()
        rehearsed: Result = load_attribute(REHEARSE)(made)
        data["rehearsed"] = rehearsed.data["ranks"]
        return replace(rehearsed, data=data, text=f"{text}\n{rehearsed.text}")
    if made.fits is not False:
        return Result(data | {"remedies": []}, text)
    found = remedies(made, overrides)
    return Result(data | {"remedies": remedies_as_dict(found)}, f"{text}\n{render_remedies(found)}")


def _search(job: PlanJob, overrides: list[str]) -> Result:
    found = search(Space.of(job.plain, overrides), job.top, calibration_of(job), job.headroom)
    path = sweep_path(job.name, job.sweep_file)
    picture = draw(job.picture, found.best[0].plan)
    data = search_as_dict(found) | {"sweep_file": path}
    text = f"{render_search(found)}\n"
    try:
        return Result(data, text + commands(found, path, overrides) + picture)
    except (HarnessError, OSError) as error:
        return Result(data, text, error=error)


def _calibrate(folder: Path, target: str | None, cluster: ClusterConfig) -> Result:
    from harness.launch.rows import job_of, load

    rows = load(folder)
    loads = {}
    measured = []
    lines = ""
    for row in rows:
        job = job_of(row)
        if job is None:
            continue
        rate = row.get("measured.tokens_per_second_per_rank")
        if rate is not None:
            measured.append(Measured(job, rate, row["device"]))
        if not job.model.moe.enabled:
            continue
        loads[row["point"]] = found = measured_imbalance(row.get("run_dir"))
        source = f"of {row['point']}, parallelism.ep={job.parallelism.ep}"
        if found is None:
            lines += f"expert_imbalance is unknown {source}: no row has {COLUMN}*\n"
        else:
            lines += f"expert_imbalance={found:.4g}  {source}: mean of layers, last half of steps\n"
    try:
        calibration, runs = calibrate(measured, folder, cluster)
    except UserError as error:
        if not loads:
            raise
        # Loads do not depend on the hardware.
        return Result({"expert_imbalance": loads}, lines, error=error)
    path = target or str(folder / "calibration.json")
    calibration.write(path)
    left_out = f"{plural(len(rows) - len(runs), 'row')} without a throughput left out"
    return Result(
        dataclasses.asdict(calibration) | {"written": path, "expert_imbalance": loads},
        f"{render_fit(calibration, runs)}\n{left_out}\nwritten: {path}\n{lines}",
    )


# Garbage collection takes a quarter of the time of importing torch, and a third of a search, and
# finds little.
VERB = Verb(
    "plan",
    plan,
    help=HELP,
    job=PlanJob,
    has_json=True,
    sweep=compare,
    prepare=gc.disable,
    is_alone=True,
)
