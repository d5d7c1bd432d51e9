"""``harness generate``: generate text with the weights of a run or a checkpoint.

Tensor, data and expert parallel generate the same as one process. Text goes to stdout, rates to stderr.
Models of other architectures make what their ``Generator`` says.

    harness generate checkpoint=runs/NAME/ID prompt="The parser reads"
    harness generate checkpoint=... prompt=... generate.temperature=0.8 generate.top_p=0.95
    harness generate checkpoint=... generate.prompt_file=prompts.txt --json
    harness generate checkpoint=... prompt=... parallelism=tp parallelism.tp=2
"""

from __future__ import annotations

from typing import Any

from harness.compose.generator import Request, generator_of
from harness.compose.verb import Result, Verb
from harness.config.job import Job
from harness.tools.inference.generate.config import GenerateJob
from harness.tools.inference.generate.prompts import read_texts
from harness.tools.inference.ranks import is_first, run_on_ranks
from harness.tools.inference.source import use_checkpoint


def generate(job: GenerateJob, overrides: list[str]) -> int | Result:
    """Generate the answer of the architecture's models to each prompt."""
    generator = generator_of(job.model)
    used = use_checkpoint(job, overrides, "generate.checkpoint", has_text=generator.has_text)

    def run(job: Job, function: str, *arguments: Any) -> Any:
        on_rank = "harness.tools.inference.model:with_model"
        result = run_on_ranks(job, on_rank, function, used.found, *arguments)
        return result if is_first() else None

    return generator.generate(Request(used.job, overrides, used.found, read_texts(used.job), run))


VERB = Verb("generate", generate, job=GenerateJob, has_json=True)
