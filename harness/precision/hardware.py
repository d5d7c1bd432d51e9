"""Number formats that hardware supports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.config.cluster import ClusterConfig
from harness.config.precision import PrecisionConfig
from harness.util.errors import ConfigError
from harness.util.hardware import ACCELERATORS, Accelerator

if TYPE_CHECKING:
    import torch

# Lowest NVIDIA compute capability whose tensor cores support the format (CUDA C++ programming guide).
CAPABILITY = {"float8": (8, 9), "mxfp8": (10, 0)}
# Major compute capabilities for which torch and torchao have grouped products, which experts need
# (torch._scaled_grouped_mm: "[9.0, 10.0], or ROCm MI300+"; torchao's mxfp8 kernels: 10.x).
GROUPED_CAPABILITY = {"float8": (9, 10), "mxfp8": (10,)}
# Ada: float8 products, but no grouped ones.
WITHOUT_GROUPS = ("L4", "L40S")
# AMD's CDNA 3 (gfx94x), as torch numbers it; torchao's mxfp8 kernels are for NVIDIA.
ROCM_CAPABILITY = {"float8": (9, 4)}


def require_hardware(
    precision: PrecisionConfig, cluster: ClusterConfig, gpus: int | None, *, experts: bool
) -> None:
    """Check the hardware of a job as far as it is known; ranks check the rest.

    Args:
        precision: number formats.
        cluster: describes the nodes' hardware.
        gpus: GPUs of this machine if the job runs here, else None.
        experts: whether experts multiply in the format too.

    Raises:
        ConfigError: the hardware does not support the format.
    """
    if precision.linear == "none" or precision.emulate:
        return
    if cluster.device == "cpu" or (cluster.device == "auto" and gpus == 0):
        raise _refusal(precision, "a CPU")
    known = _accelerators_of(cluster)
    if known and not any(_arithmetic(precision) in each.peak_flops for each in known):
        raise _refusal(precision, cluster.accelerator or f"cluster.gpu_type={cluster.gpu_type}")
    if experts and known and all(each.name in WITHOUT_GROUPS for each in known):
        what = cluster.accelerator or f"cluster.gpu_type={cluster.gpu_type}"
        raise _refusal(precision, what, grouped=True)


def require_device(precision: PrecisionConfig, device: torch.device, *, experts: bool) -> None:
    """Check a rank's device.

    Raises:
        ConfigError: the device does not support the format.
    """
    import torch

    if precision.linear == "none" or precision.emulate:
        return
    if device.type == "cpu":
        raise _refusal(precision, "a CPU")
    needed = (ROCM_CAPABILITY if torch.version.hip else CAPABILITY).get(_arithmetic(precision))
    if needed is None or torch.cuda.get_device_capability(device) < needed:
        raise _refusal(precision, torch.cuda.get_device_name(device))
    major = torch.cuda.get_device_capability(device)[0]
    if experts and not torch.version.hip and major not in GROUPED_CAPABILITY[_arithmetic(precision)]:
        raise _refusal(precision, torch.cuda.get_device_name(device), grouped=True)


def _arithmetic(precision: PrecisionConfig) -> str:
    return "mxfp8" if precision.linear == "mxfp8" else "float8"


def _accelerators_of(cluster: ClusterConfig) -> list[Accelerator]:
    """Accelerators that the nodes may have; empty if unknown."""
    if cluster.gpu is not None:
        return [cluster.gpu]
    kind = (cluster.gpu_type or "").lower()
    return [each for name, each in ACCELERATORS.items() if name.lower().split()[0] == kind]


def _refusal(precision: PrecisionConfig, what: str, *, grouped: bool = False) -> ConfigError:
    arithmetic = _arithmetic(precision)
    able = list(dict.fromkeys(n.split()[0] for n, a in ACCELERATORS.items() if arithmetic in a.peak_flops))
    others = "precision.emulate=true to try it out, or precision=bf16"
    if not grouped:
        rule = f"{what} does not multiply in {arithmetic}"
    else:
        rule = f"{what} does not multiply groups of rows in {arithmetic}, as experts do"
        able = [name for name in able if name not in WITHOUT_GROUPS]
        filters = ",".join([*precision.filter_fqns, "moe.experts"])
        others = f"precision.filter_fqns=[{filters}], or {others}"
    return ConfigError("precision.linear", precision.linear, rule, f"{', '.join(able)}, or {others}")
