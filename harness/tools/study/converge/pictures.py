"""Plots of a comparison: loss curves with the band of the control's seeds, and paired differences."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from pathlib import Path

import numpy as np

from harness.tools.study.converge.config import ConvergeConfig
from harness.tools.study.converge.judge import EQUAL, Curves, Losses
from harness.util.plots import COLORS, new_figure, save

CURVES, DIFFERENCES = "curves.png", "differences.png"
_COLUMNS, _WIDTH, _HEIGHT = 4, 2.7, 1.5
_STYLES = ("-", "--", ":", "-.")
"""Styles of lines; each has ten colours."""


def draw_curves(
    path: Path, control: Curves, techniques: Mapping[str, Curves], config: ConvergeConfig
) -> None:
    """Plot each technique's mean curve over the control's, whose band is the range of its seeds."""
    figure = new_figure(9, 5)
    axis = figure.subplots()
    band = [smoothed(each, config.smooth_steps) for each in control.losses.values()]
    axis.fill_between(
        control.steps,
        np.min(band, axis=0),
        np.max(band, axis=0),
        color="#dddddd",
        label="control, range of seeds",
    )
    for number, (name, curves) in enumerate(techniques.items()):
        mean = np.mean([smoothed(each, config.smooth_steps) for each in curves.losses.values()], axis=0)
        axis.plot(
            control.steps, mean, linewidth=0.8, linestyle=_STYLES[number // 10 % len(_STYLES)], label=name
        )
    axis.plot(
        control.steps, np.mean(band, axis=0), color="black", linewidth=1.2, linestyle="--", label="control"
    )
    axis.set(xlabel="step", ylabel=f"loss, nats per token, mean of {config.smooth_steps} steps", yscale="log")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    axis.yaxis.set_minor_formatter(lambda value, _: f"{value:.3g}")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize=7)
    save(figure, path)


def draw_differences(
    path: Path,
    control: Curves,
    techniques: Mapping[str, Curves],
    words: Mapping[str, str],
    config: ConvergeConfig,
) -> None:
    """Plot the relative difference from the control, paired by seed: mean and range of seeds."""
    rows = ceil(len(techniques) / _COLUMNS)
    figure = new_figure(_COLUMNS * _WIDTH, rows * _HEIGHT + 0.4)
    panels = figure.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False)
    for axis, (name, curves) in zip(panels.flat, techniques.items(), strict=False):
        apart = [
            100 * smoothed(losses / control.losses[seed] - 1, config.smooth_steps)
            for seed, losses in curves.losses.items()
        ]
        word = words[name]
        color = COLORS["predicted"] if word == EQUAL else COLORS["measured"]
        axis.axhspan(-100 * config.final_bound, 100 * config.final_bound, color="#eeeeee", linewidth=0)
        axis.fill_between(
            control.steps, np.min(apart, axis=0), np.max(apart, axis=0), color=color, alpha=0.3, linewidth=0
        )
        axis.plot(control.steps, np.mean(apart, axis=0), color=color, linewidth=1)
        axis.axhline(0, color="black", linewidth=0.5)
        axis.set_title(f"{name}: {word}", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in panels.flat[len(techniques) :]:
        axis.set_visible(False)
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("difference from the control, %", fontsize=8)
    save(figure, path)


def smoothed(values: Losses, steps: int) -> Losses:
    """Mean of the last ``steps`` values at every step; of fewer at the start."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - steps, 0)
    mean: Losses = (sums[ends] - sums[starts]) / (ends - starts)
    return mean
