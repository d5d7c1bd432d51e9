"""Tensors in Hugging Face's layout: which of ours are in them, and those of a folder of safetensors.

``harness.weights.families`` has the differences between families. Values need no change, because
``harness.model.rope`` rotates the same pairs as each family's files.
"""

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from harness.config.model import FAMILIES, ModelConfig
from harness.model.spec import tensor_shapes
from harness.util.errors import UserError
from harness.util.files import is_file_name
from harness.weights.config_json import family_of, read_object
from harness.weights.families.core import Shape, TensorMapping
from harness.weights.quantization import GROUP, Find, QuantizedTensor, part_names
from harness.weights.source import TensorFacts, WeightSource, folded

HF_HEAD = "lm_head.weight"
_BUFFER = ".rotary_emb.inv_freq"  # in older files; it can be computed
_SHOWN = 3  # names in one line of error

INDEX_ENDING = "safetensors.index.json"
INDEX = f"model.{INDEX_ENDING}"
SINGLE = "model.safetensors"

# -- names and shapes ----


def hf_tensors(model: ModelConfig) -> dict[str, list[TensorMapping]]:
    """For each of Hugging Face's tensors, our tensors in it, in our order."""
    return _grouped(family_of(model).pieces(model), lambda piece: piece.theirs)


def our_tensors(model: ModelConfig, *, copies: bool = False) -> dict[str, list[TensorMapping]]:
    """The locations of each of our tensors in theirs, in our order, or of their additional ``copies``."""
    pieces = (piece for piece in family_of(model).pieces(model) if piece.is_copy == copies)
    return _grouped(pieces, lambda piece: piece.ours)


def _grouped(pieces: Iterable[TensorMapping], key: Any) -> dict[str, list[TensorMapping]]:
    groups: dict[str, list[TensorMapping]] = {}
    for piece in pieces:
        groups.setdefault(key(piece), []).append(piece)
    return groups


def hf_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Shapes of Hugging Face's tensors by name."""
    ours = tensor_shapes(model)
    return {
        name: pieces[0].their_shape(ours[pieces[0].ours])
        for name, pieces in hf_tensors(model).items()
    }


def own_name(model: ModelConfig, name: str) -> str | None:
    """A tensor's name without the prefix of a larger model; None if it is not the decoder's."""
    family = FAMILIES[model.family]
    nested = family.nested
    others = (nested.others if nested else ()) + (family.ignored(model) if family.ignored else ())
    if name.endswith(_BUFFER) or name.startswith(others):
        return None
    return name.replace(nested.prefix, "", 1) if nested else name


def check_hf_tensors(
    model: ModelConfig, found: Mapping[str, Shape], where: str = "the checkpoint"
) -> None:
    """Check that a checkpoint at ``where`` has the model's tensors; ``found`` has their shapes by name.

    Redundant tensors are allowed: the output projection of a model with tied embeddings, the
    rotation's inverse frequencies, and tensors that are not the decoder's (``own_name``). Copies
    may be missing.
    """
    found = {
        own: shape for name, shape in found.items() if (own := own_name(model, name)) is not None
    }
    shapes = hf_shapes(model)
    optional = {piece.theirs for piece in family_of(model).pieces(model) if piece.is_copy}
    if model.tied_embeddings:
        shapes[HF_HEAD] = (model.vocab_size, model.dim)
        optional.add(HF_HEAD)
    check_tensors(where, model, found, shapes, optional)


def check_tensors(
    where: str,
    model: ModelConfig,
    found: Mapping[str, Shape],
    shapes: Mapping[str, Shape],
    optional: Collection[str] = (),
) -> None:
    """Compare a checkpoint's tensors with the model's; UserError names the first that differ.

    The names in ``optional`` may be missing.
    """
    groups = {
        "missing": [name for name in shapes if name not in found and name not in optional],
        "unexpected": [name for name in found if name not in shapes],
        "of another shape": [
            f"{name} is {list(shape)} and not {list(shapes[name])}"
            for name, shape in found.items()
            if tuple(shape) != shapes.get(name, tuple(shape))
        ],
    }
    wrong = []
    for what, names in groups.items():
        if names:
            shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            wrong.append(f"{len(names)} {what} ({shown})")
    if wrong:
        raise UserError(
            f"{where}: the tensors are not those of model={model.name}: {', '.join(wrong)}"
        )


# -- values ----

Read = Callable[[str, tuple[slice, ...]], Tensor]
"""Reads a slice of a Hugging Face tensor: (name, slice of each dimension; the last may have a
step)."""


