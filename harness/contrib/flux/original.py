"""Reads Black Forest Labs' own files of Flux, such as flux1-dev.safetensors.

Names and order as in github.com/black-forest-labs/flux, src/flux/model.py and modules/layers.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from harness.config.model import ModelConfig
from harness.contrib.flux.config import flux_of
from harness.model.spec import tensor_shapes
from harness.util.errors import UserError
from harness.weights.hf_tensors import DTYPES, check_tensors
from harness.weights.source import TensorFacts

MARK = "double_blocks.0.img_attn.qkv.weight"
_MLP = {"w1": "in_layer", "w2": "out_layer"}
_OUTSIDE = {
    "img_in": "img_in",
    "txt_in": "txt_in",
    **{
        f"{name}.{ours}": f"{name}.{theirs}"
        for name in ("time_in", "vector_in", "guidance_in")
        for ours, theirs in _MLP.items()
    },
    "final_mod": "final_layer.adaLN_modulation.1",
    "output": "final_layer.linear",
}
_JOINED = {"wq": 0, "wk": 1, "wv": 2}
_IN_STREAM = {"mod": "mod.lin", "attn.wo": "attn.proj", "mlp.w1": "mlp.0", "mlp.w2": "mlp.2"}
_NORMS = {"q_norm": "query_norm", "k_norm": "key_norm"}


class Place(NamedTuple):
    """Where our values are in one of their tensors."""

    name: str
    rows: tuple[slice, ...] = (slice(None),)
    """Rows of theirs that are ours, in our order."""
    columns: slice = slice(None)


def find_original(folder: Path, model: ModelConfig) -> OriginalSource | None:
    """Return the weights of the one file in a folder; None if it has none in this format."""
    for file in sorted(folder.glob("*.safetensors")):
        with _opened(file) as opened:
            if MARK in opened.keys():  # noqa: SIM118 - not a mapping
                return OriginalSource(file, model)
    return None


class OriginalSource:
    """The ``Source`` of one file.

    Args:
        file: the file.
        model: the expected model.

    Raises:
        UserError: the file is damaged, or has other tensors than the model.
    """

    def __init__(self, file: Path, model: ModelConfig) -> None:
        self._file, shapes = file, tensor_shapes(model)
        self._places = {name: place_of(name, model) for name in shapes}
        with _opened(file) as opened:
            facts = {
                name: (tuple(part.get_shape()), part.get_dtype())
                for name in opened.keys()  # noqa: SIM118 - not a mapping
                for part in (opened.get_slice(name),)
            }
        expected = _their_shapes(self._places, shapes, model)
        check_tensors(str(file), model, {name: shape for name, (shape, _) in facts.items()}, expected)
        wrong = sorted({dtype for _, dtype in facts.values()} - DTYPES.keys())
        if wrong:
            raise UserError(f"{file}: has {wrong[0]} values; would work: {', '.join(DTYPES)}")
        self.tensors: Mapping[str, TensorFacts] = {
            name: TensorFacts(shape, DTYPES[facts[self._places[name].name][1]])
            for name, shape in shapes.items()
        }

    def read(self, name: str) -> Tensor:
        """Return one tensor, contiguous.

        Raises:
            UserError: the file is damaged.
        """
        place = self._places[name]
        with _opened(self._file) as opened:
            part = opened.get_slice(place.name)
            if len(self.tensors[name].shape) == 1:
                return torch.cat([part[rows] for rows in place.rows])
            return torch.cat([part[rows, place.columns] for rows in place.rows])


def place_of(name: str, model: ModelConfig) -> Place:
    """Where one of our tensors is in theirs."""
    module, _, kind = name.rpartition(".")
    dim, hidden = model.dim, model.ffn_hidden_dim
    if not name.startswith("layers."):
        # Their last modulation has the shift first, and ours, as diffusers', the scale.
        swapped = (slice(dim, 2 * dim), slice(0, dim)) if module == "final_mod" else (slice(None),)
        return Place(f"{_OUTSIDE[module]}.{kind}", swapped)
    _, number, inner = module.split(".", 2)
    leaf = inner.rpartition(".")[2]
    single = int(number) - flux_of(model).double_layers
    prefix = f"double_blocks.{number}." if single < 0 else f"single_blocks.{single}."
    stream = f"{inner[:3]}_" if single < 0 else ""
    if leaf in _NORMS:
        return Place(f"{prefix}{f'{stream}attn.' if stream else ''}norm.{_NORMS[leaf]}.scale")
    if single < 0:
        if leaf in _JOINED:
            rows = slice(_JOINED[leaf] * dim, (_JOINED[leaf] + 1) * dim)
            return Place(f"{prefix}{stream}attn.qkv.{kind}", (rows,))
        return Place(f"{prefix}{stream}{_IN_STREAM[inner.removeprefix(stream)]}.{kind}")
    if leaf == "mod":
        return Place(f"{prefix}modulation.lin.{kind}")
    if leaf in _JOINED:
        return Place(f"{prefix}linear1.{kind}", (slice(_JOINED[leaf] * dim, (_JOINED[leaf] + 1) * dim),))
    if leaf == "w1":
        return Place(f"{prefix}linear1.{kind}", (slice(3 * dim, 3 * dim + hidden),))
    columns = slice(0, dim) if leaf == "wo" else slice(dim, dim + hidden)
    return Place(f"{prefix}linear2.{kind}", columns=columns)


def _their_shapes(
    places: Mapping[str, Place], shapes: Mapping[str, tuple[int, ...]], model: ModelConfig
) -> dict[str, tuple[int, ...]]:
    """Shapes of their tensors: parts that are joined along rows add up, linear2's along columns."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        place = places[name]
        before = found.get(place.name)
        if before is None:
            found[place.name] = shape
        elif place.columns == slice(None):
            found[place.name] = (before[0] + shape[0], *shape[1:])
        else:
            found[place.name] = (*shape[:-1], before[-1] + shape[-1])
    return found


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
