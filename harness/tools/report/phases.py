"""Where the time of a run's steps went, beside the plan's times, and a picture of one step on all ranks."""

from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean, mean, median

from harness.config.job import Job
from harness.launch.rows import Row
from harness.metrics.jsonl import read_metrics
from harness.metrics.slow_ranks import own_seconds, slow_ranks
from harness.metrics.window import EXCLUDED
from harness.run.folder import RunFolder
from harness.tools.plan.constants import Calibration
from harness.tools.plan.make import make_plan
from harness.tools.report.runs import layout_and_schedule
from harness.util.document import Block, Document, Figure
from harness.util.errors import UserError
from harness.util.plots import new_panels, save
from harness.util.tables import Table, columns_of
from harness.util.words import plural

FOLDER = "phases"
PICTURE = "phases.png"
PARTS = {
    "compute": ("compute",),
    "dp": ("dp",),
    "tp": ("tp",),
    "cp": ("cp",),
    "ep": ("ep",),
    "pp": ("pp", "bubble"),
    "optimizer": ("optimizer",),
    "sums": (),
    "data": (),
    "host": (),
}
"""Parts of a measured step, and the parts of the plan that they are compared with."""
_PART_OF = {"forward": "compute", "backward": "compute", "gradient_norm": "optimizer"}
_COLORS = {
    "forward": "#3f7fb5",
    "backward": "#5d9e75",
    "dp": "#e0a13c",
    "tp": "#c05a4f",
    "cp": "#9a8fbf",
    "ep": "#b0699a",
    "pp": "#d9d9d9",
    "optimizer": "#1f4e79",
    "sums": "#8c8c8c",
    "data": "#7a5230",
    "host": "#f2f2f2",
}
_PASSES = ("forward.", "backward.")
_WAITS = ("dp", "tp", "cp", "ep", "pp", "sums")
_MOST_RANKS = 64
_OF_PARTS = columns_of("""
    part     part
    seconds  measured s       .4f
    share    share            .1%
    planned  plan s           .4f
    ratio    measured / plan  .2f
""")
_OF_PHASES = columns_of("""
    stage    stage
    phase    phase
    seconds  mean s   .4f
    share    share    .1%
    least    least s  .4f
    most     most s   .4f
    rank     on rank
""")
_OF_RANKS = columns_of("""
    rank    rank
    stage   stage
    host    host
    device  device
    own     computes s               .4f
    queued  waits for a core s       .4f
    waits   waits for ranks s        .4f
    excess  over the stage's median  +.1%
""")


def part_of(phase: str) -> str:
    """Return the one of ``PARTS`` that a phase belongs to."""
    first = phase.split(".")[0]
    part = _PART_OF.get(first, first)
    return part if part in PARTS else "host"


def report_phases(folder: Path, out: Path, calibration: Calibration | None) -> Document:
    """Return the report on the phases of a run; writes its picture into ``out``."""
    by_rank = {}
    for path in (folder / FOLDER).glob("rank*.jsonl"):
        rows = read_metrics(path)
        if rows:
            by_rank[int(path.stem.removeprefix("rank"))] = rows
    if not by_rank:
        raise UserError(
            f"{folder}: has no phases; would work: the folder of a run with profiling.phases=true, "
            "and more steps than metrics.warmup_steps"
        )
    job = RunFolder(folder).read_job()
    means = {rank: _means(by_rank[rank]) for rank in sorted(by_rank)}
    step = sum(sum(seconds.values()) for seconds in means.values()) / len(means)
    steps = sum(row["steps"] for row in by_rank[min(by_rank)])
    counted = f"{plural(steps, 'step')} on {plural(len(means), 'rank')}"
    summary = [f"{layout_and_schedule(job)}: {step:.4f} s a step, mean of {counted}"]
    summary += [f"slow: {each}" for each in slow_ranks(folder)] or ["no rank was found slow"]
    parts = _rows_of_parts(job, means, step, calibration)
    text = (
        "Means over all ranks. A collective counts while computation waits for it; `pp` "
        "includes the bubble."
    )
    blocks: list[Block] = [Table(_OF_PARTS, parts, "Measured and planned", [text])]
    if draw(out / PICTURE, [by_rank[rank] for rank in means], job):
        heading = "One step on all ranks"
        blocks += [f"## {heading}", Figure(PICTURE, heading)]
    text = "Passes by stage. Shares are those of the seconds of all ranks."
    blocks.append(Table(_OF_PHASES, _rows_of_phases(means, step), "Phases", [text]))
    blocks.append(Table(_OF_RANKS, _rows_of_ranks(by_rank, means), "Ranks"))
    return Document(f"Phases of {job.name}", summary, blocks, parts)


Seconds = dict[tuple[str, str], float]
"""By pipeline stage and phase; only passes have a stage."""


