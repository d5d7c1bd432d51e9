"""Where the time of a run's steps went, beside the plan's times, and a picture of one step on all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

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
from harness.util.plots import new_figure, save
from harness.util.tables import Column, Table
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
_OF_PARTS = (
    Column("part", "part"),
    Column("seconds", "measured s", ".4f"),
    Column("share", "share", ".1%"),
    Column("planned", "plan s", ".4f"),
    Column("ratio", "measured / plan", ".2f"),
)
_OF_PHASES = (
    Column("stage", "stage"),
    Column("phase", "phase"),
    Column("seconds", "mean s", ".4f"),
    Column("share", "share", ".1%"),
    Column("least", "least s", ".4f"),
    Column("most", "most s", ".4f"),
    Column("rank", "on rank"),
)
_OF_RANKS = (
    Column("rank", "rank"),
    Column("stage", "stage"),
    Column("host", "host"),
    Column("device", "device"),
    Column("own", "computes s", ".4f"),
    Column("queued", "waits for a core s", ".4f"),
    Column("waits", "waits for ranks s", ".4f"),
    Column("excess", "over the stage's median", "+.1%"),
)


def part_of(phase: str) -> str:
    """Return the one of ``PARTS`` that a phase belongs to."""
    first = phase.split(".")[0]
    part = _PART_OF.get(first, first)
    return part if part in PARTS else "host"


def report_phases(folder: Path, out: Path, calibration: Calibration | None) -> Document:
    """Return the report on the phases of a run; writes its picture into ``out``."""
    files = {
        int(path.stem.removeprefix("rank")): path for path in (folder / FOLDER).glob("rank*.jsonl")
    }
    by_rank = {rank: rows for rank, path in sorted(files.items()) if (rows := read_metrics(path))}
    if not by_rank:
        raise UserError(
            f"{folder}: has no phases; would work: the folder of a run with profiling.phases=true, "
            "and more steps than metrics.warmup_steps"
        )
    job = RunFolder(folder).read_job()
    means = {}
    for rank, rows in by_rank.items():
        phases = _mean_phases([(row["phases"], row["steps"]) for row in rows])
        means[rank] = {phase: seconds for phase, seconds in phases.items() if phase not in EXCLUDED}
    step = sum(sum(seconds.values()) for seconds in means.values()) / len(means)
    parts = _rows_of_parts(job, means, step, calibration)
    steps = sum(row["steps"] for row in next(iter(by_rank.values())))
    counted = f"{plural(steps, 'step')} on {plural(len(means), 'rank')}"
    summary = [f"{layout_and_schedule(job)}: {step:.4f} s a step, mean of {counted}"]
    summary += [f"slow: {each}" for each in slow_ranks(folder)] or ["no rank was found slow"]
    text = (
        "Means over all ranks. A collective counts while computation waits for it; `pp` "
        "includes the bubble."
    )
    blocks: list[Block] = [Table(_OF_PARTS, parts, "Measured and planned", [text])]
    if draw(out / PICTURE, by_rank, job):
        heading = "One step on all ranks"
        blocks += [f"## {heading}", Figure(PICTURE, heading)]
    staged = job.parallelism.pp > 1
    found = means_by_stage(by_rank) if staged else {}
    for rank, phases in means.items():
        for phase, seconds in phases.items():
            if not (staged and phase.startswith(_PASSES)):
                found.setdefault(("", phase), {})[rank] = seconds
    text = "Passes by stage. Shares are those of the seconds of all ranks."
    blocks.append(Table(_OF_PHASES, _rows_of_phases(found, len(means) * step), "Phases", [text]))
    blocks.append(Table(_OF_RANKS, _rows_of_ranks(by_rank, means), "Ranks"))
    return Document(f"Phases of {job.name}", summary, blocks, parts)


def _mean_phases(rows: Sequence[tuple[dict[str, float], int]]) -> dict[str, float]:
    """Return the mean step's seconds of each phase, of rows that are means of several steps."""
    total: dict[str, float] = defaultdict(float)
    for phases, steps in rows:
        for phase, seconds in phases.items():
            total[phase] += seconds * steps
    count = sum(steps for _, steps in rows)
    return {phase: seconds / count for phase, seconds in total.items()}


