"""Draw a plan: memory by pipeline rank, and below it a timeline of passes."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING, Any

from harness.tools.plan.plan import KINDS, Plan, Speed
from harness.tools.plan.render import devices, mesh_of, schedule_of
from harness.util.plots import new_panels, save
from harness.util.words import GIB, gib, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Kinds of memory: persistent ones in blue, those of a pass in warm colors, the others in muted
# colors.
_KIND_COLORS = {
    "parameters": "#1f4e79",
    "gradients": "#3f7fb5",
    "optimizer": "#8fbbdc",
    "activations": "#e07b39",
    "logits": "#f2b36f",
    "gathered": "#5d9e75",
    "communication": "#9a8fbf",
    "runtime": "#a6a6a6",
}
_PASSES = {
    "F": ("forward", "#3f7fb5"),
    "B": ("backward", "#5d9e75"),
    "I": ("backward, inputs", "#e0a13c"),
    "W": ("backward, weights", "#c05a4f"),
}
# Passes of a rank's first stage have the full color; those of later stages are less opaque, down to
# this.
_PALEST = 0.4
_FEWEST_POINTS_FOR_A_NUMBER = 11.0
_INCHES = 12.0
_LEGEND: dict[str, Any] = {
    "loc": "upper left",
    "bbox_to_anchor": (1.005, 1),
    "frameon": False,
    "fontsize": 8.5,
    "title_fontsize": 8.5,
    "alignment": "left",
}
"""To the right of a panel."""


def draw(path: str | None, plan: Plan) -> str:
    """Draw the plan into a PNG, and return a line that says so; without a path nothing."""
    if path is None:
        return ""
    save(figure_of(plan), Path(path))
    return f"written: {path}\n"


def figure_of(plan: Plan) -> Figure:
    """Draw the plan; without a timeline only its memory. Ink and paper are those of matplotlib's settings."""
    timeline = plan.speed.timeline if plan.speed is not None else []
    ranks = len(plan.memory)
    heights = [3.6]
    if timeline:
        heights.append(max(1.8, 0.36 * ranks + 1.1))
    width = _INCHES if timeline or ranks > 4 else _INCHES * 0.6
    height = sum(heights) + 0.9
    figure, axes = new_panels(len(heights), 1, width, height, height_ratios=heights)
    title = f"{plan.job.name} on {devices(plan)}: {mesh_of(plan.job.parallelism)}"
    figure.suptitle(title, fontsize=12.5, x=0.01, ha="left")
    _draw_memory(axes[0, 0], plan)
    if timeline and plan.speed is not None:
        _draw_timeline(axes[1, 0], plan.speed, f"{schedule_of(plan.job)}, one step")
    return figure


def _draw_memory(axis: Axes, plan: Plan) -> None:
    """Draw stacked bars, one per pipeline rank, and the memory limit as a line."""
    from matplotlib import rcParams

    ranks = range(len(plan.memory))
    fullest = max(plan.memory, key=lambda rank: rank.peak)
    tops = [0.0 for _ in ranks]
    for kind in KINDS:
        sizes = [rank.kinds[kind] / GIB for rank in plan.memory]
        if any(sizes):
            label = f"{kind}  {gib(fullest.kinds[kind])}"
            axis.bar(
                ranks, sizes, 0.62, bottom=tops, color=_KIND_COLORS[kind], label=label, linewidth=0
            )
            tops = [top + size for top, size in zip(tops, sizes, strict=True)]
    paper = {
        "boxstyle": "square,pad=0.15",
        "facecolor": rcParams["figure.facecolor"],
        "edgecolor": "none",
    }
    small: dict[str, Any] = {"fontsize": 8.5, "textcoords": "offset points", "bbox": paper}
    for place, top in zip(ranks, tops, strict=True):
        text = f"{top:.1f}" if top >= 10 else f"{top:.2g}"
        axis.annotate(text, (place, top), (0, 4), ha="center", **small)
    highest = max(tops)
    if plan.memory_limit is not None:
        limit = plan.memory_limit / GIB
        color = rcParams["text.color"] if plan.fits else "#d04545"
        axis.axhline(limit, color=color, linewidth=1.3, linestyle=(0, (5, 3)))
        text = f"limit {limit:.3g} GiB"
        at = axis.get_yaxis_transform()
        axis.annotate(text, (1, limit), (-4, 5), xycoords=at, color=color, ha="right", **small)
        # Always show the limit, also if it is far above the bars.
        highest = max(highest, limit)
    axis.set_ylim(0, highest * 1.12)
    # Keep a single bar narrow.
    margin = max(0, 3 - len(ranks))
    axis.set_xlim(-0.6 - margin, len(ranks) - 0.4 + margin)
    names = [f"pp {rank}" for rank in ranks] if len(ranks) > 1 else ["every rank"]
    axis.set_xticks(ranks, names, fontsize=8.5)
    by_rank = ", by pipeline rank" if len(ranks) > 1 else ""
    axis.set_title(f"memory at its peak{by_rank}", fontsize=10, loc="left")
    axis.set_ylabel("GiB on each rank", fontsize=9)
    of_rank = " on the fullest rank" if len(ranks) > 1 else ""
    axis.legend(title=f"GiB{of_rank}", reverse=True, **_LEGEND)


def _draw_timeline(axis: Axes, speed: Speed, title: str) -> None:
    """Draw a Gantt chart: one row per pipeline rank, the first on top, one bar per pass with its number."""
    from matplotlib import rcParams
    from matplotlib.patches import Patch

    rows = speed.timeline
    actions = list(chain.from_iterable(rows))
    last = max(action.end for action in actions)
    end = max(last, speed.step_seconds)
    axis.set_xlim(0, end)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    points_wide = _INCHES * 72 * 0.8 / end
    # Edges separate neighbours of one color, and must not hide narrow bars.
    widths = [action.seconds for action in actions]
    edge = min(0.5, 0.08 * median_high(widths) * points_wide)
    for place, row in enumerate(rows):
        held = sorted({action.stage for action in row})
        bars = [(action.start, action.seconds) for action in row]
        colors = [_shade(each.kind, held.index(each.stage)) for each in row]
        axis.broken_barh(
            bars,
            (place - 0.39, 0.78),
            facecolors=colors,
            edgecolor=rcParams["figure.facecolor"],
            linewidth=edge,
        )
        small: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.5, "color": "white"}
        for action, (start, width) in zip(row, bars, strict=True):
            if width * points_wide >= _FEWEST_POINTS_FOR_A_NUMBER:
                axis.text(start + width / 2, place, f"{action.microbatch}", **small)
    axis.set_yticks(range(len(rows)), [f"pp {rank}" for rank in range(len(rows))], fontsize=8.5)
    axis.set_xlabel("s", fontsize=9)
    idle = 1 - sum(widths) / (len(rows) * last)
    words = f"{seconds(speed.step_seconds)}; pipeline ranks idle {idle:.1%} of the passes' time"
    axis.set_title(f"{title}: {words}", fontsize=10, loc="left")
    kinds = {action.kind for action in actions}
    handles = [
        Patch(color=color, label=label) for kind, (label, color) in _PASSES.items() if kind in kinds
    ]
    chunks = max(len({action.stage for action in row}) for row in rows)
    if chunks > 1:
        handles.append(Patch(color=_shade("F", 1), label="later stages of the rank: paler"))
    axis.legend(handles=handles, **_LEGEND)


def _shade(kind: str, chunk: int) -> tuple[str, float]:
    """Color and opacity of a pass of a rank's n-th stage."""
    return _PASSES[kind][1], max(_PALEST, 1 - 0.25 * chunk)
