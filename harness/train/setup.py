"""Set up a rank's process before anything is built: device, determinism, process group."""

import logging
import os
import platform
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from harness.checkpoint.state import CHECKPOINT_GROUP
from harness.config.cluster import count_gpus
from harness.config.job import Job
from harness.metrics.mfu import Peak, peak_of
from harness.train.process import stop_signals_end
from harness.util.errors import ConfigError, MachineError, UserError
from harness.util.hardware import node_name

WAITING_SECONDS = 3.0
"""Time after which a rank says that it waits for others."""
MEETING_SECONDS = 0.05
"""Time after which a rank asks again whether the others have come."""


DRIVER = Path("/proc/driver/nvidia/version")
"""File of the NVIDIA driver, on machines with one."""


def local_rank() -> int:
    """Rank of this process on its node; 0 without a launcher."""
    return _from_launcher("LOCAL_RANK", 0)


def _from_launcher(name: str, default: int) -> int:
    """Return a number that a launcher put into the environment; without a launcher, ``default``."""
    return int(os.environ.get(name, default)) if "RANK" in os.environ else default


def pick_device(job: Job) -> torch.device:
    """Return the device of this rank, and make a GPU current.

    Raises:
        ConfigError: CUDA was requested and is not available, or has fewer devices than ranks; or
            the node has GPUs that torch cannot use.
    """
    wanted = job.cluster.device
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        rule = (
            f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, sees no CUDA device on "
            f"{node_name()}"
        )
        if wanted == "cuda" or (count_gpus() and DRIVER.is_file()):
            works = (
                "cpu, or on a node with GPUs a build of torch for the CUDA that nvidia-smi shows"
            )
            raise ConfigError("cluster.device", wanted, rule, works)
        return torch.device("cpu")
    index = local_rank()
    count = torch.cuda.device_count()
    if job.cluster.gpu_bind is not None:
        index %= count  # SLURM shows the rank only the GPUs that it is bound to
    if index >= count:
        rule = f"local rank {index} has no GPU: {node_name()} has {count}"
        raise ConfigError("cluster.device", wanted, rule, ["cpu"])
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def set_up_process(job: Job) -> None:
    """Set torch's global state: threads, determinism, float32 precision and warning filters."""
    if job.cluster.threads_per_rank is not None:
        # torchrun sets OMP_NUM_THREADS=1 by default; the job's value wins.
        torch.set_num_threads(job.cluster.threads_per_rank)
    if job.debug.deterministic:
        # cuBLAS reads this when its handle is made (docs.pytorch.org, "Reproducibility").
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(job.debug.deterministic)
    torch.autograd.set_detect_anomaly(job.debug.anomaly)
    torch.set_float32_matmul_precision(job.training.matmul_precision)
    silence_known_noise()


def silence_known_noise() -> None:
    """Silence warnings of torch and torchao that do not concern a job, and no others.

    * FSDP2 warns that a block returns a view, because an in-place operation on it would lose the
      hook that gathers its parameters. No block works in place on another's output.
    * DTensor warns that a gradient norm over two mesh axes takes two all-reduces. This is intended:
      each axis has its own process group, and a group over both would have no other use.
    * The compiler warns that selectively recomputed code must not work in place. It does not.
    * torchao logs each compiled kernel that it cannot load on this build of torch or this device;
      code that needs one raises. It also registers enums in a way that torch has deprecated.
    """
    warnings.filterwarnings(
        "ignore",
        message=r"FSDP2-wrapped module \(.*\) returned a view tensor",
        category=UserWarning,
    )
    for name in (
        "torch.distributed.tensor._redistribute",
        "torch._higher_order_ops.wrap",
        "torchao",
        "torch.utils._pytree",
    ):
        logging.getLogger(name).addFilter(_is_not_known_noise)


def _is_not_known_noise(record: logging.LogRecord) -> bool:
    text = str(record.msg).strip()
    begins = ("While redistributing from", "Detected that context_fn", "Failed to load /")
    return not (
        text.startswith(begins) or "is now natively supported by torch.compile as an opaque" in text
    )


def rendezvous(job: Job) -> dist.Store:
    """Meet the other ranks that torchrun or another launcher started; return the store that all share.

    A stop signal ends a rank that waits. Raises MachineError if ranks are missing after
    ``cluster.start_timeout_seconds``.
    """
    rank = int(os.environ["RANK"])
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    patience = job.cluster.start_timeout_seconds
    deadline = time.monotonic() + patience
    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=patience)
    notice = threading.Timer(
        WAITING_SECONDS, _tell, [f"rank {rank} is waiting for the store at {host}:{port}"]
    )
    notice.start()
    try:
        with stop_signals_end():
            connected = dist.TCPStore(
                host, port, None, is_master, timeout, wait_for_workers=False, multi_tenant=True
            )
        notice.cancel()
        # torchrun may restart the ranks, and its store keeps their keys.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"harness-{attempt}", connected)
        arrived = store.add("arrived", 1)
        # Only rank 0 says how many ranks are missing, and it says so once.
        shown_at = time.monotonic() + WAITING_SECONDS if rank == 0 else deadline
        while arrived < job.world_size:
            missing = f"{job.world_size - arrived} of {job.world_size} ranks at {host}:{port}"
            if time.monotonic() > deadline:
                works = "all WORLD_SIZE ranks, or env -u RANK -u WORLD_SIZE before the command"
                raise MachineError(
                    f"waiting for {missing} took cluster.start_timeout_seconds; would work: {works}"
                )
            if time.monotonic() > shown_at:
                _tell(f"waiting for {missing}")
                shown_at = deadline
            time.sleep(MEETING_SECONDS)
            arrived = store.add("arrived", 0)
    except dist.DistError as error:
        raise MachineError(
            f"rank {rank} cannot connect to the store at {host}:{port} (MASTER_ADDR, MASTER_PORT): "
            f"{str(error).splitlines()[0]}"
        ) from error
    finally:
        notice.cancel()
    return store


