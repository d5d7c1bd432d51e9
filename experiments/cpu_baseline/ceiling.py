"""Where a training step's time goes on a CPU, beside the matrix products that it cannot do without.

    python experiments/cpu_baseline/ceiling.py --rounds 5

A round times a step of the shape of shape.yaml in one process, then its parts alone, with the same
threads and sizes: the products of all linears, forward and backward; attention; the loss; clipping and
the update. The rest is norms, rotations, gates, sums, the embedding, and the loop. Prints the median and
range of each share over the rounds, and the rates of step and products in GFLOP/s.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.data.tokenizer import build_tokenizer
from harness.model.accounting import account
from harness.model.spec import block_tensors
from harness.train.engine import Engine
from harness.train.objective import loader_of
from harness.train.setup import process_group, set_up_process

WARMUP_STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    job = compose_job(["experiment=cpu_baseline/shape", "cluster.device=cpu"])
    set_up_process(job)
    device = torch.device("cpu")
    with process_group(job, device):
        engine = Engine(job, device)
        loader = loader_of(job, build_tokenizer(job.tokenizer), engine.rows)
        parts = {"products": products(job), "attention": attention(job), "loss": loss(job)}
        times: dict[str, list[float]] = {name: [] for name in ("step", "update", *parts)}
        for number in range(WARMUP_STEPS + rounds):
            batch = loader.next()
            started = time.perf_counter()
            outcome = engine.gradients(batch)
            updated = time.perf_counter()
            engine.update(outcome.norm)
            ended = time.perf_counter()
            found = {"step": ended - started, "update": ended - updated}
            found |= {name: seconds_of(part) for name, part in parts.items()}
            for name, seconds in found.items() if number >= WARMUP_STEPS else ():
                times[name].append(seconds)
    steps = times.pop("step")
    shares = {name: [a / b for a, b in zip(times[name], steps, strict=True)] for name in times}
    shares["rest"] = [1 - sum(each) for each in zip(*shares.values(), strict=True)]
    for name, each in shares.items():
        low, high = min(each), max(each)
        print(f"{name:<10} {statistics.median(each):6.1%}  ({low:.1%} to {high:.1%})")
    tokens = job.global_batch_size * job.training.seq_len
    flops = account(job.model, job.training.seq_len).flops_per_token_full * tokens
    alone = product_flops(job) / statistics.median(times["products"])
    print(f"step {flops / statistics.median(steps) / 1e9:.0f} GFLOP/s of the model's FLOPs")
    print(f"products alone {alone / 1e9:.0f} GFLOP/s, {torch.get_num_threads()} threads")


def seconds_of(part: Callable[[], None]) -> float:
    started = time.perf_counter()
    part()
    return time.perf_counter() - started


def linears(job: Job) -> list[tuple[int, int]]:
    """Widths, outputs and inputs, of all products of a step; queries, keys and values are one."""
    model = job.model
    found = []
    for layer in range(model.n_layers):
        matrices = [tensor for tensor in block_tensors(model, layer) if tensor.is_matrix]
        joined = [each for each in matrices if each.module.endswith((".wq", ".wk", ".wv"))]
        found.append((sum(each.outputs for each in joined), joined[0].inputs))
        found += [(each.outputs, each.inputs) for each in matrices if each not in joined]
    return [*found, (model.vocab_size, model.dim)]


def product_flops(job: Job) -> float:
    tokens = job.global_batch_size * job.training.seq_len
    return 6.0 * tokens * sum(outputs * inputs for outputs, inputs in linears(job))


def products(job: Job) -> Callable[[], None]:
    """Every product of a step, forward and backward, on tensors that are there already."""
    tokens = job.global_batch_size * job.training.seq_len
    shapes = linears(job)
    # As many weights as the model has, so that they come from memory and not from a cache.
    weights = [torch.randn(shape) for shape in shapes]
    inputs = {width: torch.randn(tokens, width) for width in {n for shape in shapes for n in shape}}

    def run() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)
        for weight in reversed(weights):
            gradient = inputs[weight.shape[0]]
            torch.mm(gradient, weight)
            torch.mm(gradient.T, inputs[weight.shape[1]])

    return run


def attention(job: Job) -> Callable[[], None]:
    model = job.model
    batch = job.global_batch_size
    length = job.training.seq_len

    def heads(number: int) -> Tensor:
        return torch.randn(batch, number, length, model.head_width, requires_grad=True)

    q, k, v = heads(model.n_heads), heads(model.n_kv_heads), heads(model.n_kv_heads)

    def run() -> None:
        for _ in range(model.n_layers):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            torch.autograd.grad(out.sum(), [q, k, v])

    return run


def loss(job: Job) -> Callable[[], None]:
    tokens = job.global_batch_size * job.training.seq_len
    logits = torch.randn(tokens, job.model.vocab_size, requires_grad=True)
    labels = torch.randint(job.model.vocab_size, (tokens,))

    def run() -> None:
        torch.autograd.grad(F.cross_entropy(logits, labels), logits)

    return run


if __name__ == "__main__":
    main()
