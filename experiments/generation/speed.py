"""Compare the speed of generation with transformers' ``generate``, on this machine's CPU.

    python experiments/generation/speed.py [--rounds N] [--threads N]

A Llama of 30 million parameters with random weights, float32, eager attention in transformers, prompts of 128
tokens, 128 new tokens, greedy. Both run in one process and in turn; a ratio is taken within a round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from harness.compose.composer import compose_job
from harness.config.fields import with_value
from harness.model.decoder import Decoder
from harness.parallelism.materialize import materialize
from harness.tools.inference.generate.config import GenerateJob
from harness.tools.inference.generate.decode import generate_batch
from harness.tools.inference.generate.sampling import Sampler
from harness.tools.inference.model import InferenceModel
from harness.train.setup import process_group
from harness.util.tables import Table, to_markdown
from harness.weights.detect import find_source
from harness.weights.huggingface import write_huggingface
from harness.weights.source import TensorFacts

PROMPT, NEW, SEED = 128, 128, 0
MODEL = [
    *("model=llama3_debug", "model.dim=512", "model.n_layers=8", "model.n_heads=8", "model.n_kv_heads=8"),
    *("model.ffn_hidden_dim=1408", "model.vocab_size=4096", "model.max_seq_len=512"),
]
CPU = torch.device("cpu")


class Weights:
    """A decoder's weights as a source of a conversion."""

    def __init__(self, decoder: Decoder) -> None:
        self.values = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
        self.tensors: Mapping[str, TensorFacts] = {
            name: TensorFacts(tuple(t.shape), t.dtype) for name, t in self.values.items()
        }

    def read(self, name: str) -> Tensor:
        return self.values[name].clone()


@dataclass(frozen=True)
class Run:
    """Seconds of the pass over the prompts and of all later passes, and the new tokens."""

    prefill: float
    decode: float
    tokens: list[list[int]]


def ours(model: InferenceModel, prompts: list[list[int]]) -> Run:
    """Generate with the harness."""
    made: list[list[int]] = [[] for _ in prompts]

    def add(row: int, token: int) -> bool:
        made[row].append(token)
        return True

    model.part.use_cache(PROMPT + NEW)
    timing = generate_batch(model, prompts, Sampler(0.0, None, 1.0, SEED, range(len(prompts))), NEW, add)
    return Run(timing.prefill, timing.decode, made)


def theirs(model: Any, prompts: list[list[int]]) -> Run:
    """Generate with transformers; the first pass is timed by a generation of one token."""
    tokens = torch.tensor(prompts)
    options = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "pad_token_id": 0}
    started = time.perf_counter()
    model.generate(tokens, max_new_tokens=1, **options)
    first = time.perf_counter() - started
    started = time.perf_counter()
    made = model.generate(tokens, max_new_tokens=NEW, **options)
    return Run(first, time.perf_counter() - started - first, made[:, PROMPT:].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    typed = parser.parse_args()
    torch.set_num_threads(typed.threads)
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hf"
        model = compose_job(MODEL).model
        with torch.device("meta"):
            decoder = Decoder(model, PROMPT + NEW)
        materialize(decoder, SEED, CPU, CPU)
        count = sum(parameter.numel() for parameter in decoder.parameters())
        write_huggingface(Weights(decoder), model, None, path)
        given = [f"checkpoint={path}", "tokenizer=bytes", "cluster.device=cpu"]
        job = compose_job(given, config_name="generate", schema=GenerateJob)
        job = with_value(job, "training.seq_len", PROMPT + NEW)
        other = transformers.AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="eager", dtype=torch.float32
        ).eval()
        with process_group(job, CPU):
            own = InferenceModel(job, CPU)
            own.load(find_source(str(path)))
            rows = [
                row for size in (1, 8) for row in measure(own, other, size, typed.rounds, model.vocab_size)
            ]
    print(
        f"{count / 1e6:.1f} M parameters, prompts of {PROMPT} tokens, {NEW} new, float32, "
        f"{typed.threads} threads, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{typed.rounds} rounds\n"
    )
    headings = ("prompts", "pass", "harness, tokens/s", "transformers, tokens/s", "ratio", "range")
    print(to_markdown(Table.of_cells(headings, rows, right=range(2, 5))))


def measure(own: InferenceModel, other: Any, size: int, rounds: int, vocabulary: int) -> list[list[str]]:
    """Rows of the table for one number of prompts."""
    generator = torch.Generator().manual_seed(SEED)
    prompts = torch.randint(vocabulary, (size, PROMPT), generator=generator).tolist()
    pairs = []
    for number in range(rounds + 1):
        order = (lambda: ours(own, prompts), lambda: theirs(other, prompts))
        first, second = (call() for call in (order if number % 2 else order[::-1]))
        pair = (first, second) if number % 2 else (second, first)
        if pair[0].tokens != pair[1].tokens:
            raise SystemExit("the tokens differ")
        if number:
            pairs.append(pair)
    rows = []
    for name, tokens in (("prefill", size * PROMPT), ("decode", size * (NEW - 1))):
        seconds = [(getattr(a, name), getattr(b, name)) for a, b in pairs]
        ratios = sorted(b / a for a, b in seconds)
        rates = [tokens / statistics.median(side) for side in zip(*seconds, strict=True)]
        rows.append(
            [
                *(str(size), name, *(f"{rate:,.0f}" for rate in rates), f"{statistics.median(ratios):.2f}"),
                f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            ]
        )
    return rows


if __name__ == "__main__":
    main()