def _tell(line: str) -> None:
    sys.stderr.write(f"{line} (WORLD_SIZE, MASTER_ADDR and MASTER_PORT of a launcher)\n")
    sys.stderr.flush()


@contextmanager
def process_group(
    job: Job, device: torch.device, store: dist.Store | None = None
) -> Iterator[None]:
    """Create the default process group, and destroy it at the end.

    Args:
        store: rendezvous store; None: the one of torchrun's variables.
    """
    wanted = os.environ.get("GLOO_SOCKET_IFNAME")
    names = [name for _, name in socket.if_nameindex()]
    missing = [name for name in (wanted or "").split(",") if name and name not in names]
    if missing:
        raise UserError(
            f"GLOO_SOCKET_IFNAME={wanted}: {socket.gethostname()} has no network interface {missing[0]}; "
            f"would work: {', '.join(names)}"
        )
    alone = job.world_size == 1
    with loopback_if_all_ranks_are_here(job):
        if alone:
            dist.init_process_group(
                backend_of(device), store=dist.HashStore(), rank=0, world_size=1
            )
        else:
            # Ranks that met by ``rendezvous`` come with its store; a stop signal ends one that waits.
            with nullcontext() if store is None else stop_signals_end():
                dist.init_process_group(
                    backend_of(device),
                    timeout=timedelta(seconds=job.cluster.start_timeout_seconds),
                    store=store,
                    # Without a store torch reads them from the environment's variables; -1 is unset.
                    rank=-1 if store is None else int(os.environ["RANK"]),
                    world_size=-1 if store is None else job.world_size,
                    device_id=device if device.type == "cuda" else None,
                )
        try:
            yield
        except BaseException:
            # While peers are in a collective, destroying a group can hang or abort. The process is
            # about to end anyway. Until then its open connections keep the peers from failing
            # before it has reported its error.
            if alone:
                dist.destroy_process_group()
            raise
        dist.destroy_process_group()


def set_timeouts(seconds: int) -> None:
    """Set the timeout of collectives. A step that compiles and connects needs a longer one.

    It applies to the default group and to the groups of all mesh axes, but not to that of checkpoints,
    which has its own timeout. Ranks need not call it at the same time.
    """
    # The function is public since torch 2.14.
    set_one = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_desc == CHECKPOINT_GROUP:
            continue
        set_one(timedelta(seconds=seconds), group)


@contextmanager
def loopback_if_all_ranks_are_here(job: Job) -> Iterator[None]:
    """Make gloo connect over the loopback interface if all ranks are on this machine.

    By default gloo binds to the address that the host's name resolves to. On laptops and in
    containers there is often none, or its network is down.
    """
    interface = loopback_interface()
    others = _from_launcher("LOCAL_WORLD_SIZE", 1) < job.world_size
    if others or interface is None or "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


def loopback_interface() -> str | None:
    """Name of the loopback interface: ``lo`` on Linux, ``lo0`` on macOS; None without either."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def backend_of(device: torch.device) -> str:
    """Backend of the process group: gloo on CPUs; on GPUs NCCL, and gloo for tensors in host memory."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def device_name(device: torch.device) -> str:
    """Name of the device; for a CPU, its architecture and number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def device_peak(job: Job, device: torch.device) -> Peak:
    """Peak of the device for MFU, in the format of the job's matrix products.

    For float8 jobs it is the bfloat16 peak, as in torchtitan: attention and head multiply in
    bfloat16, and with the same peak the MFU shows what float8 gains. It can exceed 1.
    """
    name = device_name(device)
    cluster = job.cluster.with_device(name)
    accelerator = None if cluster is None else cluster.gpu
    if job.precision.linear != "none":
        peak = peak_of(name, "bfloat16", accelerator)
        convention = (
            f"; {job.precision.linear} is measured against the bfloat16 peak, as in torchtitan"
        )
        return peak if peak.flops is None else replace(peak, origin=peak.origin + convention)
    dtype = job.precision.param_dtype
    if device.type == "cuda" and dtype == "float32" and torch.backends.cuda.matmul.allow_tf32:
        dtype = "tf32"
    return peak_of(name, dtype, accelerator)
