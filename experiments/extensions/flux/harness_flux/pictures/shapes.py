"""Pictures of shapes that are drawn by a rule, with captions such as "a red circle above a blue square".

Every picture is a function of the split, the seed and its number. The fraction ``HELD_OUT`` of the
captions with two objects is never drawn for training; the split ``validation`` has only these.
"""

import itertools
from functools import cache
from typing import NamedTuple

import numpy as np

from harness.data.samples import random_stream
from harness.data.tokenizing import is_held_out

COLORS = {
    "red": (220, 30, 40),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 200, 30),
    "magenta": (210, 50, 190),
    "black": (20, 20, 20),
}
"""RGB."""
SHAPES = ("circle", "square", "triangle")
RELATIONS = {"above": (0, -1), "below": (0, 1), "left of": (-1, 0), "right of": (1, 0)}
"""Direction (x, y) from the second object to the first; y points down."""
HELD_OUT = 1 / 8
SINGLE = 0.25
"""Fraction of the training pictures that have one object."""
BACKGROUND = 245
_SUPERSAMPLING = 4


class Caption(NamedTuple):
    """Objects, each a color and a shape, and the relation of the first to the second."""

    objects: tuple[tuple[str, str], ...]
    relation: str | None = None

    def __str__(self) -> str:
        return f" {self.relation} ".join(f"a {color} {shape}" for color, shape in self.objects)


@cache
def captions(split: str) -> tuple[list[Caption], list[Caption]]:
    """Return the captions of a split with one object, and those with two objects of different colors."""
    objects = list(itertools.product(COLORS, SHAPES))
    pairs = [
        Caption((first, second), relation)
        for first, second, relation in itertools.product(objects, objects, RELATIONS)
        if first[0] != second[0]
    ]
    validating = split == "validation"
    kept = [pair for index, pair in enumerate(pairs) if is_held_out(index, HELD_OUT) == validating]
    return [] if validating else [Caption((each,)) for each in objects], kept


class DrawnShapes:
    """Endless pictures of one split, of ``size`` x ``size`` pixels."""

    name = "data.kind=drawn_shapes"
    num_per_epoch: int | None = None

    def __init__(self, split: str, size: int, seed: int) -> None:
        self.identity = [self.name, split, size, seed]
        self._split = split
        self._size = size
        self._seed = seed

    def sample(self, number: int) -> tuple[np.ndarray, str]:
        """Draw a picture; see ``sources.RawSamples``."""
        random = random_stream(f"drawn_shapes {self._split}", self._seed, number)
        singles, pairs = captions(self._split)
        listed = singles if singles and random.uniform() < SINGLE else pairs
        caption = listed[random.randint(len(listed))]
        return draw(caption, self._size, random), str(caption)


def draw(caption: Caption, size: int, random: np.random.RandomState) -> np.ndarray:
    """Draw a caption with random positions and sizes: uint8 of shape (size, size, 3)."""
    side = size * _SUPERSAMPLING
    fine = np.full((side, side, 3), BACKGROUND, dtype=np.float32)
    axis = (np.arange(side) + 0.5) / side
    x, y = np.meshgrid(axis, axis)
    if caption.relation is None:
        centers = [random.uniform(0.3, 0.7, 2)]
        radius = random.uniform(0.2, 0.26)
    else:
        along = np.array(RELATIONS[caption.relation])
        radius = random.uniform(0.17, 0.21)
        across = np.abs(along[::-1])
        centers = [
            0.5
            + sign * 0.24 * along
            + across * random.uniform(-0.2, 0.2)
            + random.uniform(-0.02, 0.02, 2)
            for sign in (1, -1)
        ]
    for (color, shape), (center_x, center_y) in zip(caption.objects, centers, strict=True):
        fine[_inside(shape, x - center_x, y - center_y, radius)] = COLORS[color]
    blocks = fine.reshape(size, _SUPERSAMPLING, size, _SUPERSAMPLING, 3)
    return blocks.mean(axis=(1, 3)).round().astype(np.uint8)


def _inside(shape: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Mask of a shape around the origin."""
    if shape == "circle":
        return x**2 + y**2 <= radius**2
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) <= 0.9 * radius
    # Its base is at the bottom; the sides meet at the top.
    height = (y + 1.1 * radius) / (2 * radius)
    return (height >= 0) & (height <= 1) & (np.abs(x) <= 1.1 * radius * height)