def _rows_of_parts(
    job: Job, means: dict[int, dict[str, float]], step: float, calibration: Calibration | None
) -> list[Row]:
    measured: dict[str, float] = defaultdict(float)
    for seconds in means.values():
        for phase, each in seconds.items():
            measured[part_of(phase)] += each / len(means)
    speed = make_plan(job, calibration).speed
    measured["step"] = step
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


def means_by_stage(by_rank: dict[int, list[Row]]) -> dict[tuple[str, str], dict[int, float]]:
    """Return the seconds of passes in the mean step, by stage and phase, and then by rank."""
    found: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for rank, rows in by_rank.items():
        # Only ranks with several stages write them; JSON's keys are text.
        for stage in rows[0].get("stages") or [str(rows[0]["stage"])]:
            passes = [
                (row.get("stages", {stage: row["phases"]})[stage], row["steps"]) for row in rows
            ]
            for phase, seconds in _mean_phases(passes).items():
                if phase.startswith(_PASSES):
                    found[stage, phase][rank] = seconds
    return found


def _rows_of_phases(found: dict[tuple[str, str], dict[int, float]], total: float) -> list[Row]:
    """Return rows in the order of parts; shares are of ``total``, the seconds of all ranks."""
    parts = list(PARTS)
    rows = []
    for stage, phase in sorted(found, key=lambda key: (parts.index(part_of(key[1])), key)):
        ranks = found[stage, phase]
        most = max(ranks, key=lambda rank: ranks[rank])
        rows.append(
            {
                "stage": stage,
                "phase": phase,
                "seconds": mean(ranks.values()),
                "share": sum(ranks.values()) / total,
                "least": min(ranks.values()),
                "most": ranks[most],
                "rank": str(most),
            }
        )
    return rows


def _rows_of_ranks(by_rank: dict[int, list[Row]], means: dict[int, dict[str, float]]) -> list[Row]:
    of_stage: dict[int, list[float]] = defaultdict(list)
    queued: dict[int, float | None] = {}
    own: dict[int, float] = {}
    for rank, rows in by_rank.items():
        # Seconds of a step in which the rank had no core to compute on, where the machine knows
        # them.
        known = [({"queued": row["queued"]}, row["steps"]) for row in rows if "queued" in row]
        queued[rank] = _mean_phases(known)["queued"] if known else None
        own[rank] = sum(own_seconds(means[rank])) - (queued[rank] or 0.0)
        of_stage[rows[-1]["stage"]].append(own[rank])
    made = []
    for rank, rows in by_rank.items():
        where = {key: rows[-1][key] for key in ("rank", "stage", "host", "device")}
        waits = sum(s for phase, s in means[rank].items() if part_of(phase) in _WAITS)
        excess = own[rank] / median(of_stage[where["stage"]]) - 1
        made.append(
            where | {"own": own[rank], "queued": queued[rank], "waits": waits, "excess": excess}
        )
    return made


def draw(path: Path, by_rank: dict[int, list[Row]], job: Job) -> bool:
    """Draw the newest step whose spans all ranks have, one bar per rank, ordered by pipeline stage.

    Clocks of ranks differ, so ranks are aligned where the sum of the gradients' norm ends. Returns
    whether there was a step to draw.
    """
    from matplotlib.patches import Patch

    with_spans = []
    for rows in by_rank.values():
        with_spans.append({row["step"]: row for row in rows if "spans" in row})
    common = set.intersection(*map(set, with_spans))
    if not common:
        return False
    step = max(common)
    rows = [found[step] for found in with_spans]
    rows.sort(key=lambda row: (row["stage"], row["rank"]))
    rows = rows[:: -(-len(rows) // _MOST_RANKS)]
    origin = min(-row["aligned_at"] for row in rows)
    figure = new_figure(13, max(2.4, 1.3 + 0.32 * len(rows)))
    axis = figure.subplots()
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
    axis.set_yticks(range(len(rows)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("ms")
    axis.margins(x=0.005)
    handles = [
        Patch(facecolor=color, label=name) for name, color in _COLORS.items() if name in used
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8
    )
    figure.suptitle(f"{job.name}, {layout_and_schedule(job)}: step {step}", fontsize=11)
    save(figure, path)
    return True
