"""Generate texts: the part of ``harness generate`` for decoders that imports no torch."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from harness.compose.generator import Generator, Request
from harness.compose.verb import Result
from harness.config.fields import with_value
from harness.config.parallelism import degrees_in_words
from harness.data.tokenizer import build_tokenizer
from harness.tools.inference.generate.config import GenerateJob
from harness.tools.inference.generate.prompts import read_prompts, require_room
from harness.util.errors import EXIT_OK


class Texts(Generator):
    """Text after each prompt, by decoders."""

    def generate(self, request: Request) -> int | Result:
        job: GenerateJob = request.job
        prompts = read_prompts(job, request.prompts, build_tokenizer(job.tokenizer))
        job = with_value(job, "training.seq_len", require_room(prompts, job))
        streams = not job.wants_json and len(prompts) == 1
        outcome = request.run(job, "harness.tools.inference.generate.rank:generate", prompts, streams)
        if outcome is None:
            return EXIT_OK
        sys.stderr.write(_rates_in_words(outcome))
        return Result(as_dict(job, request.found.path, outcome), "\n" if streams else _texts(outcome))


def _texts(outcome: Any) -> str:
    count = len(outcome.texts)
    return "".join(
        f"--- {text.number + 1} of {count} ({text.ended_by})\n{text.prompt}{text.text}\n"
        for text in outcome.texts
    )


def _rates_in_words(outcome: Any) -> str:
    rates = rates_of(outcome)
    return (
        f"{outcome.prefill_tokens} prompt tokens in {outcome.prefill_seconds:.2f} s "
        f"({_shown(rates['prefill_tokens_per_second'])} tokens/s), {outcome.decode_tokens} more in "
        f"{outcome.decode_seconds:.2f} s ({_shown(rates['decode_tokens_per_second'])} tokens/s); "
        f"weights loaded in {outcome.load_seconds:.1f} s\n"
    )


def _shown(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}"


def rates_of(outcome: Any) -> dict[str, float | None]:
    """Tokens per second of the passes over prompts, and of all later passes; None if nothing was done."""
    return {
        f"{name}_tokens_per_second": tokens / seconds if tokens and seconds else None
        for name, tokens, seconds in (
            ("prefill", outcome.prefill_tokens, outcome.prefill_seconds),
            ("decode", outcome.decode_tokens, outcome.decode_seconds),
        )
    }


def as_dict(job: GenerateJob, path: str, outcome: Any) -> dict[str, Any]:
    """The texts and rates as plain containers."""
    return {
        "checkpoint": path,
        "model": job.model.name,
        "layout": degrees_in_words(job.parallelism.degrees),
        "texts": [dataclasses.asdict(text) for text in outcome.texts],
        "load_seconds": outcome.load_seconds,
        "prefill_seconds": outcome.prefill_seconds,
        "decode_seconds": outcome.decode_seconds,
        **rates_of(outcome),
    }
