"""Curves of runs on the page of a report, drawn by its script: losses, gradient norms, rates and speed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil, inf, isfinite, nan
from pathlib import Path
from statistics import fmean, median_low
from typing import Any, NamedTuple

from harness.config.job import differing_numerics
from harness.launch.rows import Row, job_of
from harness.metrics.jsonl import read_rows
from harness.run.folder import METRICS
from harness.tools.report.rounds import same_but_seed, without_seed
from harness.util.document import Markup
from harness.util.words import plural

COLUMNS = {
    "loss": "training loss",
    "validation_loss": "validation loss",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens_per_second": "tokens/s",
}
_PAGE = Path(__file__).with_name("curves.html")
# Panels whose first points, and whose runs that diverge, are far above all others.
_CUT = ("loss", "validation_loss", "grad_norm")
_WITHIN = 0.95
_MARGIN = 1.25
"""A panel that is cut shows this share of the points of each run, and this much of their height."""
_MOST_POINTS = 1000
_LEAST_POINTS = 20
_POINTS_OF_A_PANEL = 20_000
"""Points of one curve, fewer if there are many curves."""
_SAME_DATA = ("data.", "tokenizer.", "training.seq_len")
_NAMED = 3


class Point(NamedTuple):
    """A place of a curve: of one step, or the means and the range of several; NaN if one is not finite."""

    step: float
    tokens: float
    seconds: float
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """Runs that differ only in their seed.

    Attributes:
        name: overrides of these runs that others do not have.
        rows: the rows of the runs.
        lines: points by column of ``COLUMNS``, of the columns that the runs have.
        ends: by kind of loss the mean of the last tenth; infinite if one is not finite.
        is_thinned: whether points are of several rows.
    """

    name: str
    rows: list[Row]
    lines: dict[str, list[Point]]
    ends: dict[str, float]
    is_thinned: bool

    @classmethod
    def of(
        cls, name: str, rows: list[Row], runs: Sequence[list[Row]], most: int, smooth: int
    ) -> Curve:
        """Make the curve of the runs' metrics, of at most this many points per column."""
        lines = {}
        ends = {}
        for column in COLUMNS:
            known = [[row for row in run if column in row] for run in runs]
            known = [run for run in known if run]
            if known:
                lines[column] = _line(known, column, smooth if column == "loss" else 1, most)
                ends[column] = fmean([_end([row[column] for row in run]) for run in known])
        return cls(name, rows, lines, ends, max(map(len, runs)) > most)


