"""A Llama and its training loop as one would write them by hand: what a framework must not be slower than.

    python experiments/cpu_baseline/bare_loop.py --compile --output out.json
    python experiments/cpu_baseline/bare_loop.py --device cuda --compile --steps 12 --output out.json \\
        --shape '{"dim": 4096, "layers": 8, ...}'

Plain PyTorch, one process, nothing of the harness: random tokens, fused AdamW with a schedule, gradients
clipped. Without ``--shape`` it is the shape of shape.yaml. On a CPU it computes in float32 and reads the loss
every step. On a GPU parameters, gradients and AdamW's moments are all bfloat16, no activation is recomputed,
and the host waits for the device before the first step that counts and after the last one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WARMUP_STEPS = 2


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of its batches; as it is, those of shape.yaml."""

    dim: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    head_width: int = 64
    ffn_hidden: int = 1536
    """Width of the feed-forward, or of an expert."""
    vocabulary: int = 8192
    batch: int = 4
    seq_len: int = 512
    is_tied: bool = False
    """Whether the output multiplies by the embedding's table."""
    has_qk_norm: bool = False
    experts: int = 0
    """Experts in the place of each feed-forward; 0: none."""
    top_k: int = 0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Experts(nn.Module):
    """The ``top_k`` best of many SwiGLUs for each token, by grouped products."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.router = nn.Linear(shape.dim, shape.experts, bias=False)
        inner = shape.experts, shape.ffn_hidden, shape.dim
        outer = shape.experts, shape.dim, shape.ffn_hidden
        self.w1 = nn.Parameter(torch.empty(inner))
        self.w3 = nn.Parameter(torch.empty(inner))
        self.w2 = nn.Parameter(torch.empty(outer))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1, dtype=torch.float32).topk(self.top_k)
        weights = (weights / weights.sum(-1, keepdim=True)).type_as(x).flatten()
        experts, order = chosen.flatten().sort()
        numbers = torch.arange(len(self.w1), device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True).int()
        rows = tokens[order // self.top_k]
        gate = F.grouped_mm(rows, self.w1.mT, offs=ends)
        h = F.silu(gate) * F.grouped_mm(rows, self.w3.mT, offs=ends)
        out = F.grouped_mm(h, self.w2.mT, offs=ends) * weights[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, order // self.top_k, out).view_as(x)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.dim, shape.ffn_hidden, bias=False)
        self.w2 = nn.Linear(shape.ffn_hidden, shape.dim, bias=False)
        self.w3 = nn.Linear(shape.dim, shape.ffn_hidden, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(h)) * self.w3(h))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        dim, self.width = shape.dim, shape.head_width
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.wq = nn.Linear(dim, shape.heads * self.width, bias=False)
        self.wk = nn.Linear(dim, shape.kv_heads * self.width, bias=False)
        self.wv = nn.Linear(dim, shape.kv_heads * self.width, bias=False)
        self.wo = nn.Linear(shape.heads * self.width, dim, bias=False)
        normalized = shape.has_qk_norm
        self.q_norm = nn.RMSNorm(self.width, eps=1e-6) if normalized else nn.Identity()
        self.k_norm = nn.RMSNorm(self.width, eps=1e-6) if normalized else nn.Identity()
        self.feed_forward = Experts(shape) if shape.experts else FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = batch, length, -1, self.width
        h = self.attention_norm(x)
        q = rotate(self.q_norm(self.wq(h).view(heads)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.wk(h).view(heads)).transpose(1, 2), cos, sin)
        v = self.wv(h).view(heads).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(attended.transpose(1, 2).reshape(batch, length, -1))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.output = nn.Linear(shape.dim, shape.vocabulary, bias=False)
        if shape.is_tied:
            self.output.weight = self.embedding.weight
        width = shape.head_width
        frequencies = 500000.0 ** -(torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(shape.seq_len), frequencies)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.output(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.float(), labels.flatten())


def build(shape: Shape, *, device: str = "cpu", float8: str | None = None) -> Llama:
    """The model; on a GPU in bfloat16, and with products of its blocks by a recipe of torchao's float8."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(shape)
    if device != "cpu":
        model.bfloat16()
    if float8 is not None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = Float8LinearConfig.from_recipe_name(float8)
        convert_to_float8_training(model.blocks, config=recipe)
    return model


def train(
    model: Llama,
    shape: Shape,
    steps: int,
    *,
    compiled: bool,
    graphs: bool = False,
    warmup_steps: int = WARMUP_STEPS,
) -> tuple[list[float], list[float], float]:
    """Trains; returns seconds and loss of every step, and when the first one ended.

    On a GPU the seconds of the steps that count are those of all of them, divided by their number.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=8e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2))
    mode = "reduce-overhead" if graphs else None
    forward = torch.compile(model, mode=mode) if compiled else model
    seconds: list[float] = []
    losses: list[Any] = []
    first_ended = 0.0
    counted = 0.0
    for step in range(steps):
        if device.type == "cuda" and step in (1, warmup_steps):
            torch.cuda.synchronize()
            counted = time.perf_counter()
            first_ended = first_ended or time.monotonic()
        began = time.perf_counter()
        tokens = torch.randint(shape.vocabulary, (shape.batch, shape.seq_len + 1), device=device)
        loss = forward(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item() if device.type == "cpu" else loss.detach().clone())
        seconds.append(time.perf_counter() - began)
        if device.type == "cpu":
            first_ended = first_ended or time.monotonic()
    if device.type == "cuda":
        torch.cuda.synchronize()
        left = steps - warmup_steps
        seconds[warmup_steps:] = [(time.perf_counter() - counted) / left] * left
    return seconds, [float(loss) for loss in losses], first_ended


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures a bare training loop.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup-steps", type=int, default=WARMUP_STEPS)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--graphs", action="store_true", help="compiled, and in CUDA graphs")
    parser.add_argument("--float8", help="a recipe of torchao's float8: tensorwise, rowwise")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON: fields of Shape")
    parser.add_argument(
        "--started", type=float, default=time.monotonic(), help="time.monotonic() of the launch"
    )
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    warmup = arguments.warmup_steps
    if arguments.steps <= warmup:
        parser.error(f"--steps must be more than {warmup}: the first {warmup} are not counted")
    shape = Shape(**arguments.shape)
    model = build(shape, device=arguments.device, float8=arguments.float8)
    seconds, losses, first_ended = train(
        model,
        shape,
        arguments.steps,
        compiled=arguments.compile or arguments.graphs,
        graphs=arguments.graphs,
        warmup_steps=warmup,
    )
    report = {
        "tokens_per_second": shape.batch * shape.seq_len / statistics.median(seconds[warmup:]),
        "first_step_seconds": first_ended - arguments.started,
        "step_seconds": seconds,
        "losses": losses,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "threads": torch.get_num_threads(),
    }
    if arguments.device == "cuda":
        report["memory_gib"] = torch.cuda.max_memory_reserved() / 2**30
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