def fill(
    out: Tensor, pieces: Sequence[TensorMapping], shape: Shape, ranges: Sequence[range], read: Read
) -> None:
    """Fill a slice of one of our tensors, which has this shape; experts are read one at a time.

    ``out`` has any dtype, on any device; ``ranges`` are its indices in each dimension of our
    tensor.
    """
    if not out.numel():
        return
    for piece in pieces:
        if piece.expert is not None:
            if piece.expert in ranges[0]:
                row = piece.expert - ranges[0].start
                out[row].copy_(_read(piece, shape, ranges[1:], read))
        elif piece.slot.rows is not None:
            for own, theirs in piece.slot.rows.runs(ranges[0]):
                out[own].copy_(_read(piece, shape, [theirs, *ranges[1:]], read))
        elif piece.slot.half is None and not piece.slot.transposed:
            out.copy_(_read(piece, shape, ranges, read))
        else:  # one tensor holds all experts
            for row, expert in enumerate(ranges[0]):
                one = [range(expert, expert + 1), *ranges[1:]]
                out[row].copy_(_read(piece, shape, one, read)[0])


def _read(piece: TensorMapping, shape: Shape, ranges: Sequence[range], read: Read) -> Tensor:
    slot = piece.slot
    wanted = [slice(each.start, each.stop) for each in ranges]
    if slot.transposed:
        wanted[-2:] = wanted[:-3:-1]
    if slot.within is not None:
        wanted[-1] = slice(wanted[-1].start + slot.within[0], wanted[-1].stop + slot.within[0])
    if slot.half is not None:
        halved = slot.half_of
        start = wanted[halved].start
        stop = wanted[halved].stop
        # Swapped, their dimension -1 is our -2, and their -2 our -1.
        offset = slot.half * shape[-3 - halved if slot.transposed else halved]
        wanted[halved] = slice(start + offset, stop + offset)
        if slot.interleaved:
            wanted[halved] = slice(2 * start + slot.half, 2 * stop, 2)
    before, after = slot.ones
    one = slice(0, 1)
    found = read(piece.theirs, (*[one] * before, *wanted, *[one] * after))
    found = found.reshape(found.shape[before : found.ndim - after])
    return found.transpose(-1, -2) if slot.transposed else found


class HuggingFaceNames:
    """A source under Hugging Face's names and in its layout, made from one under ours.

    Our tensors are cached while consecutive reads need them: at most three at a
    time, queries, keys and values.
    """

    def __init__(self, source: WeightSource, model: ModelConfig) -> None:
        self._pieces = hf_tensors(model)
        shapes = tensor_shapes(model)
        self._source = folded(source, model)
        self._cache: dict[str, Tensor] = {}
        self.tensors: Mapping[str, TensorFacts] = {
            name: TensorFacts(
                first.their_shape(shapes[first.ours]), self._source.tensors[first.ours].dtype
            )
            for name, [first, *_] in self._pieces.items()
        }

    def read(self, name: str) -> Tensor:
        """Return one Hugging Face tensor, contiguous."""
        pieces = self._pieces[name]
        ours = {piece.ours for piece in pieces}
        self._cache = {each: tensor for each, tensor in self._cache.items() if each in ours}
        if pieces[0].is_same:
            return self._source.read(pieces[0].ours)
        for each in ours - self._cache.keys():
            self._cache[each] = self._source.read(each)
        facts = self.tensors[name]
        out = torch.empty(facts.shape, dtype=facts.dtype)
        for piece in pieces:
            full = self._cache[piece.ours]
            values = full if piece.expert is None else full[piece.expert]
            everything = [range(size) for size in values.shape]
            runs = [(slice(None), everything[0])]
            if piece.slot.rows is not None:
                runs = [*piece.slot.rows.runs(everything[0])]
            for own, theirs in runs:
                place = _read(
                    piece, full.shape, [theirs, *everything[1:]], lambda _, part: out[part]
                )
                place.copy_(values[own])
        return out


# -- files ----

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SHOWN_CHARACTERS = 40  # of a wrong value in one line of error

# E2M1 (OCP Microscaling Formats 1.0, 5.3.3). Two values of a byte, the first in the low bits, are
# one int64.
_POSITIVE = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1 = torch.cat([_POSITIVE, -_POSITIVE])
_PAIRS = (
    torch.stack([_E2M1.repeat(16), _E2M1.repeat_interleave(16)], dim=1).view(torch.int64).flatten()
)


