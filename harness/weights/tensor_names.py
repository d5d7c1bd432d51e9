"""Tensors of Hugging Face's files: which of ours are in them, and checks of names and shapes (no torch).

``harness.weights.families`` has the differences between families. Values need no change, because
``harness.model.rope`` rotates the same pairs as each family's files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from harness.config.model import FAMILIES, ModelConfig
from harness.model.spec import tensor_shapes
from harness.util.errors import UserError
from harness.weights.config_json import family_of
from harness.weights.families.core import Shape, TensorMapping

HF_HEAD = "lm_head.weight"

_BUFFER = ".rotary_emb.inv_freq"  # in older files; it can be computed
_SHOWN = 3  # names in one line of error


def hf_tensors(model: ModelConfig) -> dict[str, list[TensorMapping]]:
    """For each of Hugging Face's tensors, our tensors in it, in our order.

    Raises:
        ConfigError: the family's files cannot represent the model.
    """
    return _grouped(family_of(model).pieces(model), lambda piece: piece.theirs)


def our_tensors(model: ModelConfig) -> dict[str, list[TensorMapping]]:
    """The locations of each of our tensors in theirs, in our order, without copies.

    Raises:
        ConfigError: the family's files cannot represent the model.
    """
    pieces = (piece for piece in family_of(model).pieces(model) if not piece.is_copy)
    return _grouped(pieces, lambda piece: piece.ours)


def copied_tensors(model: ModelConfig) -> dict[str, list[TensorMapping]]:
    """The additional copies of our tensors in theirs.

    Raises:
        ConfigError: the family's files cannot represent the model.
    """
    pieces = (piece for piece in family_of(model).pieces(model) if piece.is_copy)
    return _grouped(pieces, lambda piece: piece.ours)


def _grouped(pieces: Iterable[TensorMapping], key: Any) -> dict[str, list[TensorMapping]]:
    groups: dict[str, list[TensorMapping]] = {}
    for piece in pieces:
        groups.setdefault(key(piece), []).append(piece)
    return groups


def hf_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Shapes of Hugging Face's tensors by name.

    Raises:
        ConfigError: the family's files cannot represent the model.
    """
    ours = tensor_shapes(model)
    return {name: pieces[0].their_shape(ours[pieces[0].ours]) for name, pieces in hf_tensors(model).items()}


def own_name(model: ModelConfig, name: str) -> str | None:
    """A tensor's name without the prefix of a larger model; None if it is not the decoder's."""
    family = FAMILIES[model.family]
    nested = family.nested
    others = (nested.others if nested else ()) + (family.ignored(model) if family.ignored else ())
    if name.endswith(_BUFFER) or (others and name.startswith(others)):
        return None
    return name.removeprefix(nested.prefix) if nested else name


def check_hf_tensors(model: ModelConfig, found: Mapping[str, Shape], where: str = "the checkpoint") -> None:
    """Check that a checkpoint has the model's tensors.

    Redundant tensors are allowed: the output projection of a model with tied embeddings, the rotation's
    inverse frequencies, and tensors that are not the decoder's (``own_name``). Copies may be missing.

    Args:
        model: the model.
        found: shape of every tensor in the checkpoint by name.
        where: the checkpoint's path, for the error.

    Raises:
        UserError: as ``check_tensors``.
    """
    found = {own: shape for name, shape in found.items() if (own := own_name(model, name)) is not None}
    shapes = hf_shapes(model)
    copies = {piece.theirs for pieces in copied_tensors(model).values() for piece in pieces}
    expected = {name: shape for name, shape in shapes.items() if name not in copies}
    optional = {name: shapes[name] for name in copies}
    if model.tied_embeddings:
        optional[HF_HEAD] = (model.vocab_size, model.dim)
    check_tensors(where, model, found, expected, optional)


def check_tensors(
    where: str,
    model: ModelConfig,
    found: Mapping[str, Shape],
    expected: Mapping[str, Shape],
    optional: Mapping[str, Shape] | None = None,
) -> None:
    """Compare the tensors of a checkpoint with the model's.

    Raises:
        UserError: one line with the counts and first names of missing, unexpected and misshapen tensors.
    """
    allowed = {**expected, **(optional or {})}
    groups = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in allowed],
        "of another shape": [
            f"{name} is {list(shape)} and not {list(allowed[name])}"
            for name, shape in found.items()
            if name in allowed and tuple(shape) != allowed[name]
        ],
    }
    wrong = [f"{len(names)} {what} ({first_names(names)})" for what, names in groups.items() if names]
    if wrong:
        raise UserError(f"{where}: the tensors are not those of model={model.name}: {', '.join(wrong)}")


def first_names(names: Iterable[str]) -> str:
    """The first names of a list, and dots if there are more."""
    every = list(names)
    return ", ".join([*every[:_SHOWN], *(["..."] if len(every) > _SHOWN else [])])
