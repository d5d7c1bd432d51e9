"""Pictures of scaling laws: loss against compute with its fit, and IsoFLOP curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.tools.report.power_laws import COMPUTE, LEVEL, Fit, Frontier
from harness.util.plots import COLORS, new_panels, save
from harness.util.words import counted

if TYPE_CHECKING:
    from matplotlib.axis import Axis

_POINTS = 60
_HELD_OUT = "#009e73"
_INK = "#1b1f24"


def draw_law(
    path: Path,
    title: str,
    law: Fit,
    runs: Sequence[dict[str, Any]],
    forecasts: Sequence[dict[str, Any]],
    loss: str,
) -> str:
    """Draw measured, fitted and predicted losses over compute; return the file's name."""
    import numpy as np

    figure, [[axis]] = new_panels(1, 1, 7.6, 5.0)
    flops, others = ([run["C"] for run in each] for each in (runs, forecasts))
    if law.law is COMPUTE:
        grid = np.geomspace(0.7 * min(flops + others), 1.5 * max(flops + others), _POINTS)
        curve = law.predict([[each] for each in grid])
        value, low, high = (
            [getattr(each, name) for each in curve] for name in ("value", "low", "high")
        )
        words = f"fit, with its {LEVEL:.0%} interval"
        axis.plot(grid, value, color=COLORS["predicted"], label=words)
        axis.fill_between(grid, low, high, color=COLORS["predicted"], alpha=0.25, linewidth=0)
    else:
        fitted = [run["fitted"] for run in runs]
        axis.scatter(flops, fitted, color=COLORS["predicted"], marker="_", s=90, label="fit")
    losses = [run["loss"] for run in runs]
    axis.scatter(flops, losses, color=COLORS["measured"], s=24, zorder=3, label="fitted runs")
    for place, run in zip(others, forecasts, strict=True):
        axis.plot([place] * 2, [run["low"], run["high"]], color=_HELD_OUT, linewidth=4, alpha=0.4)
    if forecasts:
        predicted = [run["predicted"] for run in forecasts]
        words = f"predicted, {LEVEL:.0%} interval of a run"
        axis.scatter(others, predicted, color=_HELD_OUT, marker="_", s=90, label=words)
        held = [run["loss"] or np.nan for run in forecasts]
        axis.scatter(
            others, held, marker="D", s=30, facecolors="none", edgecolors=_INK, zorder=4,
            label="measured, not fitted",
        )  # fmt: skip
    axis.set(xscale="log", yscale="log", xlabel="C, FLOPs", ylabel=loss.replace("_", " "))
    name_ticks(axis.yaxis, lambda value: f"{value:.3g}")
    axis.legend(frameon=False, fontsize=8)
    save(figure, path, f"{title}: {law.law.formula}")
    return path.name


def draw_isoflop(path: Path, title: str, found: Frontier) -> str:
    """Draw the parabola of each budget, and the best sizes; return the file's name."""
    import matplotlib
    import numpy as np

    figure, [[left, right]] = new_panels(1, 2, 11, 4.6)
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(found.parabolas)))
    for color, each in zip(colors, found.parabolas, strict=True):
        words = f"{each.flops:.2g} FLOPs"
        left.plot(each.variable, each.losses, "o", color=color, markersize=5, label=words)
        grid = np.geomspace(each.variable.min(), each.variable.max(), _POINTS)
        left.plot(grid, np.polyval(each.curve, np.log(grid)), color=color, linewidth=1)
        if each.best is not None:
            left.plot(each.best.value, each.lowest, "*", color=color, markersize=11)
            right.plot(each.flops, each.best.value, "o", color=color)
            right.plot([each.flops] * 2, [each.best.low, each.best.high], color=color)
    if found.exponent is not None and found.factor is not None:
        flops = np.array([each.flops for each in found.parabolas])
        power = found.exponent
        words = f"N = {found.factor:.3g} C^{power.value:.3g} ({power.low:.3g} to {power.high:.3g})"
        right.plot(flops, found.factor * flops**power.value, color=_INK, linewidth=1, label=words)
        right.legend(frameon=False, fontsize=8)
    left.set(xscale="log", xlabel="N, parameters", ylabel="loss")
    left.legend(frameon=False, fontsize=8)
    right.set(xscale="log", yscale="log", xlabel="C, FLOPs", ylabel="best N")
    name_ticks(left.xaxis, counted)
    name_ticks(right.yaxis, counted)
    save(figure, path, f"{title}: IsoFLOP curves")
    return path.name


def name_ticks(side: Axis, form: Callable[[float], str]) -> None:
    """Label a logarithmic axis with a few round numbers."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    low, high = side.get_view_interval()
    is_narrow = high < 8 * low
    side.set_major_locator(MaxNLocator(7) if is_narrow else LogLocator(subs=(1, 2, 5)))
    side.set_minor_locator(NullLocator())
    side.set_major_formatter(lambda value, _: form(value))
