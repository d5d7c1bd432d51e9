"""``tensors.bin``: numbers of every tensor of a model at some steps, in records of one size; others like it.

``tensors.json`` says what is in a record: the step (int64), then for each of ``values`` a float32
for each of ``names``. ``activations.bin`` has numbers of every block. A plot reads a whole run at
once, and a thousand columns in metrics.jsonl would slow everything else down. Imports no torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.util.encoding import parse_object
from harness.util.errors import UserError
from harness.util.files import write_atomically

TENSORS = "tensors"
ACTIVATIONS = "activations"
"""Names of files, without their ends."""
SWITCHES = {TENSORS: "metrics.tensors=norms", ACTIVATIONS: "metrics.activations=true"}


@dataclass(frozen=True)
class TensorRecords:
    """What a run has written so far.

    Attributes:
        values: the words that name what was measured.
        names: the model's tensors, or its blocks, in its order; NaN is what one does not have.
        sizes: elements of each tensor; of blocks none.
        steps: int64 [records].
        data: float32 [records, values, names].
    """

    values: list[str]
    names: list[str]
    sizes: list[int]
    steps: np.ndarray[Any, Any]
    data: np.ndarray[Any, Any]


class TensorFile:
    """The file that a run appends to, kept through crashes and resumes.

    Args:
        folder: the run folder.
        start_step: records of later steps are dropped, because the run writes them again.
        name: TENSORS or ACTIVATIONS.

    Raises:
        UserError: the file that is there has other numbers or tensors.
    """

    def __init__(
        self,
        folder: Path,
        values: list[str],
        names: list[str],
        sizes: list[int],
        start_step: int,
        name: str = TENSORS,
    ) -> None:
        self._record = _record(values, names)
        header = {"values": values, "names": names, "sizes": sizes}
        kept = b""
        described, data = files_of(folder, name)
        if described.exists():
            found = read_tensors(folder, name)
            if (found.values, found.names) != (values, names):
                raise UserError(
                    f"{described}: has other numbers than this version writes; "
                    f"would work: move it and {data.name} away"
                )
            is_kept = found.steps <= start_step
            kept = self._encode(found.steps[is_kept], found.data[is_kept])
        write_atomically(described, json.dumps(header).encode() + b"\n")
        write_atomically(data, kept)
        self._file = data.open("ab")

    def write(self, step: int, data: np.ndarray[Any, Any]) -> None:
        """Append the numbers [values, names] of a step."""
        self._file.write(self._encode(np.array([step]), data[None]))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _encode(self, steps: np.ndarray[Any, Any], data: np.ndarray[Any, Any]) -> bytes:
        records = np.empty(len(steps), self._record)
        records["step"] = steps
        records["data"] = data
        return records.tobytes()


def files_of(folder: Path, name: str = TENSORS) -> tuple[Path, Path]:
    """Return the paths of the header and of the records."""
    return folder / f"{name}.json", folder / f"{name}.bin"


def read_tensors(folder: Path, name: str = TENSORS) -> TensorRecords:
    """Read what a run has written; a record that is being written is left out.

    Raises:
        UserError: the run has written no numbers of tensors, or the header is damaged.
    """
    described, data = files_of(folder, name)
    try:
        header = parse_object(described.read_bytes())
        values, names, sizes = header["values"], header["names"], header["sizes"]
        record = _record(values, names)
        content = data.read_bytes()
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{described}: damaged: {error}; would work: move it and {data.name} away"
        ) from None
    except FileNotFoundError:
        raise UserError(
            f"{folder}: has no {data.name}; would work: a run with {SWITCHES[name]}"
        ) from None
    records = np.frombuffer(content, record, len(content) // record.itemsize)
    return TensorRecords(values, names, sizes, records["step"], records["data"])


def _record(values: list[str], names: list[str]) -> np.dtype[Any]:
    return np.dtype([("step", "<i8"), ("data", "<f4", (len(values), len(names)))])
