"""Read the objects back from a picture: colors by hue, shapes by area, positions by center.

Knows the names of colors, shapes and relations, and nothing of the code that draws them.
"""

from __future__ import annotations

import colorsys
from typing import NamedTuple

import numpy as np

HUES = {"red": 0.0, "yellow": 0.13, "green": 0.38, "blue": 0.64, "magenta": 0.85}
"""Center of each color's hue, in [0, 1)."""
LEAST_PIXELS = 0.02
"""Smallest object, as a fraction of the picture."""


class Seen(NamedTuple):
    """An object in a picture; x and y are in [0, 1], y points down."""

    color: str
    shape: str
    x: float
    y: float
    pixels: int


def colors_of(picture: np.ndarray) -> np.ndarray:
    """Name of each pixel's color, '' for the background; the picture is uint8 of shape (H, W, 3)."""
    names = np.full(picture.shape[:2], "", dtype=object)
    for at in np.ndindex(*names.shape):
        hue, saturation, value = colorsys.rgb_to_hsv(*(picture[at] / 255))
        if value < 0.4 and saturation < 0.6:
            names[at] = "black"
        elif saturation > 0.5:
            names[at] = min(HUES, key=lambda name: min(abs(hue - HUES[name]), 1 - abs(hue - HUES[name])))
    return names


def largest_region(mask: np.ndarray) -> np.ndarray:
    """The largest set of neighbouring pixels of a mask."""
    left, best = {(int(y), int(x)) for y, x in zip(*np.nonzero(mask), strict=True)}, set[tuple[int, int]]()
    while left:
        region, edge = set(), [left.pop()]
        while edge:
            y, x = edge.pop()
            region.add((y, x))
            for near in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
                if near in left:
                    left.remove(near)
                    edge.append(near)
        best = max(best, region, key=len)
    found = np.zeros_like(mask)
    for at in best:
        found[at] = True
    return found


def shape_of(mask: np.ndarray) -> str:
    """Shape of a region, by the share of its bounding box that it fills, and of the box's upper half.

    A square fills its box; a circle pi / 4 of it, in both halves alike; a triangle half, most of it below.
    """
    ys, xs = np.nonzero(mask)
    box = mask[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1]
    half = len(box) // 2
    upper, lower = box[:half].mean() if half else 1.0, box[-half:].mean() if half else 1.0
    if lower - upper > 0.25:
        return "triangle"
    corners = np.mean([box[0, 0], box[0, -1], box[-1, 0], box[-1, -1]])
    return "square" if corners > 0.5 or box.mean() > 0.92 else "circle"


def read(picture: np.ndarray) -> list[Seen]:
    """Return the objects of a picture, the largest first."""
    colors, found = colors_of(picture), []
    for color in (*HUES, "black"):
        mask = largest_region(colors == color)
        if mask.mean() < LEAST_PIXELS:
            continue
        ys, xs = np.nonzero(mask)
        height, width = mask.shape
        found.append(Seen(color, shape_of(mask), xs.mean() / width, ys.mean() / height, int(mask.sum())))
    return sorted(found, key=lambda each: -each.pixels)


class Judged(NamedTuple):
    """Which parts of a caption a picture follows."""

    colors: bool
    shapes: bool
    relation: bool
    all: bool


def judge(picture: np.ndarray, caption: str) -> Judged:
    """Compare a picture with a caption such as ``a red circle above a blue square``.

    ``colors``: exactly these colors; ``shapes``: also the shape of each; ``relation``: the centers of the
    objects of these colors are in this relation.
    """
    words = caption.split()
    relation = next((each for each in ("above", "below", "left", "right") if each in words), None)
    at = words.index(relation) if relation else len(words)
    wanted = [words[at - 2 : at]] + ([words[-2:]] if relation else [])
    seen = {each.color: each for each in read(picture)}
    colors = set(seen) == {color for color, _ in wanted}
    shapes = all(color in seen and seen[color].shape == shape for color, shape in wanted)
    related = relation is None
    if relation and all(color in seen for color, _ in wanted):
        first, second = (seen[color] for color, _ in wanted)
        x, y = first.x - second.x, first.y - second.y
        direction = {"above": (0, -1), "below": (0, 1), "left": (-1, 0), "right": (1, 0)}[relation]
        along = x * direction[0] + y * direction[1]
        related = along > max(0.1, abs(x if direction[0] == 0 else y))
    return Judged(colors, shapes, related, colors and shapes and related)
