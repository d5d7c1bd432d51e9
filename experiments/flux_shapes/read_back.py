"""Measure how often pictures of a model follow their captions.

Captions are the held-out ones of ``data=drawn_shapes``, which no training picture had; the objects are
read back from the pictures: colors by hue, shapes by area, positions by center. Appends a line to
results.jsonl and writes sheet.png. Chance is measured with the same pictures and the captions of others.

    python experiments/flux_shapes/read_back.py runs/flux_shapes/ID --ema
"""

from __future__ import annotations

import argparse
import colorsys
import json
import platform
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from harness.compose.composer import compose_job
from harness.tools.inference.generate import GenerateJob, generate
from harness_flux.pictures.shapes import DrawnShapes, captions
from harness_flux.sampling import write_sheet

HERE = Path(__file__).parent
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
            names[at] = min(
                HUES, key=lambda name: min(abs(hue - HUES[name]), 1 - abs(hue - HUES[name]))
            )
    return names


def largest_region(mask: np.ndarray) -> np.ndarray:
    """The largest set of neighbouring pixels of a mask."""
    left, best = (
        {(int(y), int(x)) for y, x in zip(*np.nonzero(mask), strict=True)},
        set[tuple[int, int]](),
    )
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
        found.append(
            Seen(color, shape_of(mask), xs.mean() / width, ys.mean() / height, int(mask.sum()))
        )
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


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    run: str
    steps: int
    cfg: float
    ema: bool


def parsed() -> Arguments:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", help="run folder, or a checkpoint")
    parser.add_argument("--steps", type=int, default=28, help="Euler steps")
    parser.add_argument("--cfg", type=float, default=1.0, help="weight of classifier-free guidance")
    parser.add_argument("--ema", action="store_true", help="use the moving average of the weights")
    return Arguments(**vars(parser.parse_args()))


def pictures_of(typed: Arguments, prompts: list[str]) -> list[np.ndarray]:
    """Generate a picture of each prompt as ``harness generate`` does."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            *(f"generate.checkpoint={typed.run}", "model=from_config", "cluster.device=cpu"),
            *(f"generate.prompts={json.dumps(prompts)}", f"generate.options.output={folder}"),
            *(f"generate.options.steps={typed.steps}", f"generate.options.cfg={typed.cfg}"),
            *("generate.batch_size=70", f"ema={str(typed.ema).lower()}"),
        ]
        result = generate(
            compose_job(overrides, config_name="generate", schema=GenerateJob), overrides
        )
        assert not isinstance(result, int)
        return [np.asarray(Image.open(each["file"])) for each in result.data["pictures"]]


def shares(judged: list[Judged]) -> dict[str, float]:
    """Share of the pictures that follow each part of their captions."""
    return {
        name: float(np.mean([getattr(each, name) for each in judged])) for name in Judged._fields
    }


def main() -> None:
    typed = parsed()
    prompts = [str(caption) for caption in captions("validation")[1]]
    pictures = pictures_of(typed, prompts)
    others = np.random.default_rng(0).permutation(len(prompts))
    # The reader's own errors: pictures of the rule, of the same size.
    rule = DrawnShapes("validation", len(pictures[0]), seed=1)
    drawn = [rule.sample(number) for number in range(len(prompts))]
    row = {
        "date": date.today().isoformat(),
        "checkpoint": Path(typed.run).name,
        "pictures": len(pictures),
        "steps": typed.steps,
        "cfg": typed.cfg,
        "ema": typed.ema,
        "follows": shares([judge(*each) for each in zip(pictures, prompts, strict=True)]),
        "chance": shares([judge(pictures[i], prompts[other]) for i, other in enumerate(others)]),
        "drawn": shares([judge(*each) for each in drawn]),
        "torch": torch.__version__,
        "machine": f"{platform.machine()} CPU",
    }
    with (HERE / "results.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    shown = [int(i) for i in np.linspace(0, len(prompts) - 1, 24)]
    write_sheet(HERE / "sheet.png", [pictures[i] for i in shown], [prompts[i] for i in shown])
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
