"""What hardware and software reach of what sheets promise: the few numbers that no sheet has.

The defaults are fitted (harness/plan/calibrate.py) on Table 1 and one row of Table 5 of torchtitan's
published tables (experiments/llama3_h100/published.csv) and on nothing else; the report prints what they
miss. ``python -m harness.plan calibrate=FOLDER`` fits them to measured runs, of a cluster or of a CPU's
cores.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.cluster.hardware import Accelerator
from harness.config import from_dict
from harness.errors import ConfigError, UserError
from harness.metrics.encoding import parse_object


@dataclass(frozen=True)
class Constants:
    """Shares of peaks, and times that no peak bounds."""

    matmul: float = 0.493
    """Share of the peak that products of large matrices in 16 or 32 bits reach in a long run, after tiles
    that do not fill the last wave are counted. Fitted; the devices of those tables had 500 of 700 W."""
    float8: float = 0.403
    """The same of float8's peak. Fitted."""
    attention: float = 0.35
    """Share of the 16-bit peak that fused attention reaches: FlashAttention-2's on an H100 (arXiv:2407.08608,
    abstract)."""
    memory: float = 0.85
    """Share of the memory's bandwidth that passes over tensors reach; assumed."""
    link: float = 0.75
    """Share of a node's links that NCCL's collectives reach (nccl-tests: 330 to 370 of 450 GB/s)."""
    network: float = 0.85
    """Share of the network that they reach; assumed."""
    latency: float = 20e-6
    """Seconds that a collective takes however small it is; assumed."""
    async_tp: float = 0.5
    """Share of tensor parallel's collectives that asynchronous tensor parallel hides; assumed."""
    launch: float = 3e-6
    """Seconds that a kernel takes however small it is; on a CPU, an operation; assumed."""
    cores: int | None = None
    """Cores that all ranks of a node share, where they do: a CPU. None: each has a device to itself."""


# What nothing is divided by.
_MAY_BE_ZERO = ("constants.latency", "constants.async_tp", "constants.launch")
_LARGEST = 1e30


@dataclass(frozen=True)
class Calibration:
    """Constants, and the hardware they are of."""

    constants: Constants
    accelerator: Accelerator | None = None
    """Hardware that was measured, where no table has it: a CPU."""
    source: str = ""
    """What it was fitted on."""

    @staticmethod
    def read(path: str) -> Calibration:
        """Reads a calibration that ``write`` wrote.

        Raises:
            UserError: there is none, it is of another version, or a value cannot be.
        """
        where, works = f"calibration={path}", "would work: a file that harness.plan calibrate=FOLDER wrote"
        # A calibration has a few hundred bytes; a device may have no end.
        if os.path.exists(path) and not os.path.isfile(path):
            raise UserError(f"{where}: is no file; {works}")
        try:
            read: Calibration = from_dict(Calibration, parse_object(Path(path).read_bytes()))
            read._validate()
            return read
        except FileNotFoundError:
            raise UserError(f"{where}: no such file; {works}") from None
        except OSError as error:
            raise UserError(f"{where}: cannot be read: {error.strerror}; {works}") from None
        except (ConfigError, ValueError) as error:
            raise UserError(f"{where}: {error}; {works}") from None

    def _validate(self) -> None:
        """Checks the numbers, with which the plan divides.

        Raises:
            ConfigError: naming the first that cannot be.
        """
        for name, value in self._numbers():
            is_number = isinstance(value, int | float) and value <= _LARGEST  # which NaN is not
            if not is_number or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
                kind = "a number from 0 on" if name in _MAY_BE_ZERO else "a positive number"
                raise ConfigError(name, value, f"must be {kind}")
        if self.constants.async_tp > 1:
            raise ConfigError("constants.async_tp", self.constants.async_tp, "is a share, at most 1")

    def _numbers(self) -> Iterator[tuple[str, Any]]:
        """Yields the numbers by their dotted names in the file."""
        for name, value in asdict(self.constants).items():
            if name != "cores" or value is not None:
                yield f"constants.{name}", value
        if self.accelerator is not None:
            for name in ("memory_gib", "memory_bandwidth", "link_bandwidth", "units"):
                yield f"accelerator.{name}", getattr(self.accelerator, name)
            for dtype in {"float32": None, "bfloat16": None, **self.accelerator.peak_flops}:
                yield f"accelerator.peak_flops.{dtype}", self.accelerator.peak_flops.get(dtype)

    def write(self, path: str) -> None:
        """Writes it as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")
