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

# The end of a parameter's name, behind which there may be an expert's number.
_BIAS = re.compile(r"\.(bias|b[123])(\.\d+)?$")
_LAYER = re.compile(r"layers\.(\d+)\.")
_DEEP = re.compile(r"\.(wo|w2|w3)(\.weight|\.\d+)?$")


@dataclass(frozen=True)
class Init:
    """A distribution: a normal around ``mean`` with ``std``, cut at +-``cut``."""

    std: float
    cut: float = math.inf
    mean: float = 0.0


def init_of(name: str, config: ModelConfig) -> Init:
    """The distribution of a parameter's initial values, as torchtitan's Llama 3 has it.

    Linears: normal of std 0.02 cut at +-2; those that write into (wo, w2) or gate (w3) the residual
    stream: 0.02 / sqrt(2 (layer + 1)), so that its variance does not grow with depth. Embedding: std 1,
    or what the model says.
    Output projection (and a tied table, which is one): std dim**-0.5 cut at three of it. Norms: ones. Biases:
    zeros. Attention sinks: as linears (openai/gpt-oss leaves them to training). Multi-token prediction: as a
    block behind the last one.
    """
    if "norm" in name:
        return Init(0.0, mean=1.0)
    if _BIAS.search(name):
        return Init(0.0)
    if name == "output.weight" or (name == "tok_embeddings.weight" and config.tied_embeddings):
        std = config.dim**-0.5
        return Init(std, cut=3 * std)
    if name == "tok_embeddings.weight":
        return Init(config.embedding_std)
    in_layer = _LAYER.match(name)
    assert in_layer or name.startswith("mtp."), name
    layer = int(in_layer[1]) if in_layer else config.n_layers
    deep = _DEEP.search(name) is not None
    return Init(0.02 / math.sqrt(2 * (layer + 1)) if deep else 0.02, cut=2.0)


def draw(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int, device: torch.device) -> Tensor:
    """The full initial value of one parameter, float32.

    Experts' are drawn one by one, by the parameter's name and their number (``...experts.w1.7``), because no
    rank wants those of all of them.
    """
    init = init_of(name, config)
    full = torch.empty(shape, dtype=torch.float32, device=device)
    if not init.std:
        return full.fill_(init.mean)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if math.isinf(init.cut):
        return nn.init.normal_(full, std=init.std, generator=generator)
    return nn.init.trunc_normal_(full, std=init.std, a=-init.cut, b=init.cut, generator=generator)
