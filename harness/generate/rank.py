"""One rank of a generation: load the weights, generate for its prompts, show the text."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from harness.convert import WeightFolder
from harness.data.tokenizer import build_tokenizer
from harness.generate.config import GenerateJob
from harness.generate.decode import generate_batch
from harness.generate.prompts import Prompt
from harness.generate.sampling import Sampler
from harness.generate.text import TextStream
from harness.inference.model import InferenceModel
from harness.loop.setup import backend_of

# Reasons why a text ended.
LENGTH, END, STOP = "length", "end", "stop"


@dataclass
class Generated:
    """The text after one prompt."""

    number: int
    prompt: str
    prompt_tokens: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    ended_by: str = LENGTH


@dataclass
class Outcome:
    """What one rank generated, and its durations in seconds."""

    texts: list[Generated]
    load_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0


def generate(job: GenerateJob, found: WeightFolder, prompts: Sequence[Prompt], *, show: bool) -> list[Outcome]:
    """Generate on this rank of a process group.

    Args:
        job: the resolved job; training.seq_len is the longest sequence.
        found: the weights.
        prompts: all prompts.
        show: whether to print texts: while they are generated if there is one, else when a batch is complete.

    Returns:
        The outcome of each rank, on all ranks.
    """
    started = time.perf_counter()
    model = InferenceModel(job, torch.device(*_device()))
    model.load(found)
    model.part.use_cache(job.training.seq_len)
    outcome = Outcome([], load_seconds=time.perf_counter() - started)
    replicas, first = job.parallelism.data_parallel, model.mesh.rank("tp") == 0
    size = job.generate.batch_size
    numbered = list(enumerate(prompts))
    shows = show and first and len(prompts) == 1 and model.mesh.data_rank == 0
    for start in range(0, len(numbered), size * replicas):
        batch = numbered[start : start + size * replicas]
        mine = batch[model.mesh.data_rank :: replicas]
        # Every rank takes part in every pass: one without a prompt of its own repeats the first.
        made = _generate(model, mine or batch[:1], outcome, show=shows)
        outcome.texts += made if mine and first else []
    return model.ranks.gather(outcome)
