"""The verb ``doctor``."""

import importlib.util
import json
import os
import platform
import re
import resource
import shlex
import shutil
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from harness.compose.verb import Result, Verb
from harness.config.job import Job
from harness.launch.faults import gpu_faults
from harness.launch.queue import require_slurm
from harness.launch.slurm import shape_of
from harness.train.process import importing_torch, refuse_launched
from harness.util.errors import EXIT_OK, EXIT_USER, LONGEST_VALUE, ConfigError, MachineError
from harness.util.hardware import Accelerator, node_name
from harness.util.processes import cpus
from harness.util.tables import Table, columns_of, to_text

HELP = """`harness doctor`: look at a machine, and say what works, what does not, and what to do.

    harness doctor                                 this machine
    harness doctor cluster=slurm_h100              a node of the cluster, or of this allocation
    harness doctor precision=float8_tensorwise     what a job in float8 needs, too

Exit code 0: nothing fails that training needs; 2: something does.
"""

OK = "ok"
WARN = "warn"
FAIL = "fail"
COLUMNS = columns_of("""
    what     what
    found    found
    verdict  verdict
    advice   what to do
""")
GIB = 2**30
HUB_SECONDS = 3
REDUCED_BYTES = GIB
REDUCED_TIMES = 20
LEAST_SHARE = 0.8
"""Of a planned bandwidth."""
LEAST_FILES = 4096
LEAST_SHARED = GIB
LEAST_FREE_GIB = 20
PCI = Path("/sys/bus/pci/devices")
DRIVER = Path("/proc/driver/nvidia/version")
INFINIBAND = Path("/sys/class/infiniband")


class Finding(NamedTuple):
    """Result of a check."""

    found: str
    verdict: str = OK
    advice: str = ""


class Machine(NamedTuple):
    """Input of a check: the job, the GPUs that torch can use, and the first one if it is known."""

    job: Job
    gpus: int = 0
    known: Accelerator | None = None


def judged(found: str, is_right: object, advice: str) -> Finding:
    """Return what was found, with a warning if it is not right."""
    return Finding(found) if is_right else Finding(found, WARN, advice)


def doctor(job: Job, _overrides: list[str]) -> Result:
    """Look at this machine, or at a node of the job's cluster."""
    refuse_launched("harness doctor starts ranks itself; start it without torchrun")
    if job.cluster.dry_run:
        return Result({"command": _srun(job)}, f"{shlex.join(_srun(job))}\n")
    checks = look(job) if job.cluster.is_here else _look_at_a_node(job)
    failed = any(row["verdict"] == FAIL for row in checks)
    text = to_text(Table(COLUMNS, checks, missing=""))
    return Result({"checks": checks}, text, EXIT_USER if failed else EXIT_OK)


def look(job: Job) -> list[dict[str, str]]:
    """Return a row for each check: what it finds here."""
    with importing_torch():
        from torch import cuda
    machine = Machine(job)
    rows = []
    if job.cluster.device != "cpu" and cuda.is_available():
        cluster = job.cluster.with_device(cuda.get_device_name())
        known = None if cluster is None else cluster.gpu
        machine = Machine(job, cuda.device_count(), known)
    for what, check in CHECKS.items():
        try:
            found = check(machine)
        except ConfigError as error:
            found = Finding(error.rule, FAIL, error.works)
        except Exception as error:
            found = Finding(_last_line(error), FAIL)
        rows.append({"what": what, **found._asdict()})
    return rows


def _look_at_a_node(job: Job) -> list[dict[str, str]]:
    require_slurm()
    here = replace(job, cluster=replace(job.cluster, kind="local", nodes=1)).to_json()
    done = subprocess.run(_srun(job), input=here, stdout=subprocess.PIPE, text=True)
    answers = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    if done.returncode != 0 or not answers:
        raise MachineError(
            f"srun ended with exit code {done.returncode}: {done.stdout.strip()[-200:]}"
        )
    rows: list[dict[str, str]] = json.loads(answers[-1])
    return rows


