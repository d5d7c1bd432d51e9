"""What hardware and software reach of what sheets promise: the few numbers that no sheet has.

The defaults are fitted (harness/plan/calibrate.py) on Table 1 and one row of Table 5 of torchtitan's
published tables (experiments/llama3_h100/published.csv) and on nothing else; the report prints what they
miss. ``python -m harness.plan calibrate=FOLDER`` fits them to measured runs, of a cluster or of a CPU's
cores.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.cluster.hardware import Accelerator
from harness.errors import UserError


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
            UserError: there is none, or it is of another version.
        """
        rule = "would work: a file that harness.plan calibrate=FOLDER wrote"
        try:
            # A calibration has a few hundred bytes; a device may have no end.
            if Path(path).exists() and not Path(path).is_file():
                raise UserError(f"calibration={path}: is no file; {rule}")
            plain: dict[str, Any] = json.loads(Path(path).read_text())
            accelerator = plain.pop("accelerator")
            return Calibration(
                Constants(**plain.pop("constants")),
                None if accelerator is None else Accelerator(**accelerator),
                **plain,
            )
        except FileNotFoundError:
            raise UserError(f"calibration={path}: no such file; {rule}") from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"calibration={path}: cannot be read as a calibration: {error}") from error

    def write(self, path: str) -> None:
        """Writes it as JSON."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")
