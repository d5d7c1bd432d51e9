"""An accelerator in numbers of the user's own."""

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from harness.config.fields import label
from harness.util.errors import ConfigError
from harness.util.hardware import ACCELERATORS, Accelerator
from harness.util.words import meant

# Numbers that a new accelerator must have, with those of the H100 as examples.
_NEEDED = {
    "half_tflops": "989",
    "float32_tflops": "67",
    "memory_gib": "80",
    "memory_tb_s": "3.35",
    "link_gb_s": "450",
    "units": "132",
}


@dataclass(frozen=True)
class HardwareConfig:
    """Numbers of an accelerator that ``util/hardware.py`` does not have, or other numbers than its own."""

    device_name: str | None = label(None)
    """Name that the driver reports (``torch.cuda.get_device_name()``), by which runs recognize the
    accelerator; null: as in harness/util/hardware.py."""
    half_tflops: float | None = label(None, above=0)
    """Dense TFLOP/s of products in bfloat16 and float16, without sparsity."""
    float32_tflops: float | None = label(None, above=0)
    """TFLOP/s in float32, without tensor cores on NVIDIA."""
    float8_tflops: float | None = label(None, above=0)
    """Dense TFLOP/s in float8; null for a new accelerator: it does not multiply in float8."""
    memory_gib: float | None = label(None, above=0)
    """Device memory, as in the data sheet."""
    memory_tb_s: float | None = label(None, above=0)
    """Memory bandwidth in TB/s."""
    link_gb_s: float | None = label(None, above=0)
    """Bandwidth of these links in GB/s, in one direction. Data sheets print the sum of both."""
    units: int | None = label(None, least=1)
    """Streaming multiprocessors, or compute units."""

    def validate(self, accelerator: str | None) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if accelerator is None and given:
            name = f"cluster.hardware.{given[0]}"
            works = "cluster.accelerator=NAME: a new name, or one of harness/util/hardware.py"
            raise ConfigError(name, getattr(self, given[0]), "no accelerator is named", works)
        if accelerator is None or accelerator in ACCELERATORS:
            return
        if not given or not accelerator:
            close = meant(accelerator, ACCELERATORS, inside=True) or ["H100 SXM"]
            rest = ", ".join([*close[1:], "null, a name of harness/util/hardware.py"])
            works = f"'cluster.accelerator={close[0]}', {rest}, a new one with cluster.hardware"
            raise ConfigError("cluster.accelerator", accelerator or "''", "no such choice", works)
        for name, example in _NEEDED.items():
            if getattr(self, name) is None:
                rule = (
                    f"must be given, because harness/util/hardware.py does not have {accelerator}"
                )
                raise ConfigError(
                    f"cluster.hardware.{name}", None, rule, f"{example}, if it were an H100"
                )


@lru_cache
def described(name: str, own: HardwareConfig) -> Accelerator | None:
    """Return the accelerator with this name and the user's own numbers; None if it is unknown."""
    known = ACCELERATORS.get(name)
    if own == HardwareConfig():
        return known
    numbers: dict[str, Any] = {
        "memory_gib": own.memory_gib,
        "units": own.units,
        "memory_bandwidth": own.memory_tb_s and own.memory_tb_s * 1e12,
        "link_bandwidth": own.link_gb_s and own.link_gb_s * 1e9,
    }
    peaks = {
        "bfloat16": own.half_tflops,
        "float16": own.half_tflops,
        "float32": own.float32_tflops,
        "float8": own.float8_tflops,
    }
    given = {name: number for name, number in numbers.items() if number is not None}
    given["peak_flops"] = {} if known is None else dict(known.peak_flops)
    for dtype, tflops in peaks.items():
        if tflops is not None:
            given["peak_flops"][dtype] = tflops * 1e12
    if known is None:
        return Accelerator(**given, name=name, source="cluster.hardware", link="in-node")
    return replace(known, **given, source=f"{known.source}, changed by cluster.hardware")
