"""Efficiency constants: achieved fractions of data-sheet peaks, and fixed costs.

The defaults are fitted (harness/tools/plan/calibrate.py) on Table 1 and one row of Table 5 of torchtitan's
published tables (experiments/llama3_h100/published.csv) and on nothing else; the report prints the errors.
``harness plan calibrate=FOLDER`` fits them to measured runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.config.fields import from_dict
from harness.tools.plan.kernel_peaks import KERNELS
from harness.util.encoding import parse_object
from harness.util.errors import ConfigError, UserError


@dataclass(frozen=True)
class Constants:
    """Achieved fractions of peaks, and fixed costs."""

    matmul: float = 0.859
    """Speed of products of 16- or 32-bit matrices in training, as a fraction of the best that the device
    achieves (``kernel_peaks.py``), in addition to wave quantization of tiles. Fitted; 0.74 to 0.81 for
    typical products on an MI325X (rocm.blogs.amd.com/artificial-intelligence/taf-blog)."""
    float8: float = 0.778
    """The same for 8-bit products. Fitted, as ``matmul``, to 113 published rows by
    experiments/published/held_out.py."""
    rowwise: float = 0.8
    """Speed of float8 products with a scale for each row, as a fraction of those with one for each tensor:
    CUTLASS in place of cuBLAS; assumed, 0.75 to 0.9 (torchao/float8/README.md has tokens/s of both)."""
    spread: float = 0.0175
    """Standard deviation of devices' speed; a step takes as long as its slowest device. Eight devices of a
    node differ by 5 % and more (github.com/stas00/ml-engineering, compute/accelerator, "Not all
    accelerators are created equal")."""
    grouped: float = 0.8
    """Speed of experts' grouped products, as a fraction of a single product's; assumed, 0.7 to 0.95."""
    imbalance: float = 0.25
    """Standard deviation of the experts' loads, as a fraction of their mean, unless they are forced to be
    equal: the largest of 64 is 0.5 to 0.6 above the mean with an auxiliary loss (arXiv:2408.15664, table 2,
    MaxVio)."""
    attention: float = 1.0
    """Speed of fused attention, as a fraction of the best kernel (``kernel_peaks.py``)."""
    memory: float = 0.85
    """Fraction of the memory bandwidth for passes over tensors; assumed."""
    link: float = 0.75
    """Fraction of the bandwidth of a node's links for NCCL's collectives (nccl-tests: 330 to 370 of
    450 GB/s)."""
    network: float = 0.85
    """Fraction of the network's bandwidth for NCCL's collectives; assumed."""
    latency: float = 20e-6
    """Minimum seconds of a collective; assumed."""
    contention: float = 0.15
    """Fraction of computing that is lost while a collective runs beside it: NCCL's blocks take
    multiprocessors (24 of an H100's 132, forums.developer.nvidia.com/t/337991) and memory bandwidth;
    assumed, 0.1 to 0.4 (arXiv:2507.03114: 0.19 in the mean, at most 0.4)."""
    second_wave: float = 0.25
    """Fraction that is lost in addition where matrix products are persistent kernels: a block whose
    multiprocessor NCCL holds runs after all others. Assumed, 0 to 0.35: a product beside a collective takes
    up to twice the time, a loss of 0.5 in all (github.com/pytorch/pytorch/issues/143988)."""
    async_tp: float = 0.3
    """Fraction of tensor parallel's collectives that asynchronous tensor parallel hides: 0.15 to 0.5 by the
    gains of 5 to 12 % in torchtitan's tables. It counts for all of them, though those that sum several
    products (the reduce-scatters of backward) are not fused, with any batch size."""
    launch: float = 3e-6
    """Minimum seconds of a kernel; assumed."""
    host: float = 20e-6
    """Seconds of the host for each kernel, with the Python around it; assumed, 10e-6 to 40e-6 (rehearsals
    took 35e-6 and more on a shared machine). A step takes as long as the host needs to start it."""


@dataclass(frozen=True)
class Software:
    """What a trainer ran where it differs from this harness on torch 2.13; for published rows."""

    attention: str = ""
    """Kernel of fused attention, a name of ``kernel_peaks.py``; empty: the one that torch chooses."""
    fused_norm: bool = True
    """Whether an eager norm is one kernel, as an RMSNorm is since torch 2.9."""
    speed: float = 1.0
    """Speed of computing as a multiple of torch's kernels', of a trainer with other libraries."""
    joint_ends: bool = False
    """Whether embedding, last norm and output are one FSDP group, gathered from the first module to the last,
    and the last block stays gathered too: torchtitan before its pull request 1094 (July 2025). For memory."""
    repeats_keys: bool = False
    """Whether a ring has keys and values repeated for all query heads: torchtitan before its pull request
    2259 (January 2026; issue 1283). For memory."""
    keeps_outputs: bool = False
    """Whether a pipeline keeps outputs of stages, the last one's too, and gradients of their inputs until the
    next step: torch before its pull requests 153383 (May 2025) and 164329 (October 2025; issue 159251 on the
    last stage). For memory."""


# Constants that are never divisors.
_MAY_BE_ZERO = tuple(
    f"constants.{name}"
    for name in ("latency", "async_tp", "launch", "spread", "contention", "second_wave", "imbalance", "host")
)
_LARGEST = 1e30


@dataclass(frozen=True)
class Calibration:
    """Fitted constants."""

    constants: Constants
    source: str = ""
    """Runs that the constants were fitted on."""
    software: Software = field(default_factory=Software)

    @staticmethod
    def read(path: str) -> Calibration:
        """Read a calibration that ``write`` wrote.

        Raises:
            UserError: the file is missing, from another version, or has an invalid value.
        """
        where, works = f"calibration={path}", "would work: a file that harness plan calibrate=FOLDER wrote"
        # Reading a device such as /dev/zero would never end.
        if os.path.exists(path) and not os.path.isfile(path):
            raise UserError(f"{where}: is not a file; {works}")
        try:
            plain = parse_object(Path(path).read_bytes())
            constants = plain.get("constants")
            if plain.pop("accelerator", None) is not None:
                raise ValueError(
                    "an earlier version wrote it for a CPU, or for hardware that is in cluster.hardware now"
                )
            if isinstance(constants, dict) and constants.get("cores", 0) is None:
                del constants["cores"]
            read: Calibration = from_dict(Calibration, plain)
            if "grouped" not in plain["constants"]:
                # It has fractions of the data sheet's peak in place of fractions of achieved speeds.
                raise ValueError("an earlier version wrote it for a GPU")
            read._validate()
            return read
        except FileNotFoundError:
            raise UserError(f"{where}: no such file; {works}") from None
        except OSError as error:
            raise UserError(f"{where}: cannot be read: {error.strerror}; {works}") from None
        except (ConfigError, ValueError) as error:
            raise UserError(f"{where}: {error}; {works}") from None

    def _validate(self) -> None:
        """Check the numbers; most of them are divisors.

        Raises:
            ConfigError: naming the first invalid one.
        """
        for name, value in self._numbers():
            is_number = isinstance(value, int | float) and value <= _LARGEST  # false for NaN
            if not is_number or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
                kind = "a number of at least 0" if name in _MAY_BE_ZERO else "a positive number"
                raise ConfigError(name, value, f"must be {kind}")
        if self.software.attention and self.software.attention not in KERNELS:
            rule = f"must be one of: {', '.join(sorted(KERNELS))}"
            raise ConfigError("software.attention", self.software.attention, rule)
        if self.constants.async_tp > 1:
            raise ConfigError("constants.async_tp", self.constants.async_tp, "must be at most 1")

    def _numbers(self) -> Iterator[tuple[str, Any]]:
        """Yield the numbers with their dotted names in the file."""
        for name, value in asdict(self.constants).items():
            yield f"constants.{name}", value
        yield "software.speed", self.software.speed

    def write(self, path: str) -> None:
        """Write the calibration as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")