def _means(rows: Sequence[Row]) -> Seconds:
    """Return the mean step's seconds of a rank, of rows that are means of several steps."""
    total: Seconds = defaultdict(float)
    for row in rows:
        # Only ranks with several stages write them; JSON's keys are text.
        stages = row.get("stages", {str(row["stage"]): row["phases"]})
        for stage, phases in {"": row["phases"], **stages}.items():
            for phase, seconds in phases.items():
                if phase.startswith(_PASSES) == bool(stage) and phase not in EXCLUDED:
                    total[stage, phase] += seconds * row["steps"]
    steps = sum(row["steps"] for row in rows)
    return {key: seconds / steps for key, seconds in total.items()}


def _rows_of_parts(
    job: Job, means: dict[int, Seconds], step: float, calibration: Calibration | None
) -> list[Row]:
    measured: dict[str, float] = defaultdict(float, step=step)
    for of_rank in means.values():
        for (_, phase), seconds in of_rank.items():
            measured[part_of(phase)] += seconds / len(means)
    speed = make_plan(job, calibration).speed
    planned: dict[str, float | None] = dict.fromkeys([*PARTS, "step"])
    if speed is not None:
        for part, names in PARTS.items():
            if names:
                planned[part] = sum(speed.parts[name] for name in names)
        planned["step"] = speed.step_seconds
    return [
        {
            "part": part,
            "seconds": measured[part],
            "share": measured[part] / step,
            "planned": known,
            "ratio": measured[part] / known if known else None,
        }
        for part, known in planned.items()
        if measured[part] or known
    ]


def _rows_of_phases(means: dict[int, Seconds], step: float) -> list[Row]:
    """Return rows in the order of parts; shares are of the seconds of all ranks."""
    by_phase: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for rank, of_rank in means.items():
        for key, seconds in of_rank.items():
            by_phase[key][rank] = seconds
    parts = list(PARTS)
    rows = []
    for stage, phase in sorted(by_phase, key=lambda key: (parts.index(part_of(key[1])), key)):
        of_ranks = by_phase[stage, phase]
        most = max(of_ranks, key=of_ranks.__getitem__)
        rows.append(
            {
                "stage": stage,
                "phase": phase,
                "seconds": mean(of_ranks.values()),
                "share": sum(of_ranks.values()) / len(means) / step,
                "least": min(of_ranks.values()),
                "most": of_ranks[most],
                "rank": str(most),
            }
        )
    return rows


def _rows_of_ranks(by_rank: dict[int, list[Row]], means: dict[int, Seconds]) -> list[Row]:
    made = []
    of_stage = defaultdict(list)
    for rank, of_rank in means.items():
        rows = by_rank[rank]
        row = {key: rows[-1][key] for key in ("rank", "stage", "host", "device")}
        # Seconds of a step in which the rank had no core to compute on, where the machine knows
        # them.
        known = [each for each in rows if "queued" in each]
        if known:
            steps = [each["steps"] for each in known]
            row["queued"] = fmean([each["queued"] for each in known], steps)
        phases: dict[str, float] = defaultdict(float)
        for (_, phase), seconds in of_rank.items():
            phases[phase] += seconds
        row["own"] = sum(own_seconds(phases)) - row.get("queued", 0.0)
        row["waits"] = sum(s for phase, s in phases.items() if part_of(phase) in _WAITS)
        of_stage[row["stage"]].append(row["own"])
        made.append(row)
    for row in made:
        row["excess"] = row["own"] / median(of_stage[row["stage"]]) - 1
    return made


def draw(path: Path, ranks: Sequence[Sequence[Row]], job: Job) -> bool:
    """Draw the newest step whose spans all ranks have, one bar per rank, ordered by pipeline stage.

    Clocks of ranks differ, so ranks are aligned where the sum of the gradients' norm ends. Returns
    whether there was a step to draw.
    """
    from matplotlib.patches import Patch

    with_spans = [{row["step"]: row for row in rows if "spans" in row} for rows in ranks]
    common = set.intersection(*map(set, with_spans))
    if not common:
        return False
    step = max(common)
    rows = sorted((each[step] for each in with_spans), key=itemgetter("stage", "rank"))
    rows = rows[:: -(-len(rows) // _MOST_RANKS)]
    origin = min(-row["aligned_at"] for row in rows)
    figure, [[axis]] = new_panels(1, 1, 13, max(2.4, 1.3 + 0.32 * len(rows)))
    used: set[str] = set()
    for height, row in enumerate(rows):
        by_color = defaultdict(list)
        for start, end, phase, _stage in row["spans"]:
            left = 1000 * (start - row["aligned_at"] - origin)
            first = phase.split(".")[0]
            color = first if first in _COLORS else part_of(phase)
            by_color[color].append((left, 1000 * (end - start)))
        used |= by_color.keys()
        for name, bars in by_color.items():
            axis.broken_barh(bars, (height - 0.42, 0.84), facecolors=_COLORS[name], linewidth=0)
    names = [f"stage {row['stage']}, rank {row['rank']}" for row in rows]
    axis.set_yticks(range(len(rows)), names)
    axis.invert_yaxis()
    axis.set_xlabel("ms")
    axis.margins(x=0.005)
    handles = [Patch(facecolor=_COLORS[name], label=name) for name in _COLORS if name in used]
    save(figure, path, f"{job.name}, {layout_and_schedule(job)}: step {step}", handles)
    return True
