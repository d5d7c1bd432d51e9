"""Plots of a report: bars of published, predicted and measured results, and predicted against measured."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.util.plots import COLORS, new_figure, save, ticks
from harness.util.tables import NOT_MEASURED, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

WORDS = {
    "published": "published",
    "predicted": "predicted",
    "expected": "predicted, machine of the measurement",
    "measured": "measured",
}
RATE, MEMORY = "tokens_per_second_per_rank", "memory_gib"
_INCHES_PER_BAR, _AROUND = 0.2, 1.5
_INCHES_PER_LINE, _INCHES_PER_LETTER, _LETTERS_PER_LINE = 0.16, 0.075, 48
_PANELS = ((RATE, "tokens per second and rank"), (MEMORY, "peak memory of a rank, GiB"))


def bars(path: Path, title: str, names: Sequence[str], rows: Sequence[Row]) -> bool:
    """Plot throughput and memory, with a bar for each known kind of value; return whether there was any."""
    kinds = [kind for kind in COLORS if any(row.get(f"{kind}.{RATE}") is not None for row in rows)]
    if not kinds or not rows:
        return False
    labels = ["\n".join(textwrap.wrap(name, _LETTERS_PER_LINE)) or name for name in names]
    lines = max(label.count("\n") + 1 for label in labels)
    per_row = max(_INCHES_PER_BAR * (len(kinds) + 0.8), _INCHES_PER_LINE * lines)
    widest = max(len(line) for label in labels for line in label.split("\n"))
    figure = new_figure(9 + _INCHES_PER_LETTER * widest, max(_AROUND + per_row * len(rows), 2.6))
    panels = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for axis, (fact, what) in zip(panels, _PANELS, strict=True):
        _draw_bars(axis, rows, kinds, fact)
        axis.set_xlabel(what)
    panels[0].set_yticks(range(len(rows)), labels, fontsize=8)
    panels[0].invert_yaxis()
    if len(kinds) > 1:
        handles, words = panels[0].get_legend_handles_labels()
        figure.legend(handles, words, loc="outside lower center", ncols=len(kinds), frameon=False)
    figure.suptitle(title, fontsize=11)
    save(figure, path)
    return True


def _draw_bars(axis: Axes, rows: Sequence[Row], kinds: Sequence[str], fact: str) -> None:
    width = 0.8 / len(kinds)
    most = max((row.get(f"{kind}.{fact}") or 0.0 for row in rows for kind in kinds), default=0.0)
    form = ",.0f" if most >= 500 else ",.1f" if most >= 10 else ",.2f"
    for number, kind in enumerate(kinds):
        positions = [index + (number - (len(kinds) - 1) / 2) * width for index in range(len(rows))]
        values = [row.get(f"{kind}.{fact}") for row in rows]
        lengths = [value or 0.0 for value in values]
        axis.barh(positions, lengths, 0.92 * width, color=COLORS[kind], label=WORDS[kind])
        for row, position, value in zip(rows, positions, values, strict=True):
            if value is None:
                continue
            end, mfu = value, ""
            if fact == RATE:
                low, high, share = row.get("measured.low"), row.get("measured.high"), row.get(f"{kind}.mfu")
                mfu = "" if share is None else f" ({share:.1%} MFU)"
                if kind == "measured" and low is not None and high is not None:
                    # The range of the steps' rates, across the end of the bar.
                    axis.plot([low, high], [position, position], color="#1b1f24", linewidth=1)
                    end = max(value, high)
            axis.text(end, position, f" {value:{form}}{mfu}", va="center", fontsize=7)
    for index, row in enumerate(rows):
        if fact == RATE and row["state"] not in ("completed", NOT_MEASURED) and "measured" in kinds:
            offset = (len(kinds) - 1) / 2 * width
            failure = ": ".join(part for part in (row["state"], row.get("kind")) if part)
            axis.text(0, index + offset, f" {failure}", va="center", fontsize=7)
    axis.margins(x=0.16)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.spines[["top", "right"]].set_visible(False)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def against(
    path: Path,
    title: str,
    names: Sequence[str],
    rows: Sequence[Row],
    *,
    reference: str = "measured",
    note: str = "",
) -> bool:
    """Plot predicted against measured (or published) throughput, with a named point for each row with both.

    ``note`` is a text in the corner, such as a rank correlation. Returns whether there was anything to plot.
    """
    pairs = [
        (name, row[f"{reference}.{RATE}"], row[f"predicted.{RATE}"])
        for name, row in zip(names, rows, strict=True)
        if row.get(f"{reference}.{RATE}") is not None and row.get(f"predicted.{RATE}") is not None
    ]
    if len(pairs) < 2:
        return False
    figure = new_figure(8, 6.4)
    axis = figure.subplots()
    values = [value for _, *both in pairs for value in both]
    low, high = 0.85 * min(values), 1.1 * max(values)
    axis.plot(
        [low, high], [low, high], color="#bbbbbb", linewidth=1, zorder=0, label=f"predicted = {reference}"
    )
    known, expected = [pair[1] for pair in pairs], [pair[2] for pair in pairs]
    axis.scatter(known, expected, s=22, color=COLORS["measured"], zorder=3)
    axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    for side in (axis.xaxis, axis.yaxis):
        name_ticks(side, lambda value: f"{value:,.10g}")
    axis.set_xlabel(f"{reference} tokens per second and rank")
    axis.set_ylabel("predicted tokens per second and rank")
    axis.spines[["top", "right"]].set_visible(False)
    _name_points(axis, pairs)
    axis.legend(loc="lower right", frameon=False)
    if note:
        axis.text(0.02, 0.97, note, transform=axis.transAxes, va="top")
    axis.set_title(title, fontsize=11)
    save(figure, path)
    return True


def name_ticks(side: Axis, form: Callable[[float], str]) -> None:
    """Label a logarithmic axis with a few round numbers."""
    from matplotlib.ticker import FixedLocator, NullLocator

    side.set_major_locator(FixedLocator(ticks(*side.get_view_interval())))
    side.set_minor_locator(NullLocator())
    side.set_major_formatter(lambda value, _: form(value))


def _name_points(axis: Axes, pairs: Sequence[tuple[str, float, float]]) -> None:
    """Write names beside points, each at the first position where it covers no other name or point."""
    figure = axis.get_figure()
    assert figure is not None
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    points = [axis.transData.transform((x, y)) for _, x, y in pairs]
    taken: list[Any] = []
    for (name, x, y), own in sorted(zip(pairs, points, strict=True), key=lambda each: tuple(each[1])):
        for dx, dy, side in _OFFSETS:
            text = axis.annotate(
                name, (x, y), (dx, dy), textcoords="offset points", fontsize=7, ha=side, va="center",
                arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.5} if abs(dy) > 8 else None,
            )  # fmt: skip
            box = text.get_window_extent(renderer).padded(1)
            others = [point for point in points if tuple(point) != tuple(own)]
            inside = axis.get_window_extent(renderer)
            if (
                not any(box.overlaps(other) for other in taken)
                and not any(box.padded(3).contains(*point) for point in others)
                and inside.x0 <= box.x0
                and box.x1 <= inside.x1 + 60
            ):
                break
            text.remove()
        else:
            text = axis.annotate(name, (x, y), (6, 0), textcoords="offset points", fontsize=7, va="center")
            box = text.get_window_extent(renderer)
        taken.append(box)


_OFFSETS = [
    (dx, dy, side)
    for distance in (0, 8, 16, 26, 38, 52)
    for dy in ((distance, -distance) if distance else (0,))
    for dx, side in ((6, "left"), (-6, "right"))
]
