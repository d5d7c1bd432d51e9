"""Which linears and experts multiply in float8, and on which hardware (no torch)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.config.cluster import ClusterConfig
from harness.config.model import ModelConfig, of_one_model
from harness.config.precision import GROUPED, PrecisionConfig
from harness.model.spec import Split, TensorSpec, modules
from harness.util.errors import ConfigError, divisors
from harness.util.hardware import ACCELERATORS, Accelerator

if TYPE_CHECKING:
    import torch

EXPERTS = ".moe.experts"
KEPT = {
    Split.ROUTER: "scores are float32",
    Split.STREAM: "joins two streams",
    Split.ENTRY: "reads the model's inputs",
    Split.REPLICATED: "has one row per sample",
    Split.MODULATION: "has one row per sample",
    Split.OUTPUT: "writes the model's outputs",
}
"""Linears that never multiply in float8, with the reason."""


@dataclass(frozen=True)
class Linears:
    """Linears of a model and experts of its blocks, by whether they multiply in float8.

    Attributes:
        converted: names of the linears and experts that multiply in float8.
        kept: the other names, with the reason.
    """

    converted: tuple[str, ...]
    kept: dict[str, str]

    def describe(self, linear: str) -> str:
        """One line: the number of converted linears; the other linears with reasons."""
        names = [*self.converted, *self.kept]
        experts = sum(map(is_experts, self.converted)), sum(map(is_experts, names))
        count = f"{len(self.converted) - experts[0]} of {len(names) - experts[1]} linears"
        if experts[1]:
            count += f" and the experts of {experts[0]} of {experts[1]} blocks"
        reasons: dict[str, dict[str, None]] = {}
        for name, reason in self.kept.items():
            reasons.setdefault(reason, {})[_pattern(name)] = None
        kept = [f"not {', '.join(names)} ({reason})" for reason, names in reasons.items()]
        return "; ".join([f"{linear}: {count}", *kept])

    @property
    def has_experts(self) -> bool:
        """Whether experts multiply in float8."""
        return any(map(is_experts, self.converted))


@of_one_model
def sort_linears(model: ModelConfig, precision: PrecisionConfig) -> Linears:
    """Select the linears and experts to convert. The result does not depend on the layout.

    Raises:
        ConfigError: a filter matches nothing, or nothing is left to convert.
    """
    linears = linears_of(model)
    converted = []
    kept = {}
    for name, linear in linears.items():
        rows = linear.outputs
        columns = linear.inputs
        matching = [part for part in precision.filter_fqns if part in name]
        if matching:
            kept[name] = "filter_fqns"
        elif linear.split in KEPT:
            kept[name] = KEPT[linear.split]
        elif name == "output" and model.tied_embeddings:
            kept[name] = "tied to the embedding table"
        elif is_experts(name) and precision.linear not in GROUPED:
            kept[name] = f"torchao has no grouped product in {precision.linear}"
        elif rows % (block := _block(name, precision)) or columns % block:
            kept[name] = f"{rows} x {columns}, not multiples of {block}"
        elif is_experts(name):
            converted.append(name)
        elif precision.auto_filter_small_kn and is_small(precision.linear, rows, columns):
            kept[name] = f"{rows} x {columns}, too small to gain"
        else:
            converted.append(name)
    unmatched = [
        part for part in precision.filter_fqns if not any(part in name for name in linears)
    ]
    if unmatched:
        works = sorted({f"[{_filter(name)}]" for name in linears})
        raise ConfigError("precision.filter_fqns", unmatched[0], "is in no linear's name", works)
    if not converted:
        reasons = "; ".join(sorted(set(kept.values())))
        raise ConfigError(
            "precision.linear",
            precision.linear,
            f"no linear is left to convert ({reasons})",
            ["none"],
        )
    return Linears(tuple(converted), kept)


def check_layout(
    linears: Linears,
    model: ModelConfig,
    precision: PrecisionConfig,
    tp: int,
    rows: int,
    tokens: int,
    *,
    splits_experts: bool = False,
) -> None:
    """Check that the dimensions of a rank's products are multiples of the format's block.

    A linear is never skipped because of the layout: two layouts would then compute different
    numbers.

    Args:
        rows: sequences per forward pass of a linear.
        tokens: tokens of each sequence on one rank.
        splits_experts: whether tensor parallelism splits every expert.
    """
    split = {
        name: (
            linear.inputs if linear.split is Split.ROW else linear.outputs,
            _block(name, precision),
        )
        for name, linear in linears_of(model).items()
        if name in linears.converted and (splits_experts or not linear.is_expert)
    }
    broken = {
        name: (length, block) for name, (length, block) in split.items() if length % (tp * block)
    }
    if broken:
        names = list(dict.fromkeys(_filter(name) for name in broken))
        name, (length, block) = next(iter(broken.items()))
        degrees = [
            n
            for n in divisors(tp)
            if not any(length % (n * block) for length, block in split.values())
        ]
        filters = ",".join([*precision.filter_fqns, *names])
        rule = (
            f"a rank would have {length / tp:g} of the {length} rows or columns of {_pattern(name)}, and "
            f"{precision.linear} needs multiples of {block}"
        )
        works = f"{', '.join(map(str, degrees))}, or precision.filter_fqns=[{filters}]"
        raise ConfigError("parallelism.tp", tp, rule, works)
    # Weight gradients are sums over tokens; rowwise_hp computes them in param_dtype.
    block = precision.block
    if precision.linear != "float8_rowwise_hp" and rows * tokens % block:
        rule = (
            f"a linear takes {rows} x {tokens} tokens at once, and {precision.linear} needs a multiple of "
            f"{block}"
        )
        raise ConfigError("training.seq_len", tokens, rule, f"a multiple of {block}")


def warning_of_eager(precision: PrecisionConfig, *, compiled: bool) -> str | None:
    """Warning for a job on GPUs whose float8 casts are not fused; None if fused, or without casts.

    Kernels per linear and step, counted with 42 linears in torchao 0.18: 101 in float8_rowwise, 77
    in float8_tensorwise and 67 in float8_rowwise_hp.
    """
    if compiled or precision.emulate or precision.linear == "none":
        return None
    return (
        f"precision.linear={precision.linear} casts in dozens of small kernels per linear, and GPUs wait for "
        "the host to launch them; would be faster: compile=on, which fuses them"
    )


@of_one_model
def linears_of(model: ModelConfig) -> dict[str, TensorSpec]:
    """The matrix of every linear, in the decoder's order, then the first matrix of every block's experts."""
    linears: dict[str, TensorSpec] = {}
    experts: dict[str, TensorSpec] = {}
    for module in modules(model):
        matrices = [tensor for tensor in module.tensors if tensor.is_matrix]
        if matrices:
            (experts if matrices[0].is_expert else linears)[module.name] = matrices[0]
    return linears | experts


def is_experts(name: str) -> bool:
    """Whether a name is that of a block's experts, not of a linear."""
    return name.endswith(EXPERTS)


