"""Generate pictures: the part of ``harness generate`` for models that make pictures that imports no torch."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from harness.compose.generator import Generator, Request
from harness.compose.verb import Result
from harness.config.fields import with_value
from harness.config.job import Job
from harness.config.parallelism import degrees_in_words
from harness.contrib.flux.config import SamplingConfig
from harness.contrib.flux.pictures.config import EncodersConfig
from harness.util.errors import EXIT_OK
from harness.util.words import plural
from harness.weights.detect import WeightFolder


class Pictures(Generator):
    """A picture of each prompt."""

    has_text = False
    options = SamplingConfig
    ignores = (
        "chat",
        "max_new_tokens",
        "temperature",
        "top_k",
        "top_p",
        "stop",
        "stop_at_end",
    )

    def generate(self, request: Request) -> int | Result:
        prompts = [str(each) for each in request.prompts]
        found = request.found
        job = with_encoders(request.job, request.overrides, found)
        output = Path(job.generate.options["output"])
        output.mkdir(parents=True, exist_ok=True)
        outcome = request.run(job, "harness.contrib.flux.sampling:generate", found, prompts)
        if outcome is None:
            return EXIT_OK
        sys.stderr.write(
            f"{plural(len(prompts), 'picture')} of {outcome.size} x {outcome.size} pixels in "
            f"{outcome.seconds:.1f} s; encoders and weights loaded in {outcome.load_seconds:.1f} s\n"
        )
        text = "".join(
            f"{file}  {prompt}\n" for file, prompt in zip(outcome.files, prompts, strict=True)
        )
        return Result(as_dict(job, found.path, prompts, outcome), text)


def with_encoders(job: Any, overrides: list[str], found: WeightFolder) -> Any:
    """Return the job with the encoders of training, where overrides do not set them."""
    data = (found.manifest.get("job") or {}).get("data") or {}
    trained = data.get("options", {})
    typed = {each.split("=")[0].lstrip("+~") for each in overrides}
    for name in (each.name for each in fields(EncodersConfig)):
        option = f"data.options.{name}"
        if name in trained and "data" not in typed and option not in typed:
            job = with_value(job, option, trained[name])
    return job


def as_dict(job: Job, path: str, prompts: list[str], outcome: Any) -> dict[str, Any]:
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
