"""What an interpreter computes on, and with which libraries; run as a script it prints both as JSON.

It imports nothing of the project: torchtitan's environment reads it too.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import torch


def software() -> dict[str, Any]:
    """Versions of torch, and of the libraries that give it its kernels; None: not installed."""
    triton = importlib.import_module("triton") if importlib.util.find_spec("triton") else None
    return {
        "torch": torch.__version__,
        "triton": getattr(triton, "__version__", None),
        "cudnn": torch.backends.cudnn.version(),
    }


def device() -> dict[str, Any]:
    """The first GPU, if there is one, and its bytes of memory."""
    there = torch.cuda.is_available()
    return {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "devices": torch.cuda.device_count(),
        "device": torch.cuda.get_device_name(0) if there else None,
        "memory": torch.cuda.get_device_properties(0).total_memory if there else None,
    }


if __name__ == "__main__":
    print(json.dumps({**device(), "software": software()}))