def is_small(linear: str, rows: int, columns: int) -> bool:
    """Whether float8 is not faster than bfloat16, by the tables of torchao's ``_auto_filter_for_recipe``."""
    if linear == "float8_tensorwise":
        return columns <= 4096 and rows <= 1024
    return rows <= 2048 or columns <= 1024 or (rows <= 4096 and columns <= 2048)


def _block(name: str, precision: PrecisionConfig) -> int:
    return precision.expert_block if is_experts(name) else precision.block


def _filter(name: str) -> str:
    """Filter that matches the same linear of every block; for experts, it does not match shared experts."""
    return EXPERTS.removeprefix(".") if is_experts(name) else name.split(".")[-1]


def _pattern(name: str) -> str:
    """Pattern for the same linear of every block: ``layers.*.attention.wq``."""
    return re.sub(r"\.\d+\.", ".*.", name)


# Lowest NVIDIA compute capability whose tensor cores support the format (CUDA C++ programming
# guide).
CAPABILITY = {"float8": (8, 9), "mxfp8": (10, 0)}
# Major compute capabilities for which torch and torchao have grouped products, which experts need
# (torch._scaled_grouped_mm: "[9.0, 10.0], or ROCm MI300+"; torchao's mxfp8 kernels: 10.x).
GROUPED_CAPABILITY = {"float8": (9, 10), "mxfp8": (10,)}
# Ada: float8 products, but no grouped ones.
WITHOUT_GROUPS = ("L4", "L40S", "RTX 4090")
# AMD's CDNA 3 (gfx94x) and later, as torch numbers it; torchao's mxfp8 kernels are for NVIDIA.
ROCM_CAPABILITY = {"float8": (9, 4)}


