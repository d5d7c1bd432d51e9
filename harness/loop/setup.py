"""What a rank's process is told before anything is built: device, determinism, process group."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from harness.cluster.config import node_name
from harness.errors import ConfigError, UserError
from harness.job import Job


def local_rank() -> int:
    """This process's place on its node; 0 when it was started alone."""
    return _of_launcher("LOCAL_RANK", 0)


def _of_launcher(name: str, default: int) -> int:
    """A number that a launcher has set; the default in a process that none has started."""
    return int(os.environ.get(name, default)) if "RANK" in os.environ else default


def pick_device(job: Job) -> torch.device:
    """The device of this rank.

    Raises:
        ConfigError: CUDA was asked for and is not there, or has fewer devices than ranks.
    """
    wanted = job.cluster.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        node = node_name()
        raise ConfigError("cluster.device", wanted, f"torch sees no CUDA device on {node}", ["cpu", "auto"])
    place, count = local_rank(), torch.cuda.device_count()
    if job.cluster.gpu_bind is not None:
        place %= count  # SLURM shows the rank only the GPUs that it is bound to
    if place >= count:
        rule = f"local rank {place} has no GPU: {node_name()} has {count}"
        raise ConfigError("cluster.device", wanted, rule, ["cpu"])
    device = torch.device("cuda", place)
    torch.cuda.set_device(device)
    return device


def set_up_process(job: Job) -> None:
    """Sets what is global to a process in torch: threads, determinism, precision and noise."""
    if job.cluster.threads_per_rank is not None:
        # torchrun sets OMP_NUM_THREADS=1 of its own accord; the job's own word wins.
        torch.set_num_threads(job.cluster.threads_per_rank)
    if job.debug.deterministic:
        # cuBLAS reads this when its handle is made (docs.pytorch.org, "Reproducibility").
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(job.debug.deterministic)
    torch.autograd.set_detect_anomaly(job.debug.anomaly)
    torch.set_float32_matmul_precision(job.training.matmul_precision)
    silence_known_noise()


def silence_known_noise() -> None:
    """Silences warnings of torch and torchao that say nothing about a job, and no others.

    * FSDP2 warns that a block returns a view, because an in-place operation on it would lose the hook that
      gathers its parameters. No block works in place on another's output.
    * DTensor warns that a gradient norm over two mesh axes takes two all-reduces. It is meant: the axes have
      process groups of their own, and one for both would be used for nothing else.
    * The compiler warns that what is recomputed selectively must not work in place. It does not.
    * torchao says of each of its compiled kernels that does not fit this build of torch or this device that
      it cannot be loaded; what needs one raises. And it registers enums in a way that torch has deprecated.
    """
    warnings.filterwarnings(
        "ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor", category=UserWarning
    )
    for name in (
        *("torch.distributed.tensor._redistribute", "torch._higher_order_ops.wrap"),
        *("torchao", "torch.utils._pytree"),
    ):
        logging.getLogger(name).addFilter(_is_worth_saying)


def _is_worth_saying(record: logging.LogRecord) -> bool:
    said = str(record.msg).strip()
    begins = ("While redistributing from", "Detected that context_fn", "Failed to load /")
    return not (said.startswith(begins) or "is now natively supported by torch.compile as an opaque" in said)


CHECKPOINT_GROUP = "checkpoint"


@contextmanager
def process_group(job: Job, device: torch.device, store: dist.Store | None = None) -> Iterator[None]:
    """The default process group; a lone rank needs nobody for it.

    Args:
        job: the resolved job.
        device: device of this rank.
        store: where the ranks meet; None means where torchrun's variables say.
    """
    _check_interface()
    alone = job.world_size == 1
    with loopback_if_all_ranks_are_here(job):
        if alone:
            dist.init_process_group(backend_of(device), store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group(
                backend_of(device),
                timeout=timedelta(seconds=job.cluster.start_timeout_seconds),
                store=store,
                # Said together with a store only; otherwise they come from the variables too.
                rank=-1 if store is None else int(os.environ["RANK"]),
                world_size=-1 if store is None else job.world_size,
                device_id=device if device.type == "cuda" else None,
            )
        try:
            yield
        except BaseException:
            # With peers in the middle of a collective, taking a group down can hang or abort. The process is
            # about to end, and as long as its connections stand the peers do not fail before it has said why.
            if alone:
                dist.destroy_process_group()
            raise
        dist.destroy_process_group()


def _check_interface() -> None:
    """Raises UserError if gloo is told to use a network interface that is not here."""
    wanted = os.environ.get("GLOO_SOCKET_IFNAME")
    names = [name for _, name in socket.if_nameindex()]
    missing = [name for name in (wanted or "").split(",") if name and name not in names]
    if missing:
        raise UserError(
            f"GLOO_SOCKET_IFNAME={wanted}: {socket.gethostname()} has no network interface {missing[0]}; "
            f"would work: {', '.join(names)}"
        )


def shorten_timeouts(job: Job) -> None:
    """After this process's first step, which compiles and connects, a collective that takes long is stuck.

    Applies to the default group and to those of all mesh axes, not to that of checkpoints, whose time is
    its own. All ranks may call it at their own time.
    """
    limit = timedelta(seconds=job.cluster.step_timeout_seconds)
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_desc == CHECKPOINT_GROUP:
            continue
        dist.distributed_c10d._set_pg_timeout(limit, group)


@contextmanager
def loopback_if_all_ranks_are_here(job: Job) -> Iterator[None]:
    """Lets gloo connect over the loopback interface if no other machine takes part.

    By default it binds to the address that the host's name resolves to, which on laptops and in containers
    is often none, or one of a network that is down.
    """
    ranks_here = _of_launcher("LOCAL_WORLD_SIZE", 1)
    interface = loopback_interface()
    if ranks_here < job.world_size or interface is None or "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


def loopback_interface() -> str | None:
    """Name of the loopback interface: ``lo`` on Linux, ``lo0`` on macOS; None where there is neither."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def backend_of(device: torch.device) -> str:
    """gloo between CPUs; between GPUs NCCL, with gloo beside it for tensors in host memory."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
