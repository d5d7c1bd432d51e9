"""The tensors of a folder of safetensors, under the decoder's names; quantized weights are dequantized."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from harness.config.model import ModelConfig
from harness.util.errors import UserError
from harness.util.files import is_file_name
from harness.weights.config_json import read_object
from harness.weights.families.core import Shape
from harness.weights.quantization import GROUP, Find, QuantizedTensor, part_names
from harness.weights.source import TensorFacts
from harness.weights.tensor_names import own_name

INDEX_ENDING = "safetensors.index.json"
INDEX, SINGLE = f"model.{INDEX_ENDING}", "model.safetensors"

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SHOWN_CHARACTERS = 40  # of a wrong value in one line of error

# All values of a byte; a lookup is faster than a conversion by torch.
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
# E2M1 (OCP Microscaling Formats 1.0, 5.3.3). Two values of a byte, the first in the low bits, are one int64.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_PAIRS = torch.stack([_E2M1.repeat(16), _E2M1.repeat_interleave(16)], dim=1).view(torch.int64).flatten()
_ROWS = 128  # dequantized at a time, to stay in the processor's cache


class StoredTensors:
    """The decoder's tensors in a folder of safetensors.

    Attributes:
        tensors: shape and dtype of each; that of quantized weights is ``dequantized``.

    Args:
        folder: one or more safetensors files, with or without an index.
        model: the model.
        find: finds quantized weights; None if there are none.
        dequantized: dtype of quantized weights in ``tensors``.

    Raises:
        UserError: a file is missing or damaged, a tensor is in two files, or has values that are not read.
    """

    def __init__(self, folder: Path, model: ModelConfig, find: Find | None, dequantized: torch.dtype) -> None:
        self._files: dict[str, tuple[Path, str]] = {}
        stored: dict[str, tuple[Shape, str]] = {}
        for file in _weight_files(folder):
            for in_file, facts in _file_facts(file):
                name = own_name(model, in_file)
                if name is None:
                    continue
                if name in stored:
                    raise UserError(
                        f"{folder}: {in_file} is in {self._files[name][0].name} and in {file.name}"
                    )
                stored[name], self._files[name] = facts, (file, in_file)
        try:
            self._quantized = find(stored) if find else {}
        except UserError as error:
            raise UserError(f"{folder}: {error}") from None
        parts = part_names(stored, self._quantized)
        self.tensors: dict[str, TensorFacts] = {
            name: TensorFacts(shape, self._dtype(name, dtype))
            for name, (shape, dtype) in stored.items()
            if name not in parts
        } | {name: TensorFacts(each.shape, dequantized) for name, each in self._quantized.items()}

    def _dtype(self, name: str, dtype: str) -> torch.dtype:
        if dtype not in DTYPES:
            file, in_file = self._files[name]
            raise UserError(f"{file}: {in_file} has {dtype} values; would work: {', '.join(DTYPES)}")
        return DTYPES[dtype]

    def read(self, name: str) -> Tensor:
        """Return one tensor; a quantized weight is in float32.

        Raises:
            UserError: its file or its scales are damaged.
        """
        if name in self._quantized:
            return self.read_slice(name, tuple(slice(0, size) for size in self.tensors[name].shape))
        return self._stored(name)

    def read_slice(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Return a slice of one tensor, reading no more than its blocks; a quantized weight is in float32.

        Args:
            name: the tensor.
            part: a slice of each dimension, with start and stop; the last may have a step.

        Raises:
            UserError: its file or its scales are damaged.
        """
        of = self._quantized.get(name)
        if of is None:
            return self._stored_slice(name, part)
        return self._mxfp4(of, *part) if of.block is None else self._fp8(of, of.block, *part)

    def _fp8(self, of: QuantizedTensor, block: tuple[int, int], rows: slice, columns: slice) -> Tensor:
        grid = tuple(-(-length // size) for length, size in zip(of.shape, block, strict=True))
        scales = self._finite(of.scales, self._stored(of.scales).float()).reshape(grid)
        down, across = (_indices(part) // size for part, size in zip((rows, columns), block, strict=True))
        factors = scales if grid[1] == 1 else scales.index_select(1, across)
        bits = self._stored_slice(of.values, (rows, columns)).view(torch.uint8)
        weight = torch.empty(bits.shape)
        for first in range(0, len(bits), _ROWS):
            chunk = slice(first, first + _ROWS)
            values = _E4M3.index_select(0, bits[chunk].reshape(-1).int()).view(bits[chunk].shape)
            torch.mul(values, factors.index_select(0, down[chunk]), out=weight[chunk])
        return weight

    def _mxfp4(self, of: QuantizedTensor, experts: slice, inputs: slice, outputs: slice) -> Tensor:
        groups = slice(inputs.start // GROUP, -(-inputs.stop // GROUP))
        where = (experts, outputs, groups)
        exponents = self._stored_slice(of.scales, where).view(torch.float8_e8m0fnu)
        scales = self._finite(of.scales, exponents.float())
        pairs = _PAIRS.index_select(0, self._stored_slice(of.values, where).reshape(-1).int())
        values = pairs.view(torch.float32).view(*scales.shape, GROUP).mul_(scales.unsqueeze(-1)).flatten(-2)
        skipped = inputs.start - groups.start * GROUP
        return values[..., skipped : skipped + inputs.stop - inputs.start].transpose(-1, -2)

    def _finite(self, name: str, scales: Tensor) -> Tensor:
        if not scales.isfinite().all():
            file, in_file = self._files[name]
            raise UserError(f"{file}: {in_file} has a scale that is NaN or infinite")
        return scales

    def _stored(self, name: str) -> Tensor:
        # Open the file for every tensor: pages of a mapped file stay in memory while it is open.
        file, in_file = self._files[name]
        with _opened(file) as opened:
            tensor: Tensor = opened.get_tensor(in_file)
        # Depending on the library's version, the tensor is a view of the mapped file.
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()

    def _stored_slice(self, name: str, part: tuple[slice, ...]) -> Tensor:
        file, in_file = self._files[name]
        with _opened(file) as opened:
            # The library reads slices without a step.
            values: Tensor = opened.get_slice(in_file)[tuple(slice(each.start, each.stop) for each in part)]
            return values[tuple(slice(None, None, each.step) for each in part)].clone()


def _indices(part: slice) -> Tensor:
    return torch.arange(part.start, part.stop, part.step or 1)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a complete safetensors file: {' '.join(str(error).split())}") from None


def _file_facts(file: Path) -> list[tuple[str, tuple[Shape, str]]]:
    """Name, shape and dtype of every tensor in a file."""
    with _opened(file) as opened:
        parts = [(name, opened.get_slice(name)) for name in opened.keys()]  # noqa: SIM118 - not a mapping
        return [(name, (tuple(part.get_shape()), part.get_dtype())) for name, part in parts]


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers or diffusers would read; the folder may also hold other formats."""
    index_name = INDEX
    if not (folder / INDEX).exists():  # diffusers' files have another name
        index_name = next((file.name for file in sorted(folder.glob(f"*.{INDEX_ENDING}"))), INDEX)
    if (folder / index_name).exists():
        index = read_object(folder / index_name)
        if not isinstance(index.get("weight_map"), dict):
            raise UserError(f"{folder / index_name}: has no weight_map")
        names = list(index["weight_map"].values())
        for name in names:
            if not is_file_name(name) or not name.endswith(".safetensors"):
                shown = json.dumps(name)[:_SHOWN_CHARACTERS]
                raise UserError(f"{folder / index_name}: weight_map has {shown} instead of a file name")
        files = [folder / name for name in sorted(set(names))]
        missing = [file.name for file in files if not _is_file(file)]
        if missing:
            raise UserError(
                f"{folder}: {missing[0]} is missing, one of {len(files)} files that {index_name} names"
            )
        return files
    return [folder / SINGLE] if (folder / SINGLE).exists() else sorted(folder.glob("*.safetensors"))


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # a name that is too long
        return False