def _end(values: Sequence[float]) -> float:
    mean = fmean(values[-max(1, len(values) // 10) :])
    return mean if isfinite(mean) else inf


def _line(runs: Sequence[Sequence[Row]], column: str, smooth: int, most: int) -> list[Point]:
    """Return at most this many points, each with the mean and the range over its steps and all runs."""
    at: dict[int, list[tuple[float, float, float]]] = {}
    for run in runs:
        values = [row[column] if isfinite(row[column]) else nan for row in run]
        for row, value in zip(run, _smoothed(values, smooth), strict=True):
            at.setdefault(row["step"], []).append((row["tokens"], row["seconds"], value))
    steps = sorted(at)
    size = ceil(len(steps) / most)
    points = []
    for start in range(0, len(steps), size):
        part = steps[start : start + size]
        found = chain.from_iterable(at[step] for step in part)
        tokens, seconds, seen = zip(*found, strict=True)
        places = (fmean(part), fmean(tokens), fmean(seconds))
        points.append(Point(*places, fmean(seen), min(seen), max(seen)))
    return points


def _smoothed(values: Sequence[float], steps: int) -> list[float]:
    """Mean of the last ``steps`` values at every step; of fewer at the start."""
    return [fmean(values[max(0, end - steps) : end]) for end in range(1, len(values) + 1)]


def read_metrics_of(path: Path) -> list[Row]:
    """Return the rows of a ``metrics.jsonl`` with ``COLUMNS``, and ``tokens`` and ``seconds`` so far.

    Seconds are those of training alone: without validation, saving, and the time between two
    attempts. Of a step that is there twice, of an attempt and of the one that resumed it, the later
    row counts.
    """
    written: dict[int, Row] = {}
    for each in read_rows(path)[0] if path.is_file() else []:
        known = {key: each[key] for key in COLUMNS if each.get(key) is not None}
        if known:
            time = {key: each[key] for key in ("tokens", "step_seconds") if each.get(key)}
            written[each["step"]] = {**written.get(each["step"], {}), **known, **time}
    rows: list[Row] = []
    before = 0
    tokens = 0
    seconds = 0.0
    for step, row in sorted(written.items()):
        if "loss" in row:
            seconds += (step - before) * row.pop("step_seconds", 0.0)
            tokens = row.get("tokens", tokens)
            before = step
        rows.append({**row, "step": step, "tokens": tokens, "seconds": seconds})
    return rows


def curves_of(rows: Sequence[Row], smooth: int = 1) -> list[Curve]:
    """Return the curves of rows whose run folders are here, the lowest loss at the end first.

    Args:
        smooth: rows over which training losses are averaged.
    """
    here = [row for row in rows if row.get("run_dir")]
    groups = [list(seeds.values()) for seeds in same_but_seed(here)]
    names = [without_seed(group[0]["point"]) for group in groups]
    if len(set(names)) < len(names):  # the seed is all that tells some of them apart
        names = [group[0]["point"] for group in groups]
    most = max(_LEAST_POINTS, min(_MOST_POINTS, _POINTS_OF_A_PANEL // max(1, len(groups))))
    curves = []
    for name, group in zip(names, groups, strict=True):
        runs = [read_metrics_of(Path(row["run_dir"]) / METRICS) for row in group]
        drawn = [run for run in runs if run]
        seeds = f"({len(drawn)} seeds)" if len(drawn) > 1 else ""
        words = f"{name} {seeds}".strip() or group[0]["point"]
        if drawn:
            curves.append(Curve.of(words, group, drawn, most, smooth))
    kind = _compared(curves)
    return sorted(curves, key=lambda each: each.ends.get(kind, inf))


def _compared(curves: Sequence[Curve]) -> str:
    """The loss that runs are compared by: of validation if all have it."""
    if all("validation_loss" in each.ends for each in curves):
        return "validation_loss"
    return "loss"


def lowest_in_words(curves: Sequence[Curve]) -> list[str]:
    """Name the curve with the lowest loss at the end; those that agree in four digits or in numerics tie."""
    done = [each for each in curves if all(row["state"] == "completed" for row in each.rows)]
    kind = _compared(done)
    ended = [each for each in done if isfinite(each.ends.get(kind, inf))]
    if len(curves) < 2 or not ended:
        return []
    jobs = [job for job in (job_of(each.rows[0]) for each in ended) if job is not None]
    for job in jobs[1:]:
        for name in differing_numerics(jobs[0], job):
            if name.startswith(_SAME_DATA):
                return [f"No loss is called the lowest: the runs differ in `{name}`."]
    best = min(ended, key=lambda each: each.ends[kind])
    tied = []
    for each in ended:
        is_equal = f"{each.ends[kind]:.4f}" == f"{best.ends[kind]:.4f}"
        if is_equal or _numerics_ids(each) == _numerics_ids(best):
            tied.append(each)
    names = ", ".join(f"`{each.name}`" for each in tied[:_NAMED])
    more = f" and {len(tied) - _NAMED} more" if len(tied) > _NAMED else ""
    ends = [each.ends[kind] for each in tied]
    value = f"{min(ends):.4f}"
    if f"{max(ends):.4f}" != value:
        value += f" to {max(ends):.4f}"
    said = f"The lowest {COLUMNS[kind]}, mean of the last tenth: {names}{more}, {value}."
    left = len(curves) - len(ended)
    if left:
        said += f" {plural(left, 'curve')} not compared: not completed, or not finite at the end."
    return [said]


def _numerics_ids(curve: Curve) -> set[str]:
    return {row["numerics_id"] for row in curve.rows}


def markup_of(curves: Sequence[Curve], smooth: int = 1) -> Markup:
    """Return a part of a page with the curves, a panel for each column that a run has."""
    panels = []
    for column, words in COLUMNS.items():
        panel = _panel(curves, column)
        if panel["lines"]:
            over = f", mean of {smooth} rows" if column == "loss" and smooth > 1 else ""
            panels.append({"title": f"{words}{over}", **panel})
    data = json.dumps({"names": [each.name for each in curves], "panels": panels})
    # A name may not end the script.
    page = _PAGE.read_text().replace("DATA", data.replace("<", "\\u003c"))
    return Markup(page, "The curves are on the page.")


def _panel(curves: Sequence[Curve], column: str) -> dict[str, Any]:
    lines = []
    drawn = []
    for number, curve in enumerate(curves):
        points = curve.lines.get(column)
        if points:
            drawn.append(points)
            lines.append({"curve": number, "points": [_numbers(point) for point in points]})
    top = _top(drawn) if column in _CUT else inf
    above = sum(point.high > top for point in chain.from_iterable(drawn))
    return {"lines": lines, "top": float(f"{top:.6g}") if above else None, "above": above}


def _numbers(point: Point) -> list[float | None]:
    """Return the numbers of a point for the script: the range only if it has one, null if not finite."""
    places = [float(f"{place:.8g}") for place in point[:3]]
    if not isfinite(point.value):
        return [*places, None]
    shown = point[3:] if point.high > point.low else [point.value]
    return [*places, *(float(f"{value:.6g}") for value in shown)]


def _top(lines: Sequence[Sequence[Point]]) -> float:
    """Return where a picture is cut, so that steep first steps and runs that diverge leave it.

    Of each run that ends within twice the usual height, at most one point in twenty is above.
    """
    heights = []
    ends = []
    lowest = inf
    for line in lines:
        finite = [point for point in line if isfinite(point.value)]
        if not finite:
            continue
        highs = sorted(point.high for point in finite)
        heights.append(highs[ceil(_WITHIN * (len(highs) - 1))])
        ends.append(_end([point.value for point in finite]))
        lowest = min([lowest, *(point.low for point in finite)])
    if not heights:
        return inf
    usual = median_low(heights) - lowest
    kept = [height for height, end in zip(heights, ends, strict=True) if end <= lowest + 2 * usual]
    return lowest + _MARGIN * (max(kept, default=lowest + usual) - lowest)