def _srun(job: Job) -> list[str]:
    """Return the command of ``main`` on one whole node: of this allocation, or of one that srun makes."""
    config = replace(job.cluster, nodes=1)
    ranks = job.cluster.ranks_per_node or 1
    whole = replace(job.parallelism, dp_replicate=1, dp_shard=ranks, tp=1, pp=1, cp=1, ep=1)
    shape = shape_of(replace(job, parallelism=whole, cluster=config))
    options = dict(shape.options) | {"mpi": "none", "ntasks": 1, "ntasks-per-node": 1}
    cpus_per_rank = config.cpus_per_rank or 1
    options["cpus-per-task"] = cpus_per_rank * ranks
    command = ["srun"]
    for name, value in options.items():
        if name not in ("signal", "requeue", "no-requeue"):
            command.append(f"--{name}" if value is True else f"--{name}={value}")
    start = [config.python or sys.executable, "-m", "harness.tools.doctor"]
    lines = "\n".join(["set -e", *shape.exports, *shape.setup, shlex.join(start)])
    return [*command, *config.srun_args, *shlex.split(config.container or ""), "bash", "-c", lines]


def main() -> None:
    """Look at this node, for the job on standard input."""
    sys.stdout.write(f"{json.dumps(look(Job.from_json(sys.stdin.read())))}\n")


def _host(machine: Machine) -> Finding:
    """Its processor cores, memory and limits."""
    cores = cpus()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    shared = shutil.disk_usage("/dev/shm").total if os.path.exists("/dev/shm") else 0
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    advice = []
    if cores < 2 * machine.gpus:
        advice.append("two cores or more for each GPU")
    if machine.gpus > 1 and shared < LEAST_SHARED:
        advice.append("--ipc=host or --shm-size=16g of the container")
    if files < LEAST_FILES:
        advice.append(f"ulimit -n {LEAST_FILES}")
    if locked != resource.RLIM_INFINITY and any(INFINIBAND.glob("*")):
        advice.append("ulimit -l unlimited")
    text = (
        f"{node_name()}: {cores} cores, {memory / GIB:,.0f} GiB, /dev/shm {shared / GIB:.1f} GiB, "
        f"{files} open files, Python {platform.python_version()}"
    )
    return judged(text, not advice, ", ".join(advice))


def _driver(machine: Machine) -> Finding:
    """Whether torch can use the GPUs that are there."""
    import torch

    from harness.train.setup import pick_device

    text = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    if pick_device(machine.job).type == "cuda":
        found = re.search(r"\s\d+\.[\d.]+\s", DRIVER.read_text()) if DRIVER.exists() else None
        return Finding(f"{text}, driver {found[0].strip() if found else 'unknown'}")
    on_cpu = machine.job.cluster.device == "cpu"
    there = [each for each in PCI.glob("*/vendor") if each.read_text().strip() == "0x10de"]
    gpus = sum(each.with_name("class").read_text().startswith("0x03") for each in there)
    if gpus and not on_cpu and "CUDA_VISIBLE_DEVICES" not in os.environ:
        works = "driver 580 or newer (in a container: --gpus all), or cluster.device=cpu"
        return Finding(f"{text}; {gpus} GPUs without a driver", FAIL, works)
    return judged(f"{text}; no GPU", on_cpu, "nothing, to train on the CPU")


def _gpus(machine: Machine) -> Finding:
    """Names, formats, free memory, errors, and whether they have the job's format."""
    from torch import cuda, device

    from harness.precision.linears import CAPABILITY, require_device

    job = machine.job
    gpus = range(machine.gpus)
    require_device(job.precision, device("cuda" if gpus else "cpu"), experts=job.model.moe.enabled)
    if not gpus:
        return Finding("none; float8 only by precision.emulate=true")
    names = {cuda.get_device_name(gpu) for gpu in gpus}
    version = cuda.get_device_capability()
    able = [name for name, least in CAPABILITY.items() if version >= least]
    free = min(cuda.mem_get_info(gpu)[0] for gpu in gpus) / GIB
    text = f"{len(gpus)} x {' and '.join(sorted(names))}, {free:.1f} GiB free, compute capability "
    text += ".".join(map(str, version)) + "".join(f", {name}" for name in able)
    if faults := gpu_faults(len(gpus)):
        return Finding(
            f"{text}; {'; '.join(faults)}", WARN, "nvidia-smi -q; end what else uses the GPUs"
        )
    return judged(text, machine.known, "for MFU: cluster.accelerator=NAME with cluster.hardware")


