"""Read a ModelConfig from a config.json of Hugging Face (no torch)."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from harness.config.fields import check_rules, type_hints, with_value
from harness.config.model import FAMILIES, ModelConfig
from harness.model.architecture import architecture_of, resolve_model
from harness.util.errors import UserError
from harness.weights.config_json import (
    CONFIG,
    STRETCHING,
    check_hf_config,
    decoder_part,
    found_rope,
    read_object,
)
from harness.weights.families.core import Family

# Some config fields depend on others; two rounds are enough for the existing families.
_MOST_ROUNDS = 5
_MAY_BE_ZERO = ("moe.first_dense_layers", "moe.shared_hidden_dim", "moe.num_experts")
_MOST, _MOST_OF_ANY = {"n_layers": 10_000}, 2**40


def model_from_config(path: str) -> ModelConfig:
    """Read the model that a config.json describes, resolved and checked against it.

    Args:
        path: the file, or its folder.

    Raises:
        UserError: the file cannot be read, or the decoder cannot be this model.
    """
    file = Path(path) / CONFIG if os.path.isdir(path) else Path(path)
    # Reading a device file may never end.
    if os.path.exists(file) and not os.path.isfile(file):
        raise UserError(f"{file}: is not a regular file")
    content = read_object(file)
    try:
        family = _family(content)
        model = _read(family, decoder_part(family, content))
        name = re.sub(r"[^\w.-]+", "_", file.resolve().parent.name) or "from_config"
        model = dataclasses.replace(model, name=name, path=path)
        check_rules(model, "model.")
        model = resolve_model(model)
        check_hf_config(model, content)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return model


def _family(content: Mapping[str, Any]) -> Family:
    model_type = content.get("model_type", content.get("_class_name"))
    for family in FAMILIES.values():
        if model_type in (family.model_type, family.nested and family.nested.model_type):
            return family
    known = ", ".join(family.model_type for family in FAMILIES.values())
    raise UserError(f"model_type {model_type!r} is not supported; would work: {known}")


def _read(family: Family, found: Mapping[str, Any]) -> ModelConfig:
    """Read the model, without resolving it."""
    unknown = [each.name for each in dataclasses.fields(ModelConfig) if each.default == "???"]
    numbers: dict[str, Any] = {name: 1 for name in unknown if name != "name"}  # config_fields needs a value
    model = ModelConfig(family=family.name, **numbers)
    for name, value in family.requires.items():
        model = _set(model, name, value, name)
    for _ in range(_MOST_ROUNDS):
        before, model = model, _read_fields(family, found, model)
        if model == before:
            break
    for theirs, ours in family.trained.items():
        if isinstance(found.get(theirs), int | float):
            model = _set(model, ours, found[theirs], theirs)
    for name, value in (family.assumed(model) if family.assumed else {}).items():
        model = _set(model, name, value, name)
    rope = found_rope(family, found)
    model = _set(model, "rope.theta", rope.theta, "rope_theta")
    if rope.scaling not in list(STRETCHING):  # it may be a list or an object
        known = [name if name != "none" else "default" for name in STRETCHING]
        raise UserError(f"it has rope_type {rope.scaling!r}; would work: {', '.join(known)}")
    model = with_value(model, "rope.scaling", str(rope.scaling))
    for name, (theirs, value) in rope.values().items():
        model = _set(model, f"rope.{name}", value, theirs)
    return model


def _read_fields(family: Family, found: Mapping[str, Any], model: ModelConfig) -> ModelConfig:
    for field in family.config_fields(model):
        if field.ours is None:
            continue
        try:
            value = field.our_value(found)
        except ValueError as error:
            raise UserError(f"it has {error}, which no value of model.{field.ours} matches") from None
        # Null is a value of nullable fields; else a config.json without a value leaves the field as it is.
        if value is not None or (field.nullable and field.to_ours is None):
            model = _set(model, field.ours, value, field.theirs)
        elif field.to_ours is None:
            follows = ", and fields of its default are missing or invalid" if callable(field.default) else ""
            raise UserError(f"it has no {field.theirs}{follows}")
    return model


def _set(model: ModelConfig, name: str, value: Any, theirs: str) -> ModelConfig:
    """Return the model with a field, by its dotted name, set.

    Raises:
        UserError: the value has another type, or is out of range for any model.
    """
    *groups, last = name.split(".")
    owner: Any = model
    for group in groups:
        owner = getattr(owner, group)
    kind: Any = architecture_of(model).options if owner is model.options else owner.__class__
    hint = type_hints(kind)[last]
    kinds = get_args(hint) if isinstance(hint, UnionType) else (get_origin(hint) or hint,)
    if value is None and type(None) not in kinds:
        raise UserError(f"it has no {theirs}")
    least = 0 if name in _MAY_BE_ZERO else 1
    if owner is model.options:
        least = kind.__dataclass_fields__[last].metadata.get("least", 1)
    if type(value) is int and float in kinds:
        is_out = abs(value) > _MOST_OF_ANY
        value = value if is_out else float(value)
    elif type(value) is int and int in kinds:
        is_out = not least <= value <= _MOST.get(name, _MOST_OF_ANY)
    else:
        is_out = type(value) is float and not math.isfinite(value)
    if is_out:
        raise UserError(f"it has {theirs} {value!r}, which is out of range")
    if type(value) not in kinds:
        wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise UserError(f"it has {theirs} {value!r} instead of a value of type {wanted}")
    return with_value(model, name, value)


def model_node(path: str) -> dict[str, Any]:
    """``model_from_config`` as plain values, an option of the config group ``model``."""
    return dataclasses.asdict(model_from_config(path))
