"""Convert tensors from and to Hugging Face's layout, by the mapping of ``harness.weights.families``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from harness.config.model import ModelConfig
from harness.model.spec import tensor_shapes
from harness.weights.families.core import Shape, TensorMapping
from harness.weights.mup import folded
from harness.weights.source import Source, TensorFacts
from harness.weights.tensor_names import hf_tensors

Read = Callable[[str, tuple[slice, ...]], Tensor]
"""Reads a slice of a Hugging Face tensor: (name, slice of each dimension; the last may have a step)."""


def fill(
    out: Tensor, pieces: Sequence[TensorMapping], shape: Shape, ranges: Sequence[range], read: Read
) -> None:
    """Fill a slice of one of our tensors; experts are read one at a time.

    Args:
        out: the slice, with any dtype and on any device.
        pieces: the mapping of our tensor to Hugging Face tensors.
        shape: shape of our complete tensor.
        ranges: the indices of the slice in each dimension.
        read: reads Hugging Face tensors.
    """
    if not out.numel():
        return
    for piece in pieces:
        if piece.expert is not None:
            if piece.expert in ranges[0]:
                row = piece.expert - ranges[0].start
                out[row].copy_(_read(piece, shape, ranges[1:], read))
        elif piece.is_same or piece.slot.within is not None:
            out.copy_(_read(piece, shape, ranges, read))
        else:  # one tensor holds all experts
            for row, expert in enumerate(ranges[0]):
                one = [range(expert, expert + 1), *ranges[1:]]
                out[row].copy_(_read(piece, shape, one, read)[0])


def _read(piece: TensorMapping, shape: Shape, ranges: Sequence[range], read: Read) -> Tensor:
    """Read a slice of our tensor, or of one expert; ``ranges`` index our layout."""
    slot, wanted = piece.slot, [slice(each.start, each.stop) for each in ranges]
    if slot.transposed:
        wanted[-2:] = wanted[:-3:-1]
    if slot.within is not None:
        wanted[-1] = slice(wanted[-1].start + slot.within[0], wanted[-1].stop + slot.within[0])
    if slot.half is not None:
        start, stop, offset = wanted[-1].start, wanted[-1].stop, slot.half * piece.width(shape)
        halves = slice(2 * start + slot.half, 2 * stop, 2), slice(start + offset, stop + offset)
        wanted[-1] = halves[0] if slot.interleaved else halves[1]
    found = read(piece.theirs, tuple(wanted))
    return found.transpose(-1, -2) if slot.transposed else found


class HuggingFaceNames:
    """A source under Hugging Face's names and in its layout, made from one under ours.

    Our tensors are cached while consecutive reads need them: at most two at a time, gate and up.

    Args:
        source: the weights under our names.
        model: the model they belong to.

    Raises:
        ConfigError: the model's family cannot express the model.
    """

    def __init__(self, source: Source, model: ModelConfig) -> None:
        self._pieces, shapes = hf_tensors(model), tensor_shapes(model)
        self._source = folded(source, model)
        self._cache: dict[str, Tensor] = {}
        self.tensors: Mapping[str, TensorFacts] = {
            name: TensorFacts(pieces[0].their_shape(shapes[pieces[0].ours]), self._dtype(pieces))
            for name, pieces in self._pieces.items()
        }

    def _dtype(self, pieces: Sequence[TensorMapping]) -> torch.dtype:
        return self._source.tensors[pieces[0].ours].dtype

    def read(self, name: str) -> Tensor:
        """Return one Hugging Face tensor, contiguous.

        Raises:
            UserError, DamagedCheckpoint: raised by the source.
        """
        pieces = self._pieces[name]
        ours = {piece.ours for piece in pieces}
        self._cache = {each: tensor for each, tensor in self._cache.items() if each in ours}
        if pieces[0].is_same:
            return self._source.read(pieces[0].ours)
        for each in ours - self._cache.keys():
            self._cache[each] = self._source.read(each)
        if pieces[0].expert is not None and len(pieces) == 1 and not pieces[0].slot.transposed:
            return self._cache[pieces[0].ours][pieces[0].expert]
        facts = self.tensors[name]
        out = torch.empty(facts.shape, dtype=facts.dtype)
        for piece in pieces:
            full = self._cache[piece.ours]
            values = full if piece.expert is None else full[piece.expert]
            _half(out, piece, tuple(full.shape)).copy_(values)
        return out


def _half(theirs: Tensor, piece: TensorMapping, shape: Shape) -> Tensor:
    """The view of a Hugging Face tensor that holds a piece, with the dimensions in our order."""
    slot, width = piece.slot, piece.width(shape)
    if slot.half is not None:
        apart = (
            slice(slot.half, None, 2)
            if slot.interleaved
            else slice(slot.half * width, (slot.half + 1) * width)
        )
        theirs = theirs[..., apart]
    if slot.within is not None:
        theirs = theirs[..., slot.within[0] : slot.within[0] + width]
    return theirs.transpose(-1, -2) if slot.transposed else theirs


def full_ranges(shape: Shape) -> list[range]:
    """All indices of every dimension."""
    return [range(size) for size in shape]
