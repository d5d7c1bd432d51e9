"""Plots of a report: losses of runs, and bars of published, predicted and measured results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from math import inf, isfinite, nan
from pathlib import Path
from statistics import fmean, median_low
from typing import TYPE_CHECKING

from harness.launch.rows import Row
from harness.metrics.jsonl import read_rows
from harness.run.folder import METRICS
from harness.tools.report.predictions import MEMORY, RATE
from harness.tools.report.rounds import same_but_seed, without_seed
from harness.util.plots import COLORS, new_figure, save, smoothed, ticks
from harness.util.words import NOT_MEASURED, counted, figure, plural, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

LARGEST_CUT = 0.05
"""Share of a run's losses after its first tenth that a picture leaves out at most."""
WORDS = {
    "published": "published",
    "predicted": "predicted",
    "expected": "predicted, machine of the measurement",
    "measured": "measured",
}
_INCHES_PER_BAR = 0.2
_AROUND = 1.5
"""Inches of title, axis and legend."""
_PANELS = ((RATE, "tokens per second and rank"), (MEMORY, "peak memory of a rank, GiB"))

LOSSES = {"loss": "training loss", "validation_loss": "validation loss"}
# Distinguishable with any kind of colour blindness (Okabe and Ito); runs with a worse loss are
# grey.
_OF_RUNS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c510a")
_GREY = "#bbbbbb"
_STYLES = ("-", "--", ":", "-.")
_LONGEST_NAME = 60
# Axes of losses, by the key of their rows: words, and the size of a unit.
_SIDES = {
    "step": ("step", 1.0),
    "tokens": ("tokens", 1.0),
    "seconds": ("hours of training", 3600.0),
}


