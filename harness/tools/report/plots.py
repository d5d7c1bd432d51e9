"""Plots of a report: losses of runs, and bars of published, predicted and measured results."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from math import inf, isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.launch.rows import Row
from harness.metrics.jsonl import read_rows
from harness.run.folder import METRICS
from harness.tools.report.predictions import MEMORY, RATE
from harness.tools.report.rounds import same_but_seed, without_seed
from harness.util.plots import COLORS, draw_band, new_panels, save, smoothed
from harness.util.words import counted, figure, shortened

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

    def points(
        self, by: str, loss: str, smooth: int, size: float
    ) -> list[tuple[float, float, float, float]]:
        """Return positions in units of ``size``, with the mean, lowest and highest loss there.

        NaN if one is not finite.
        """
        at: dict[int, list[tuple[float, float]]] = {}
        for run in self.runs:
            rows = [row for row in run if loss in row]
            values = [row[loss] if isfinite(row[loss]) else nan for row in rows]
            for row, value in zip(rows, smoothed(values, smooth), strict=True):
                at.setdefault(row["step"], []).append((row[by] / size, value))
        points = []
        for _, pairs in sorted(at.items()):
            places, losses = zip(*pairs, strict=True)
            points.append((fmean(places), fmean(losses), min(losses), max(losses)))
        return points


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
    groups = [list(seeds.values()) for seeds in same_but_seed(with_losses)]
    names = [without_seed(group[0]["point"]) for group in groups]
    if len(set(names)) < len(names):  # the seed is all that tells some of them apart
        names = [group[0]["point"] for group in groups]
    curves = []
    for name, group in zip(names, groups, strict=True):
        seeds = f"({len(group)} seeds)" if len(group) > 1 else ""
        words = f"{name} {seeds}".strip() or group[0]["point"]
        curves.append(Curve(words, [row["losses"] for row in group]))
    return sorted(curves, key=lambda each: each.last)


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
    styles = []
    for number, curve in enumerate(curves):
        # Runs of equal numerics coincide: dashes show them all.
        style: dict[str, Any] = {
            "color": _GREY,
            "label": "",
            "zorder": 1.0,
            "ls": _STYLES[number % len(_STYLES)],
        }
        if number < len(_OF_RUNS):
            name = shortened(curve.name, _LONGEST_NAME)
            style |= {"color": _OF_RUNS[number], "label": name, "zorder": 2.0}
        elif number == len(_OF_RUNS):
            style["label"] = f"{len(curves) - number} more"
        styles.append(style)
    drawing, panels = new_panels(
        len(kinds), len(_SIDES), 13, 1.2 + 3.3 * len(kinds), sharex="col", sharey="row"
    )
    for line, loss in zip(panels, kinds, strict=True):
        over = smooth if loss == "loss" else 1
        for axis, (by, (words, size)) in zip(line, _SIDES.items(), strict=True):
            for curve, style in zip(curves, styles, strict=True):
                points = curve.points(by, loss, over, size)
                if points:
                    places, *values = zip(*points, strict=True)
                    shown = values if len(curve.runs) > 1 else values[:1]
                    marker = "." if len(places) <= 30 else ""
                    draw_band(axis, places, shown, marker=marker, **style)
            axis.grid(color="#e8e8e8")
            axis.set(
                xlabel=words,
                ylabel=f"{LOSSES[loss]}, mean of {over} rows" if over > 1 else LOSSES[loss],
            )
            axis.label_outer()
            axis.locator_params(axis="x", nbins=6)
            axis.xaxis.set_major_formatter(
                lambda value, _: counted(value) if value >= 1e6 else f"{value:,g}"
            )
        low, top = _shown_losses([list(filter(isfinite, _losses_of(run, loss))) for run in runs])
        if top > low:
            line[0].set_ylim(low, min(top, line[0].get_ylim()[1]))
    handles = panels[0][0].get_legend_handles_labels()[0] if len(curves) > 1 else ()
    save(drawing, path, title, handles)
    return True


def _shown_losses(runs: list[list[float]]) -> tuple[float, float]:
    """Limits that cut the first steep steps, and runs that diverge; the same twice to show all."""
    early: list[float] = []
    for run in runs:
        early += run[len(run) // 50 : len(run) // 10 + 1]
    lowest = min(chain.from_iterable(runs), default=nan)
    height = max(early, default=nan) - lowest
    return lowest - 0.05 * height, lowest + 1.1 * height


def bars(path: Path, title: str, names: Sequence[str], rows: Sequence[Row]) -> bool:
    """Plot throughput and memory, with a bar for each known kind of value; return whether there was any."""
    kinds = [kind for kind in COLORS if any(row.get(f"{kind}.{RATE}") is not None for row in rows)]
    if not kinds or not can_draw():
        return False
    height = _INCHES_PER_BAR * (len(kinds) + 0.8) * len(rows)
    drawing, [panels] = new_panels(
        1, 2, 13, max(_AROUND + height, 2.6), sharey=True, width_ratios=(3, 2)
    )
    width = 0.8 / len(kinds)
    for axis, (fact, what) in zip(panels, _PANELS, strict=True):
        for number, kind in enumerate(kinds):
            values = [row.get(f"{kind}.{fact}") for row in rows]
            places = [index - 0.4 + (number + 0.5) * width for index in range(len(rows))]
            labels = []
            for row, value in zip(rows, values, strict=True):
                share = row.get(f"{kind}.mfu") if fact == RATE else None
                mfu = "" if share is None else f" ({share:.1%} MFU)"
                labels.append("" if value is None else f"{figure(value)}{mfu}")
            lengths = [value or 0.0 for value in values]
            drawn = axis.barh(places, lengths, 0.92 * width, color=COLORS[kind], label=WORDS[kind])
            axis.bar_label(drawn, labels, padding=2, fontsize=7)
        axis.margins(x=0.16)
        axis.set_xlabel(what)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    panels[0].set_yticks(range(len(rows)), [shortened(name, _LONGEST_NAME) for name in names])
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    save(drawing, path, title, panels[0].get_legend_handles_labels()[0] if len(kinds) > 1 else ())
    return True