def _links(machine: Machine) -> Finding:
    """The bus bandwidth of NCCL, as github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md, defines it."""
    from harness.launch.pool import RankPool
    from harness.tools.plan.constants import Constants

    gpus = machine.gpus
    if gpus < 2:
        return Finding("none")
    with RankPool(gpus, timeout_seconds=120, on_gpus=True) as pool:
        seconds = max(pool.run(gpus, all_reduce_seconds))
    rate = REDUCED_BYTES / seconds * 2 * (gpus - 1) / gpus
    planned = machine.known.link_bandwidth * Constants().link if machine.known else 0.0
    text = f"all-reduce {rate / 1e9:,.0f} GB/s of bus, planned {planned / 1e9:,.0f}"
    works = "NV between all pairs in nvidia-smi topo -m; over PCIe, layouts without tp and ep"
    return judged(text, rate >= LEAST_SHARE * planned, works)


def all_reduce_seconds() -> float:
    """Seconds of an all-reduce, on a rank of a pool."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    values = torch.zeros(REDUCED_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.all_reduce(values)  # makes the communicator
    began.record()
    for _ in range(REDUCED_TIMES):
        dist.all_reduce(values)
    ended.record()
    torch.cuda.synchronize()
    return max(began.elapsed_time(ended), 1e-3) / 1000 / REDUCED_TIMES


def _attention(machine: Machine) -> Finding:
    """The kernel that torch takes."""
    import torch
    from torch.nn.attention import SDPBackend

    if not machine.gpus:
        return Finding("torch's for CPUs")
    q = torch.zeros(1, 8, 256, 128, dtype=torch.bfloat16, device="cuda")
    chosen = SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True)).name
    is_planned = "CUDNN" in chosen or torch.cuda.get_device_capability()[0] not in (9, 10)
    text = f"bfloat16 takes {chosen}"
    if importlib.util.find_spec("flash_attn_interface"):
        text += "; training.flash=FA3 is installed"
    return judged(text, is_planned, "torch's own cuDNN, whose attention the plan counts on")


def _compiler(machine: Machine) -> Finding:
    """A compiled function, by Triton for a GPU and by the C++ compiler for a CPU."""
    import torch

    device = "cpu"
    tool = os.environ.get("CXX", "g++")
    if machine.gpus:
        device = "cuda"
        tool = f"Triton and {os.environ.get('CC', 'gcc')}"
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(256, device=device))
    except Exception as error:
        works = "the system's packages of g++ and of Python's headers, or compile=off"
        return Finding(_last_line(error), FAIL if machine.job.compile.blocks else WARN, works)
    return Finding(f"torch compiles by {tool}")


def _hub(machine: Machine) -> Finding:
    """Whether it answers."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return Finding("HF_HUB_OFFLINE forbids it")
    try:
        urllib.request.urlopen(ENDPOINT, timeout=HUB_SECONDS).close()
    except OSError as error:
        works = "HF_ENDPOINT, HTTPS_PROXY, or copies of the files"
        return Finding(f"{ENDPOINT}: {getattr(error, 'reason', error)}", WARN, works)
    return Finding(f"{ENDPOINT} answers")


def _space(machine: Machine) -> Finding:
    """Of run folders and data."""
    free = {}
    folders = {"runs_dir": machine.job.runs_dir, "data.cache_dir": machine.job.data.cache_dir}
    for name, folder in folders.items():
        path = Path(folder).expanduser().absolute()
        there = next(each for each in (path, *path.parents) if each.exists())
        if not os.access(there, os.W_OK):
            return Finding(f"{there} cannot be written", FAIL, f"another {name}")
        free[name] = shutil.disk_usage(there).free / GIB
    text = ", ".join(f"{name} {size:,.0f} GiB" for name, size in free.items())
    return judged(
        text, min(free.values()) >= LEAST_FREE_GIB, "checkpoints of large models need a larger disk"
    )


def _last_line(error: Exception) -> str:
    *_, last = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {last[:LONGEST_VALUE]}"


CHECKS = {
    "machine": _host,
    "driver": _driver,
    "GPUs": _gpus,
    "links": _links,
    "attention": _attention,
    "compiler": _compiler,
    "hub": _hub,
    "free space": _space,
}
VERB = Verb("doctor", doctor, help=HELP, job=Job, has_json=True)

if __name__ == "__main__":
    main()