@dataclass(frozen=True)
class Curve:
    """Losses of runs that differ only in their seed: for each run its rows (see ``read_losses``)."""

    name: str
    numerics_id: str
    runs: list[list[Row]]

    @property
    def last(self) -> float:
        """Mean of the last tenth of the validation or else training losses; infinite if one diverged."""
        means = []
        for run in self.runs:
            values = _losses_of(run, "validation_loss") or _losses_of(run, "loss")
            means.append(fmean(values[-max(1, len(values) // 10) :]))
        mean = fmean(means)
        return mean if isfinite(mean) else inf

    def points(self, by: str, loss: str, smooth: int) -> tuple[list[float], ...]:
        """Return positions, and the mean, lowest and highest loss there; NaN if one is not finite."""
        at: dict[int, list[tuple[float, float]]] = {}
        for run in self.runs:
            rows = [row for row in run if loss in row]
            values = [row[loss] if isfinite(row[loss]) else nan for row in rows]
            for row, value in zip(rows, smoothed(values, smooth), strict=True):
                at.setdefault(row["step"], []).append((row[by], value))
        points = []
        for _, pairs in sorted(at.items()):
            losses = [value for _, value in pairs]
            place = fmean(place for place, _ in pairs)
            points.append((place, fmean(losses), min(losses), max(losses)))
        return tuple(map(list, zip(*points, strict=True))) or ([], [], [], [])


def _losses_of(run: Sequence[Row], kind: str) -> list[float]:
    return [row[kind] for row in run if kind in row]


def read_losses(path: Path) -> list[Row]:
    """Return the losses of a ``metrics.jsonl``: rows with ``step``, and ``tokens`` and ``seconds`` so far.

    Seconds are those of training alone: without validation, saving, and the time between two
    attempts. Of a step that is there twice, of an attempt and of the one that resumed it, the later
    row counts.
    """
    written: dict[int, Row] = {}
    for each in read_rows(path)[0] if path.is_file() else []:
        if any(each.get(key) is not None for key in LOSSES):
            written[each["step"]] = {**written.get(each["step"], {}), **each}
    rows: list[Row] = []
    before = 0
    tokens = 0
    seconds = 0.0
    for step, row in sorted(written.items()):
        if "loss" in row:
            step_seconds = row.get("step_seconds") or 0.0
            seconds += (step - before) * step_seconds
            tokens = row.get("tokens", 0)
            before = step
        known = {key: row[key] for key in LOSSES if row.get(key) is not None}
        rows.append({"step": step, "tokens": tokens, "seconds": seconds, **known})
    return rows


def curves_of(rows: Sequence[Row]) -> list[Curve]:
    """Return the losses of rows whose run folders are here, the lowest loss at the end first."""
    with_losses = []
    for row in rows:
        losses = read_losses(Path(row["run_dir"]) / METRICS) if row.get("run_dir") else []
        if losses:
            with_losses.append({**row, "losses": losses})
    curves = []
    for seeds in same_but_seed(with_losses):
        runs = [row["losses"] for row in seeds.values()]
        first = next(iter(seeds.values()))
        curves.append(Curve(first["point"], first["numerics_id"], runs))
    names = [without_seed(curve.name) for curve in curves]
    if len(set(names)) < len(names):  # the seed is all that tells some of them apart
        names = [curve.name for curve in curves]
    named = []
    for curve, name in zip(curves, names, strict=True):
        if len(curve.runs) > 1:
            name = f"{name} ({len(curve.runs)} seeds)".strip()
        named.append(replace(curve, name=name or curve.name))
    return sorted(named, key=lambda each: each.last)


def can_draw() -> bool:
    """Whether matplotlib is installed; without it there are no bars and no losses."""
    return find_spec("matplotlib") is not None


def losses(path: Path, title: str, rows: Sequence[Row], smooth: int = 1) -> bool:
    """Plot the losses of runs by step, tokens and time; return whether there were any.

    Runs of other seeds are a band with their mean. Of many runs, only those with the lowest losses
    at the end have colours.

    Args:
        smooth: rows over which training losses are averaged.
    """
    curves = curves_of(rows)
    runs = list(chain.from_iterable(curve.runs for curve in curves))
    logged = set(chain.from_iterable(chain.from_iterable(runs)))
    kinds = [loss for loss in LOSSES if loss in logged]
    if not kinds or not can_draw():
        return False
    drawing = new_figure(13, 1.2 + 3.3 * len(kinds))
    panels = drawing.subplots(len(kinds), len(_SIDES), sharex="col", sharey="row", squeeze=False)
    for line, loss in zip(panels, kinds, strict=True):
        over = smooth if loss == "loss" else 1
        for axis, (by, (words, size)) in zip(line, _SIDES.items(), strict=True):
            _draw_losses(axis, curves, by, size, loss, over)
            axis.set_xlabel(words if loss == kinds[-1] else "")
            axis.locator_params(axis="x", nbins=6)
            axis.xaxis.set_major_formatter(
                lambda value, _: counted(value) if value >= 1e6 else f"{value:,g}"
            )
        known = [list(filter(isfinite, _losses_of(run, loss))) for run in runs]
        shown = _shown_losses(known)
        if shown is not None:
            line[0].set_ylim(shown[0], min(shown[1], line[0].get_ylim()[1]))
            above = sum(value > shown[1] for value in chain.from_iterable(known))
            place = {"transform": line[0].transAxes, "ha": "right", "va": "top"}
            line[0].text(0.97, 0.95, f"{plural(above, 'point')} above" if above else "", **place)
        line[0].set_ylabel(LOSSES[loss] + (f", mean of {over} rows" if over > 1 else ""))
    handles, names = panels[0][0].get_legend_handles_labels()
    if len(curves) > 1:
        columns = max(1, int(12 / (0.8 + 0.09 * max(map(len, names)))))
        drawing.legend(
            handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
        )
    drawing.suptitle(title, fontsize=11)
    save(drawing, path)
    return True


def _shown_losses(runs: list[list[float]]) -> tuple[float, float] | None:
    """Limits that cut the first steep steps, and runs that diverge; None to show all.

    Of runs that do not fall, the first steps say nothing about the others. All is shown if most
    runs would lose ``LARGEST_CUT`` of their later losses.
    """
    early: list[float] = []
    for run in runs:
        early += run[len(run) // 50 : len(run) // 10 + 1]
    lowest = min(chain.from_iterable(runs), default=nan)
    height = 1.1 * (max(early, default=nan) - lowest)
    top = lowest + height
    later = [run[len(run) // 10 + 1 :] for run in runs if len(run) > 1]
    lost = []
    for run in later:
        cut = [value for value in run if value > top]
        lost.append(len(cut) / len(run))
    if not lost or median_low(lost) >= LARGEST_CUT or not height > 0:
        return None
    return lowest - 0.05 * height, top


def _draw_losses(
    axis: Axes, curves: Sequence[Curve], by: str, size: float, loss: str, smooth: int
) -> None:
    drawn: Counter[str] = Counter()
    for number, curve in enumerate(curves):
        places, mean, low, high = curve.points(by, loss, smooth)
        place = [each / size for each in places]
        if number < len(_OF_RUNS):
            name = shortened(curve.name, _LONGEST_NAME)
            color = _OF_RUNS[number]
            order = 2.0
        else:
            name = f"{len(curves) - number} more" if number == len(_OF_RUNS) else ""
            color = _GREY
            order = 1.0
        # Runs of equal numerics coincide: dashes show them all.
        style = _STYLES[drawn[curve.numerics_id] % len(_STYLES)]
        marker = "." if len(place) <= 30 else ""
        drawn[curve.numerics_id] += 1
        axis.plot(
            place, mean, color=color, ls=style, lw=1.3, zorder=order, label=name, marker=marker
        )
        if len(curve.runs) > 1:
            axis.fill_between(place, low, high, color=color, alpha=0.25, linewidth=0)
    axis.grid(color="#e8e8e8")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def bars(path: Path, title: str, names: Sequence[str], rows: Sequence[Row]) -> bool:
    """Plot throughput and memory, with a bar for each known kind of value; return whether there was any."""
    kinds = []
    for kind in COLORS:
        if any(row.get(f"{kind}.{RATE}") is not None for row in rows):
            kinds.append(kind)
    if not kinds or not rows or not can_draw():
        return False
    per_row = _INCHES_PER_BAR * (len(kinds) + 0.8)
    drawing = new_figure(13, max(_AROUND + per_row * len(rows), 2.6))
    panels = drawing.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for axis, (fact, what) in zip(panels, _PANELS, strict=True):
        _draw_bars(axis, rows, kinds, fact)
        axis.set_xlabel(what)
    labels = [shortened(name, _LONGEST_NAME) for name in names]
    panels[0].set_yticks(range(len(rows)), labels, fontsize=8)
    panels[0].invert_yaxis()
    if len(kinds) > 1:
        handles, words = panels[0].get_legend_handles_labels()
        drawing.legend(handles, words, loc="outside lower center", ncols=len(kinds), frameon=False)
    drawing.suptitle(title, fontsize=11)
    save(drawing, path)
    return True


def _draw_bars(axis: Axes, rows: Sequence[Row], kinds: Sequence[str], fact: str) -> None:
    width = 0.8 / len(kinds)
    for number, kind in enumerate(kinds):
        positions = [index + (number - (len(kinds) - 1) / 2) * width for index in range(len(rows))]
        values = [row.get(f"{kind}.{fact}") for row in rows]
        lengths = [value or 0.0 for value in values]
        axis.barh(positions, lengths, 0.92 * width, color=COLORS[kind], label=WORDS[kind])
        for row, position, value in zip(rows, positions, values, strict=True):
            if value is None:
                continue
            end = value
            mfu = ""
            if fact == RATE:
                low = row.get("measured.low")
                high = row.get("measured.high")
                share = row.get(f"{kind}.mfu")
                mfu = "" if share is None else f" ({share:.1%} MFU)"
                if kind == "measured" and low is not None and high is not None:
                    # The range of the steps' rates, across the end of the bar.
                    axis.plot([low, high], [position, position], color="#1b1f24", linewidth=1)
                    end = max(value, high)
            axis.text(end, position, f" {figure(value)}{mfu}", va="center", fontsize=7)
    for index, row in enumerate(rows):
        if fact == RATE and row["state"] not in ("completed", NOT_MEASURED) and "measured" in kinds:
            offset = (len(kinds) - 1) / 2 * width
            axis.text(0, index + offset, f" {row['state']}", va="center", fontsize=7)
    axis.margins(x=0.16)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.spines[["top", "right"]].set_visible(False)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def name_ticks(side: Axis, form: Callable[[float], str]) -> None:
    """Label a logarithmic axis with a few round numbers."""
    from matplotlib.ticker import FixedLocator, NullLocator

    side.set_major_locator(FixedLocator(ticks(*side.get_view_interval())))
    side.set_minor_locator(NullLocator())
    side.set_major_formatter(lambda value, _: form(value))
