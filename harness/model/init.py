"""Initial values by name: each parameter has a generator seeded with the seed and its name.

So they depend neither on the layout nor on the order in which modules are built: every rank generates
the full tensor and keeps its own shard, and no seed checkpoint is needed to compare layouts. They do
depend on the kind of device: torch's generators of CPUs and GPUs are different.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from harness.model.spec import Init


def draw(name: str, shape: tuple[int, ...], init: Init, seed: int, device: torch.device) -> Tensor:
    """Generate the full initial value of one parameter, float32.

    Experts' values are generated one expert at a time, under the parameter's name and the expert's number
    (``...experts.w1.7``), because no rank needs all of them.
    """
    full = torch.empty(shape, dtype=torch.float32, device=device)
    if not init.std:
        return full.fill_(init.mean)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if math.isinf(init.cut):
        return nn.init.normal_(full, std=init.std, generator=generator)
    return nn.init.trunc_normal_(full, std=init.std, a=-init.cut, b=init.cut, generator=generator)
