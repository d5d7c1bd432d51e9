"""Generate pictures: the part of ``harness generate`` for models that make pictures that imports no torch."""

import sys
from pathlib import Path
from typing import Any

from harness.compose.generator import Generator, Request
from harness.compose.verb import Result
from harness.config.fields import with_value
from harness.config.parallelism import degrees_in_words
from harness.util.errors import EXIT_OK
from harness.util.words import plural
from harness_flux.config import SamplingConfig

ENCODERS = ("autoencoder", "patch", "text", "t5", "clip", "text_length", "width", "dtype")
"""The options of data that say how pictures and captions are encoded."""


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
        job: Any = request.job
        # The encoders of training, where overrides do not set them.
        data = (found.manifest.get("job") or {}).get("data") or {}
        trained = data.get("options", {})
        typed = {each.split("=")[0].lstrip("+~") for each in request.overrides}
        for name in ENCODERS:
            option = f"data.options.{name}"
            if name in trained and "data" not in typed and option not in typed:
                job = with_value(job, option, trained[name])
        output = Path(job.generate.options["output"])
        output.mkdir(parents=True, exist_ok=True)
        outcome = request.run(job, "harness_flux.sampling:generate", found, prompts)
        if outcome is None:
            return EXIT_OK
        size = outcome["size"]
        sys.stderr.write(
            f"{plural(len(prompts), 'picture')} of {size} x {size} pixels in {outcome['seconds']:.1f} s; "
            f"encoders and weights loaded in {outcome['load_seconds']:.1f} s\n"
        )
        text = "".join(f"{each['file']}  {each['prompt']}\n" for each in outcome["pictures"])
        about = {
            "checkpoint": found.path,
            "model": job.model.name,
            "layout": degrees_in_words(job.parallelism.degrees),
        }
        return Result(about | outcome, text)
