"""What a rank's process is told before anything is built: device, determinism, process group."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from harness.errors import ConfigError
from harness.job import Job


def pick_device(job: Job) -> torch.device:
    """The device of this rank.

    Raises:
        ConfigError: CUDA was asked for and is not there, or has fewer devices than ranks.
    """
    wanted = job.cluster.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("cluster.device", wanted, "torch sees no CUDA device here", ["cpu", "auto"])
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            "cluster.device", wanted, f"local rank {local_rank} has no GPU: this node has {count}", ["cpu"]
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def set_up_process(job: Job, device: torch.device) -> None:
    """Sets what is global to a process: determinism and noise."""
    if job.debug.deterministic:
        # cuBLAS reads this when its handle is made (docs.pytorch.org, "Reproducibility").
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    # Two sequential all-reduces, one per mesh axis, are what a two-axis reduction is.
    warnings.filterwarnings("ignore", message=".*(all-reduce|reductions? over).*mesh.*")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)


@contextmanager
def process_group(job: Job, device: torch.device) -> Iterator[None]:
    """The default process group; torchrun's variables say where the others are, a lone rank needs nobody."""
    if job.world_size == 1:
        store = dist.HashStore()
        dist.init_process_group(backend_of(device), store=store, rank=0, world_size=1)
    else:
        dist.init_process_group(
            backend_of(device),
            timeout=timedelta(seconds=job.cluster.start_timeout_seconds),
            device_id=device if device.type == "cuda" else None,
        )
    try:
        yield
    finally:
        dist.destroy_process_group()


def backend_of(device: torch.device) -> str:
    """gloo between CPUs; between GPUs NCCL, with gloo beside it for tensors in host memory."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
