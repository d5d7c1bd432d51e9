"""Pictures of scaling laws: loss against compute with its fit, and IsoFLOP curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.tools.report.plots import name_ticks
from harness.tools.report.power_laws import COMPUTE, LEVEL, Frontier
from harness.util.plots import COLORS, new_figure, save
from harness.util.words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from harness.tools.report.fits import Fits, FittedRun

_POINTS = 60
_HELD_OUT = "#009e73"


def draw_law(path: Path, title: str, made: Fits) -> str:
    """Draw losses over compute, or over the losses of a law of two variables; return the file's name."""
    import numpy as np

    law = made.law
    assert law is not None

    figure = new_figure(7.6, 5.0)
    axis = figure.subplots()
    if law.law is COMPUTE:
        fitted = [run.flops for run in made.runs]
        others = [each.run.flops for each in made.forecasts]
        grid = np.geomspace(0.7 * min(fitted + others), 1.5 * max(fitted + others), _POINTS)
        curve = law.predict([[each] for each in grid])
        axis.fill_between(
            grid, [each.low for each in curve], [each.high for each in curve],
            color=COLORS["predicted"], alpha=0.18, linewidth=0, label=f"{LEVEL:.0%} interval of the curve",
        )  # fmt: skip
        axis.plot(grid, [each.value for each in curve], color=COLORS["predicted"], label="fit")
    else:
        fitted = [each.value for each in law.predict([run.variables(law.law) for run in made.runs])]
        others = [each.predicted.value for each in made.forecasts]
        ends = [min(fitted), max(fitted)]
        axis.plot(ends, ends, color="#bbbbbb", linewidth=1, label="fitted = measured")
    axis.scatter(
        fitted, [run.loss or 0.0 for run in made.runs],
        color=COLORS["measured"], s=24, zorder=3, label="fitted runs",
    )  # fmt: skip
    _draw_forecasts(axis, made, others)
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="C, FLOPs" if law.law is COMPUTE else "loss of the fit",
        ylabel=made.loss.replace("_", " "),
    )
    name_ticks(axis.yaxis, _loss)
    if law.law is not COMPUTE:
        name_ticks(axis.xaxis, _loss)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    axis.set_title(f"{title}: {law.law.formula}", fontsize=11)
    save(figure, path)
    return path.name


def _draw_forecasts(axis: Axes, made: Fits, positions: Sequence[float]) -> None:
    """Draw each predicted loss with its interval, and the measured one."""
    if not made.forecasts:
        return
    predicted = [each.predicted for each in made.forecasts]
    values = [each.value for each in predicted]
    sides = list(zip(*(each.sides for each in predicted), strict=True))
    axis.errorbar(
        positions, values, yerr=sides, fmt="_", color=_HELD_OUT, capsize=4, markersize=10,
        label=f"predicted, {LEVEL:.0%} interval of a run",
    )  # fmt: skip
    held: list[tuple[float, FittedRun]] = [
        (position, each.run)
        for position, each in zip(positions, made.forecasts, strict=True)
        if each.run.loss is not None
    ]
    if held:
        axis.scatter(
            [position for position, _ in held], [run.loss or 0.0 for _, run in held],
            marker="D", s=30, facecolors="none", edgecolors="#1b1f24", zorder=4, label="measured, not fitted",
        )  # fmt: skip


def draw_isoflop(path: Path, title: str, found: Frontier) -> str:
    """Draw the parabola of each budget, and, if any has a minimum, the best sizes; return the file's name."""
    import matplotlib
    import numpy as np

    has_minimum = any(each.best is not None for each in found.parabolas)
    figure = new_figure(11 if has_minimum else 5.6, 4.6)
    left, *rest = axes = figure.subplots(1, 1 + has_minimum, squeeze=False)[0]
    colors = [
        matplotlib.colormaps["viridis"](each) for each in np.linspace(0, 0.85, len(found.parabolas))
    ]
    for color, each in zip(colors, found.parabolas, strict=True):
        left.scatter(each.variable, each.losses, color=color, s=22, label=f"{each.flops:.2g} FLOPs")
        grid = np.geomspace(each.variable.min(), each.variable.max(), _POINTS)
        left.plot(grid, np.polyval(each.curve, np.log(grid)), color=color, linewidth=1)
        if each.best is not None:
            left.scatter([each.best.value], [each.lowest], marker="*", color=color, s=110, zorder=3)
    left.set(xscale="log", xlabel="N, parameters", ylabel="loss")
    left.legend(frameon=False, fontsize=8)
    name_ticks(left.xaxis, counted)
    for right in rest:
        _draw_best(right, found, colors)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{title}: IsoFLOP curves", fontsize=11)
    save(figure, path)
    return path.name


def _draw_best(axis: Axes, found: Frontier, colors: Sequence[Any]) -> None:
    """Draw the best size of each budget, and the power law through them."""
    import numpy as np

    for color, each in zip(colors, found.parabolas, strict=True):
        if each.best is not None:
            errors = [[side] for side in each.best.sides]
            axis.errorbar(
                [each.flops], [each.best.value], yerr=errors, fmt="o", color=color, capsize=4
            )
    if found.exponent is not None and found.factor is not None:
        flops = np.array([found.parabolas[0].flops, found.parabolas[-1].flops])
        power = found.exponent
        axis.plot(
            flops, found.factor * flops**power.value, color="#1b1f24", linewidth=1,
            label=f"N = {found.factor:.3g} C^{power.value:.3g} ({power.low:.3g} to {power.high:.3g})",
        )  # fmt: skip
        axis.legend(frameon=False, fontsize=8)
    axis.set(xscale="log", yscale="log", xlabel="C, FLOPs", ylabel="best N")
    name_ticks(axis.yaxis, counted)


def _loss(value: float) -> str:
    return f"{value:.3g}"