def require_hardware(
    precision: PrecisionConfig, cluster: ClusterConfig, gpus: int | None, *, experts: bool
) -> None:
    """Check the hardware of a job as far as it is known; ranks check the rest.

    Args:
        gpus: GPUs of this machine if the job runs here, else None.
        experts: whether experts multiply in the format too.
    """
    if precision.linear == "none" or precision.emulate:
        return
    if cluster.device == "cpu" or (cluster.device == "auto" and gpus == 0):
        raise _refusal(precision, "a CPU")
    what = cluster.accelerator or f"cluster.gpu_type={cluster.gpu_type}"
    known = _accelerators_of(cluster)
    if known and not any(_arithmetic(precision) in each.peak_flops for each in known):
        raise _refusal(precision, what)
    if experts and known and all(each.name in WITHOUT_GROUPS for each in known):
        raise _refusal(precision, what, grouped=True)


def require_device(precision: PrecisionConfig, device: torch.device, *, experts: bool) -> None:
    """Check a rank's device."""
    import torch

    if precision.linear == "none" or precision.emulate:
        return
    if device.type == "cpu":
        raise _refusal(precision, "a CPU")
    needed = (ROCM_CAPABILITY if torch.version.hip else CAPABILITY).get(_arithmetic(precision))
    if needed is None or torch.cuda.get_device_capability(device) < needed:
        raise _refusal(precision, torch.cuda.get_device_name(device))
    major = torch.cuda.get_device_capability(device)[0]
    if (
        experts
        and not torch.version.hip
        and major not in GROUPED_CAPABILITY[_arithmetic(precision)]
    ):
        raise _refusal(precision, torch.cuda.get_device_name(device), grouped=True)


def _arithmetic(precision: PrecisionConfig) -> str:
    return "mxfp8" if precision.linear == "mxfp8" else "float8"


def _accelerators_of(cluster: ClusterConfig) -> list[Accelerator]:
    """Accelerators that the nodes may have; empty if unknown."""
    if cluster.gpu is not None:
        return [cluster.gpu]
    kind = (cluster.gpu_type or "").lower().replace("_", " ")
    return [each for name, each in ACCELERATORS.items() if _kind(name).lower() == kind]


def _kind(accelerator: str) -> str:
    """Name without board and memory: H100 for "H100 SXM"."""
    return re.sub(r" (SXM|PCIe|NVL|\d+GB).*", "", accelerator)


def _refusal(precision: PrecisionConfig, what: str, *, grouped: bool = False) -> ConfigError:
    arithmetic = _arithmetic(precision)
    able = list(
        dict.fromkeys(_kind(n) for n, a in ACCELERATORS.items() if arithmetic in a.peak_flops)
    )
    others = "precision.emulate=true to try it out, or precision=bf16"
    if not grouped:
        rule = f"{what} does not multiply in {arithmetic}"
    else:
        rule = f"{what} does not multiply groups of rows in {arithmetic}, as experts do"
        able = [name for name in able if name not in WITHOUT_GROUPS]
        filters = ",".join([*precision.filter_fqns, "moe.experts"])
        others = f"precision.filter_fqns=[{filters}], or {others}"
    return ConfigError(
        "precision.linear", precision.linear, rule, f"{', '.join(able)}, or {others}"
    )
