"""Generate pictures: the part of ``harness generate`` for models that make pictures that imports no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from harness.compose.verb import Result
from harness.config.data import DataConfig
from harness.config.fields import leaves, with_value
from harness.config.job import from_dict
from harness.config.parallelism import degrees_in_words
from harness.tools.inference.generate.config import GenerateJob
from harness.tools.inference.generate.prompts import read_texts
from harness.tools.inference.ranks import is_first, run_on_ranks
from harness.tools.inference.source import use_checkpoint
from harness.util.errors import EXIT_OK
from harness.weights.detect import WeightFolder


def generate(job: GenerateJob, overrides: list[str]) -> int | Result:
    """Generate a picture of each prompt."""
    used = use_checkpoint(job, overrides, "generate.checkpoint", has_text=False)
    prompts = [str(each) for each in read_texts(job)]
    job = with_encoders(used.job, overrides, used.found)
    output = Path(job.generate.pictures.output)
    output.mkdir(parents=True, exist_ok=True)
    outcome = run_on_ranks(job, "harness.contrib.flux.generate_rank:generate", used.found, prompts)
    if not is_first():
        return EXIT_OK
    count = "1 picture" if len(prompts) == 1 else f"{len(prompts)} pictures"
    sys.stderr.write(
        f"{count} of {outcome.size} x {outcome.size} pixels in {outcome.seconds:.1f} s; "
        f"encoders and weights loaded in {outcome.load_seconds:.1f} s\n"
    )
    text = "".join(f"{file}  {prompt}\n" for file, prompt in zip(outcome.files, prompts, strict=True))
    return Result(as_dict(job, used.found.path, prompts, outcome), text)


def with_encoders(job: GenerateJob, overrides: list[str], found: WeightFolder) -> GenerateJob:
    """Return the job with the encoders of training, where overrides do not set them."""
    stored = (found.manifest.get("job") or {}).get("data")
    if not stored:
        return job
    trained: DataConfig = from_dict(DataConfig, stored)
    typed = {each.split("=")[0].lstrip("+~") for each in overrides}
    for name, _, value in leaves(trained.encoders, "data.encoders."):
        if "data" not in typed and name not in typed:
            job = with_value(job, name, value)
    return job


def as_dict(job: GenerateJob, path: str, prompts: list[str], outcome: Any) -> dict[str, Any]:
    """The pictures as plain containers."""
    files = zip(prompts, outcome.files, strict=True)
    return {
        "checkpoint": path,
        "model": job.model.name,
        "layout": degrees_in_words(job.parallelism.degrees),
        "pictures": [{"prompt": prompt, "file": file} for prompt, file in files],
        "size": outcome.size,
        "load_seconds": outcome.load_seconds,
        "seconds": outcome.seconds,
    }
