"""A Llama and its training loop as one would write them by hand: what a framework must not be slower than.

    python experiments/cpu_baseline/bare_loop.py --compile --output out.json

Plain PyTorch, one process, nothing of the harness: the shape of shape.yaml, random tokens, fused AdamW with a
schedule, gradients clipped, the loss read every step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, LAYERS, HEADS, KV_HEADS, FFN_HIDDEN, VOCABULARY = 512, 8, 8, 4, 1536, 8192
BATCH, SEQ_LEN, WARMUP_STEPS = 4, 512, 2


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = DIM // HEADS
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM, eps=1e-5), nn.RMSNorm(DIM, eps=1e-5)
        self.wq = nn.Linear(DIM, HEADS * width, bias=False)
        self.wk = nn.Linear(DIM, KV_HEADS * width, bias=False)
        self.wv = nn.Linear(DIM, KV_HEADS * width, bias=False)
        self.wo = nn.Linear(HEADS * width, DIM, bias=False)
        self.w1 = nn.Linear(DIM, FFN_HIDDEN, bias=False)
        self.w2 = nn.Linear(FFN_HIDDEN, DIM, bias=False)
        self.w3 = nn.Linear(DIM, FFN_HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.attention_norm(x)
        q = rotate(self.wq(h).view(batch, length, HEADS, -1).transpose(1, 2), cos, sin)
        k = rotate(self.wk(h).view(batch, length, KV_HEADS, -1).transpose(1, 2), cos, sin)
        v = self.wv(h).view(batch, length, KV_HEADS, -1).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(attended.transpose(1, 2).reshape(batch, length, -1))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM, eps=1e-5)
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)
        frequencies = 500000.0 ** -(torch.arange(0, DIM // HEADS, 2) / (DIM // HEADS))
        angles = torch.outer(torch.arange(SEQ_LEN), frequencies)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1), labels.flatten())


def train(steps: int, *, compiled: bool) -> tuple[list[float], list[float], float, int]:
    """Trains; returns seconds and loss of every step, when the first one ended, and the parameters."""
    torch.manual_seed(0)
    model = Llama()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=8e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2))
    forward = torch.compile(model) if compiled else model
    seconds, losses, first_ended = [], [], 0.0
    for _ in range(steps):
        began = time.perf_counter()
        tokens = torch.randint(VOCABULARY, (BATCH, SEQ_LEN + 1))
        loss = forward(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
        first_ended = first_ended or time.monotonic()
    return seconds, losses, first_ended, sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures a bare training loop on a CPU.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--started", type=float, default=time.monotonic(), help="time.monotonic() of the launch"
    )
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.steps <= WARMUP_STEPS:
        parser.error(
            f"--steps must be more than {WARMUP_STEPS}: the first {WARMUP_STEPS} are not counted"
        )
    seconds, losses, first_ended, parameters = train(arguments.steps, compiled=arguments.compile)
    report = {
        "tokens_per_second": BATCH * SEQ_LEN / statistics.median(seconds[WARMUP_STEPS:]),
        "first_step_seconds": first_ended - arguments.started,
        "step_seconds": seconds,
        "losses": losses,
        "parameters": parameters,
        "threads": torch.get_num_threads(),
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
