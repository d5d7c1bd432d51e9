"""Draw a plan: memory by pipeline rank, and below it a timeline of passes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.tools.plan.plan import KINDS, Plan, Speed
from harness.tools.plan.render import devices, mesh_of, schedule_of
from harness.util.files import write_atomically
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
_DPI = 150


def draw(path: str | None, plan: Plan) -> str:
    """Draw the plan into a PNG, and return a line that says so; without a path nothing."""
    if path is None:
        return ""
    image = io.BytesIO()
    figure_of(plan).savefig(image, format="png", dpi=_DPI)
    write_atomically(Path(path), image.getvalue())
    return f"written: {path}\n"


def figure_of(plan: Plan) -> Figure:
    """Draw the plan; without a timeline only its memory. Ink and paper are those of matplotlib's settings."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    timeline = plan.speed.timeline if plan.speed is not None else []
    ranks = len(plan.memory)
    heights = [3.6, *([max(1.8, 0.36 * ranks + 1.1)] if timeline else [])]
    width = _INCHES if timeline or ranks > 4 else _INCHES * 0.6
    layout = ConstrainedLayoutEngine(hspace=0.08, h_pad=0.08)
    figure = Figure(figsize=(width, sum(heights) + 0.9), layout=layout)
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    title = f"{plan.job.name} on {devices(plan)}: {mesh_of(plan.job.parallelism)}"
    figure.suptitle(title, fontsize=12.5, x=0.01, ha="left")
    _draw_memory(axes[0], plan)
    if timeline and plan.speed is not None:
        _draw_timeline(axes[1], plan.speed, f"{schedule_of(plan.job)}, one step")
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
    _title(axis, "memory at its peak" + (", by pipeline rank" if len(ranks) > 1 else ""))
    axis.set_ylabel("GiB on each rank", fontsize=9)
    handles, labels = axis.get_legend_handles_labels()
    _legend(
        axis, handles[::-1], labels[::-1], "GiB on the fullest rank" if len(ranks) > 1 else "GiB"
    )


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
    widths = sorted(action.end - action.start for action in actions)
    edge = min(0.5, 0.08 * widths[len(widths) // 2] * points_wide)
    for place, row in enumerate(rows):
        held = sorted({action.stage for action in row})
        bars = [(action.start, action.end - action.start) for action in row]
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
    _title(
        axis,
        f"{title}: {seconds(speed.step_seconds)}; pipeline ranks idle {idle:.1%} of the passes' time",
    )
    kinds = {action.kind for action in actions}
    handles: list[Any] = [
        Patch(color=color, label=label) for kind, (label, color) in _PASSES.items() if kind in kinds
    ]
    chunks = max(len({action.stage for action in row}) for row in rows)
    if chunks > 1:
        handles.append(Patch(color=_shade("F", 1), label="later stages of the rank: paler"))
    _legend(axis, handles, [handle.get_label() for handle in handles])


def _shade(kind: str, chunk: int) -> tuple[str, float]:
    """Color and opacity of a pass of a rank's n-th stage."""
    return _PASSES[kind][1], max(_PALEST, 1 - 0.25 * chunk)


def _title(axis: Axes, title: str) -> None:
    axis.set_title(title, fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8.5, length=3)


def _legend(
    axis: Axes, handles: Sequence[Any], labels: Sequence[str], title: str | None = None
) -> None:
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.005, 1), "frameon": False}
    size: dict[str, Any] = {"fontsize": 8.5, "handlelength": 1.1, "handleheight": 1.1}
    axis.legend(handles, labels, title=title, title_fontsize=8.5, alignment="left", **place, **size)
