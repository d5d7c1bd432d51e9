"""Initial values by name: each parameter's are drawn from a generator seeded with the seed and its name.

So they depend neither on the layout nor on the order in which modules are built: every rank draws the
full tensor and keeps its own shard, and no seed checkpoint is needed to compare layouts. They do depend on
the kind of device that draws them: torch's generators of CPUs and GPUs are different ones.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.model.config import ModelConfig


@dataclass(frozen=True)
class Init:
    """A distribution: ``ones``, or a normal with ``std`` cut at +-``cut``."""

    std: float | None
    cut: float = math.inf


def init_of(name: str, config: ModelConfig) -> Init:
    """The distribution of a parameter's initial values, as torchtitan's Llama 3 has it.

    Linears: normal of std 0.02 cut at +-2; those that write into (wo, w2) or gate (w3) the residual
    stream: 0.02 / sqrt(2 (layer + 1)), so that its variance does not grow with depth. Embedding: std 1.
    Output projection (and a tied table, which is one): std dim**-0.5 cut at three of it. Norms: ones.
    """
    if "norm" in name:
        return Init(std=None)
    if name == "output.weight" or (name == "tok_embeddings.weight" and config.tied_embeddings):
        std = config.dim**-0.5
        return Init(std, cut=3 * std)
    if name == "tok_embeddings.weight":
        return Init(std=1.0)
    layer = int(re.match(r"layers\.(\d+)\.", name)[1])  # type: ignore[index]
    deep = name.endswith((".wo.weight", ".w2.weight", ".w3.weight"))
    return Init(0.02 / math.sqrt(2 * (layer + 1)) if deep else 0.02, cut=2.0)


def draw(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int, device: torch.device) -> Tensor:
    """The full initial value of one parameter, float32."""
    init = init_of(name, config)
    full = torch.empty(shape, dtype=torch.float32, device=device)
    if init.std is None:
        return full.fill_(1.0)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if math.isinf(init.cut):
        return nn.init.normal_(full, std=init.std, generator=generator)
    return nn.init.trunc_normal_(full, std=init.std, a=-init.cut, b=init.cut, generator=generator)