class StoredTensors:
    """The decoder's tensors in a folder of safetensors; quantized weights are dequantized.

    ``find`` finds quantized weights, which have the dtype ``dequantized`` in ``tensors``.
    """

    def __init__(
        self, folder: Path, model: ModelConfig, find: Find, dequantized: torch.dtype
    ) -> None:
        self._files: dict[str, tuple[Path, str]] = {}
        stored: dict[str, tuple[Shape, str]] = {}
        for file in _weight_files(folder):
            with _opened(file) as opened:
                for in_file in opened.keys():  # noqa: SIM118 - not a mapping
                    name = own_name(model, in_file)
                    if name is None:
                        continue
                    if name in stored:
                        first = self._files[name][0].name
                        raise UserError(f"{folder}: {in_file} is in {first} and in {file.name}")
                    values = opened.get_slice(in_file)
                    stored[name] = (tuple(values.get_shape()), values.get_dtype())
                    self._files[name] = (file, in_file)
        try:
            self._quantized = find(stored)
        except UserError as error:
            raise UserError(f"{folder}: {error}") from None
        parts = part_names(stored, self._quantized)
        self.tensors: dict[str, TensorFacts] = {}
        for name, (shape, dtype) in stored.items():
            if name in parts:
                continue
            if dtype not in DTYPES:
                file, in_file = self._files[name]
                raise UserError(
                    f"{file}: {in_file} has {dtype} values; would work: {', '.join(DTYPES)}"
                )
            self.tensors[name] = TensorFacts(shape, DTYPES[dtype])
        for name, weight in self._quantized.items():
            self.tensors[name] = TensorFacts(weight.shape, dequantized)

    def read_slice(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Return a slice of one tensor, reading no more than its blocks; a quantized weight is in float32.

        ``part`` is a slice of each dimension, with start and stop; the last may have a step.
        """
        weight = self._quantized.get(name)
        if weight is None:
            return self._stored(name, part)
        if weight.block is None:
            return self._mxfp4(weight, *part)
        return self._fp8(weight, weight.block, *part)

    def _fp8(
        self, stored: QuantizedTensor, block: tuple[int, int], rows: slice, columns: slice
    ) -> Tensor:
        grid = tuple(-(-length // size) for length, size in zip(stored.shape, block, strict=True))
        everything = tuple(slice(0, size) for size in grid)
        scales = self._finite(stored.scales, self._stored(stored.scales, everything).float())
        down = torch.arange(rows.start, rows.stop) // block[0]
        across = torch.arange(columns.start, columns.stop, columns.step or 1) // block[1]
        factors = scales.index_select(1, across)
        bits = self._stored(stored.values, (rows, columns)).view(torch.float8_e4m3fn)
        return bits.float().mul_(factors.index_select(0, down))

    def _mxfp4(
        self, stored: QuantizedTensor, experts: slice, inputs: slice, outputs: slice
    ) -> Tensor:
        groups = slice(inputs.start // GROUP, -(-inputs.stop // GROUP))
        where = (experts, outputs, groups)
        exponents = self._stored(stored.scales, where).view(torch.float8_e8m0fnu)
        scales = self._finite(stored.scales, exponents.float())
        pairs = _PAIRS.index_select(0, self._stored(stored.values, where).reshape(-1).int())
        values = (
            pairs.view(torch.float32)
            .view(*scales.shape, GROUP)
            .mul_(scales.unsqueeze(-1))
            .flatten(-2)
        )
        skipped = inputs.start - groups.start * GROUP
        return values[..., skipped : skipped + inputs.stop - inputs.start].transpose(-1, -2)

    def _finite(self, name: str, scales: Tensor) -> Tensor:
        if not scales.isfinite().all():
            file, in_file = self._files[name]
            raise UserError(f"{file}: {in_file} has a scale that is NaN or infinite")
        return scales

    def _stored(self, name: str, part: tuple[slice, ...]) -> Tensor:
        # Open the file for every slice: pages of a mapped file stay in memory while it is open.
        file, in_file = self._files[name]
        with _opened(file) as opened:
            # The library reads slices without a step.
            values: Tensor = opened.get_slice(in_file)[
                tuple(slice(each.start, each.stop) for each in part)
            ]
            return values[tuple(slice(None, None, each.step) for each in part)].clone()


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file}: not a complete safetensors file: {' '.join(str(error).split())}"
        ) from None


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers or diffusers would read; the folder may also hold other formats."""
    # First, as in transformers: an index beside it is an older one.
    if os.path.isfile(folder / SINGLE):
        return [folder / SINGLE]
    # diffusers' index has another name.
    indices = sorted(folder.glob(f"*.{INDEX_ENDING}"), key=lambda file: (file.name != INDEX, file))
    if not indices:
        return sorted(folder.glob("*.safetensors"))
    index = indices[0]
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index}: has no weight_map")
    for name in weight_map.values():
        if not is_file_name(name) or not name.endswith(".safetensors"):
            shown = json.dumps(name)[:_SHOWN_CHARACTERS]
            raise UserError(f"{index}: weight_map has {shown} instead of a file name")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not os.path.isfile(file)]
    if missing:
        raise UserError(
            f"{folder}: {missing[0]} is missing, one of {len(files)} files that {index.name} names"
        )
    return files
