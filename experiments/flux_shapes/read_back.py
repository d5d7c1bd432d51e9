"""Measure how often pictures of a model follow their captions.

Captions are the held-out ones of ``data=drawn_shapes``, which no training picture had; ``read_shapes.py``
reads the pictures back. Appends a line to results.jsonl and writes sheet.png. Chance is measured with the
same pictures and the captions of others.

    python experiments/flux_shapes/read_back.py runs/flux_shapes/ID --ema
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from read_shapes import Judged, judge

from harness.compose.composer import compose_job
from harness.contrib.flux.pictures.shapes import DrawnShapes, captions
from harness.contrib.flux.sampling import write_sheet
from harness.tools.inference.generate import GenerateJob, generate

HERE = Path(__file__).parent


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
        result = generate(compose_job(overrides, config_name="generate", schema=GenerateJob), overrides)
        assert not isinstance(result, int)
        return [np.asarray(Image.open(each["file"])) for each in result.data["pictures"]]


def shares(judged: list[Judged]) -> dict[str, float]:
    """Share of the pictures that follow each part of their captions."""
    return {name: float(np.mean([getattr(each, name) for each in judged])) for name in Judged._fields}


def main() -> None:
    typed = parsed()
    prompts = [str(caption) for caption in captions("validation")[1]]
    pictures = pictures_of(typed, prompts)
    others = np.random.default_rng(0).permutation(len(prompts))
    # The reader's own errors: pictures of the rule, of the same size.
    rule = DrawnShapes("validation", len(pictures[0]), seed=1)
    drawn = [rule.read(number, number) for number in range(len(prompts))]
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
