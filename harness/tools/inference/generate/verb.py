"""``harness generate``: generate text or pictures with the weights of a run or a checkpoint.

Tensor, data and expert parallel generate the same as one process. Text goes to stdout, rates to stderr;
pictures are PNG files.

    harness generate checkpoint=runs/NAME/ID prompt="The parser reads"
    harness generate checkpoint=... prompt=... generate.temperature=0.8 generate.top_p=0.95
    harness generate checkpoint=... generate.prompt_file=prompts.txt --json
    harness generate checkpoint=... prompt=... parallelism=tp parallelism.tp=2
    harness generate checkpoint=runs/flux_debug/ID prompt="a red circle above a blue square"
"""

from __future__ import annotations

from harness.compose.verb import Result, Verb
from harness.contrib.flux import generate as pictures
from harness.model.architecture import architecture_of
from harness.tools.inference.generate import texts
from harness.tools.inference.generate.config import GenerateJob


def generate(job: GenerateJob, overrides: list[str]) -> int | Result:
    """Generate a text after each prompt, or a picture of it."""
    if architecture_of(job.model).batches != "tokens":
        return pictures.generate(job, overrides)
    return texts.generate(job, overrides)


VERB = Verb("generate", generate, job=GenerateJob, has_json=True)
