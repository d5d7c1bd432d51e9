"""Judge the activations of several widths: do they follow a power of the width?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.tools.study.coordcheck.measure import LOGITS, Activation

STEADY, GROWS, VANISHES, UNDEFINED = "steady", "grows", "vanishes", "undefined"
OF_LOGITS = 0.5
"""Exponent of the inverse power of the width that a change of logits may follow."""


@dataclass(frozen=True)
class Verdict:
    """How the activations of a module depend on the width.

    Attributes:
        module: its name.
        kind: what it is.
        slope: largest exponent, over all steps, of the power of the width that the activations follow.
        step: the step that has it.
        change_slope: that exponent for the change since step 0, after the last step.
        word: ``steady``, ``grows``, ``vanishes``, or ``undefined`` if a value is 0 or not finite.
    """

    module: str
    kind: str
    slope: float
    step: int
    change_slope: float
    word: str


def judge(activations: Sequence[Activation], bound: float) -> list[Verdict]:
    """Compare the exponents of every module with the bound.

    The activations, and their change during training, must not grow with the width. The change must not
    vanish either: then a wide model would learn no features. Activations before training may vanish. In muP
    the initial logits are proportional to the inverse root of the width (arXiv:2203.03466, appendix D.2), and
    so is the part of their change that updates of other tokens cause; their change may therefore vanish as
    that root.
    """
    by_module: dict[str, list[Activation]] = {}
    for each in activations:
        by_module.setdefault(each.module, []).append(each)
    return [_judged(of_module, bound) for of_module in by_module.values()]


def _judged(activations: Sequence[Activation], bound: float) -> Verdict:
    last = max(each.step for each in activations)
    slopes = {
        step: slope((each.width, each.rms) for each in activations if each.step == step)
        for step in range(last + 1)
    }
    change = slope((each.width, each.change) for each in activations if each.step == last)
    # NaN, from values that have no logarithm, counts as the largest.
    step = max(slopes, key=lambda step: (math.isnan(slopes[step]), slopes[step]))
    if math.isnan(slopes[step]) or math.isnan(change):
        word = UNDEFINED
    elif max(slopes[step], change) > bound:
        word = GROWS
    else:
        lowest = -bound - (OF_LOGITS if activations[0].kind in LOGITS else 0.0)
        word = VANISHES if change < lowest else STEADY
    return Verdict(activations[0].module, activations[0].kind, slopes[step], step, change, word)


def slope(points: Iterable[tuple[float, float]]) -> float:
    """Exponent of the power law through points (x, y), by least squares of logarithms.

    NaN if a y is not a positive finite number.
    """
    pairs = list(points)
    if not all(0 < y < math.inf for _, y in pairs):
        return math.nan
    xs, ys = zip(*((math.log(x), math.log(y)) for x, y in pairs), strict=True)
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    products = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return products / sum((x - mean_x) ** 2 for x in xs)
