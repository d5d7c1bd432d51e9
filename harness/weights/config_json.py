"""Hugging Face's config.json: write it for a model, check one that exists, and read a model (no torch)."""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.config.fields import NUMERICS, check_rules, leaves, with_value
from harness.config.model import FAMILIES, ModelConfig, named_fields
from harness.config.types import fits, type_hints, type_in_words, with_types
from harness.model.architecture import architecture_of, resolve_model
from harness.util import encoding
from harness.util.errors import ConfigError, UserError
from harness.weights.families.core import NEEDED, NOT_SAID, ConfigField, Family
from harness.weights.families.harmless import is_harmless
from harness.weights.quantization import quantization_of
from harness.weights.rotation import (
    STRETCHING,
    check_attention_factor,
    rotation_fields,
    rotation_of,
    written_rotation,
)

CONFIG = "config.json"
_SHOWN_ITEMS = 8  # of a list

# Fields that ``rotation_of`` and ``quantization_of`` read.
_READ_BY_ALL = {
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
    "quantization_config",
}

_NOT_IN_OUTPUT = {
    "embedding_std",  # this and the next two only affect training
    "moe.aux_loss_coeff",
    "mtp.loss_weight",
    "mup.base_dim",  # a part of the weights in files (harness.weights.source)
    "mup.base_widths",
    *(f"rope.{name}" for name in STRETCHING["llama3"] + STRETCHING["yarn"]),
}


def read_object(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file that must exist."""
    try:
        return encoding.read_object(file)
    except FileNotFoundError:
        raise UserError(f"{file}: is missing") from None


def family_of(model: ModelConfig) -> Family:
    """The family of a model's checkpoints."""
    family = _checked_family(model)
    if family.refuse is not None:
        family.refuse(model)
    return family


def _checked_family(model: ModelConfig) -> Family:
    family = FAMILIES[model.family]
    if family.is_mixture and not model.moe.enabled:
        rule = f"checkpoints of model.family={family.name} have experts"
        raise ConfigError("model.moe.num_experts", 0, rule, "at least 1")
    for name, value in _unstored(family, model):
        able = [
            f"model.family={each.name}"
            for each in FAMILIES.values()
            if _required(each, "architecture") == model.architecture
            and name not in dict(_unstored(each, model))
        ]
        lacks = "cannot store it"
        if name == "moe.balance_coeff":
            lacks = f"have no place for layers.{model.expert_layers[0]}.moe.balance_bias"
        rule = f"checkpoints of model.family={family.name} {lacks}"
        raise ConfigError(f"model.{name}", value, rule, [_typed(_required(family, name)), *able])
    return family


def relevant(model: ModelConfig) -> Iterator[tuple[str, object]]:
    """The fields of a model that affect its output, with their values."""
    attention = model.attention
    moe = model.moe
    unread = _NOT_IN_OUTPUT - {f"rope.{name}" for name in STRETCHING[model.rope.scaling]}
    if attention.is_latent:
        unread |= {"n_kv_heads", "head_dim"}
    if attention.nope_every_nth_layer is None:
        unread.add("attention.nope_temperature")
    if attention.nope_every_nth_layer is None or not attention.nope_temperature:
        unread.add("attention.nope_temperature_floor")
    if moe.num_groups == 1:
        unread |= {"moe.top_groups", "moe.group_score"}
    if len(model.expert_layers) == model.num_blocks:
        unread.add("ffn_hidden_dim")
    for name, role, value in named_fields(model):
        without = name.startswith("moe.") and not moe.enabled and name != "moe.num_experts"
        if role == NUMERICS and name not in unread and not without:
            yield name, value


def _unstored(family: Family, model: ModelConfig) -> Iterator[tuple[str, object]]:
    """The fields of a model that a family's files have no place for, with their values."""
    stored = {*(field.ours for field in family.config_fields(model)), *family.kept}
    for name, value in relevant(model):
        is_rope = name.startswith("rope.") and name != "rope.interleaved"
        if name == "rope.rotated_fraction":
            is_rope = family.rotated_fraction is not None
        elif name == "rope.local_theta":
            is_rope = family.local_theta is not None
        if not is_rope and name not in stored and value != _required(family, name):
            yield name, value


def _required(family: Family, name: str) -> object:
    """The only value that a family supports for a field that is not in its config.json."""
    return family.requires.get(name, _DEFAULTS.get(name))


_DEFAULTS = {name: value for name, _, value in leaves(ModelConfig())}


def hf_config(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """The content of a config.json from which transformers (or diffusers) builds the same model.

    It names no token. Rotation and dtype are written twice: transformers 4.x reads ``torch_dtype``,
    and 5.x writes ``dtype``.
    """
    family = family_of(model)
    if family.unbuildable is not None:
        family.unbuildable(model)
    fields = {field.theirs: field.value for field in family.config_fields(model)}
    if family.is_diffusers:
        return {family.type_key: family.model_type, **fields}
    values = {name: value for name, _, value in leaves(model)}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **fields,
        **{theirs: values[ours] for theirs, ours in family.trained.items()},
        **(family.written(model) if family.written else {}),
        **written_rotation(model),
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def _typed(value: object) -> str:
    if isinstance(value, list) and len(value) > _SHOWN_ITEMS:
        return f"{json.dumps(value[:_SHOWN_ITEMS])[:-1]}, ...]"
    return value if isinstance(value, str) else json.dumps(value)


def check_hf_config(model: ModelConfig, found: Mapping[str, Any]) -> None:
    """Check that a config.json describes ``model``; UserError names every field that differs.

    It may be written by transformers 4.x (``rope_theta``, ``rope_scaling``) or 5.x
    (``rope_parameters``); missing fields have transformers' defaults.
    """
    family = _checked_family(model)
    found = decoder_part(family, found)
    quantization_of(found)
    facts = []
    values = {name: value for name, _, value in named_fields(model)}
    for field, content in _pairs(family, model, found):
        theirs = field.found(content)
        if theirs == field.value:
            continue
        if field.ours is None:
            only = f"the decoder only knows {field.theirs} {_typed(field.value)}"
            raise UserError(f"config.json has {field.theirs} {_typed(theirs)}: {only}")
        has = f"config.json has {field.theirs} {_typed(theirs)}"
        facts.append(f"model.{field.ours}={_typed(values[field.ours])}: {has}")
    if facts:
        raise UserError(
            f"{'; '.join(facts)}; would work: model=from_config, which takes all of them"
        )
    check_attention_factor(model, rotation_of(found, family))
    _refuse_unread(family, model, found)
    family_of(model)


def _refuse_unread(family: Family, model: ModelConfig, found: Mapping[str, Any]) -> None:
    """Refuse fields that neither the family reads nor ``harmless.txt`` has."""
    known = {*_READ_BY_ALL, *family.trained, *family.harmless, "architectures", family.type_key}
    if family.rotated_fraction is not None:
        known.add("partial_rotary_factor")
    if family.local_theta is not None:
        known.add("rope_local_base_freq")
    if family.written is not None:
        known |= set(family.written(model))
    for field in family.config_fields(model):
        known |= {field.theirs, field.alias or field.theirs}
    spans = [model.span(layer) for layer in range(model.n_layers)]
    same = {
        "layer_types": [
            "full_attention" if span.is_whole else "sliding_attention" for span in spans
        ]
    }
    unread = []
    for name, value in found.items():
        if name not in known and value != same.get(name, NEEDED) and not is_harmless(name, value):
            unread.append(f"{name} {_typed(value)}")
    if unread:
        shown = ", ".join(unread[:_SHOWN_ITEMS])
        raise UserError(
            f"config.json has {shown}, which model.family={family.name} does not read, so its output may "
            "differ; would work: config.json without it, if it changes nothing"
        )


def decoder_part(family: Family, found: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the decoder, which may be nested in that of a larger model."""
    model_type = found.get(family.type_key)
    nested = family.nested
    if (
        nested is not None
        and model_type == nested.model_type
        and isinstance(found.get(nested.key), dict)
    ):
        quantized = {name: found[name] for name in ("quantization_config",) if name in found}
        return {**found[nested.key], **quantized}
    if model_type == family.model_type:
        return found
    has = f"{family.type_key} {model_type}" if model_type else f"no {family.type_key}"
    read = f"with {family.type_key} {family.model_type} are read, model.family being {family.name}"
    raise UserError(f"config.json has {has}: only checkpoints {read}")


def _pairs(
    family: Family, model: ModelConfig, found: Mapping[str, Any]
) -> Iterator[tuple[ConfigField, Mapping[str, Any]]]:
    """Every field that a config.json should have for a model, with the object in it that has the field."""
    yield from ((field, found) for field in family.config_fields(model))
    rotation = rotation_of(found, family)
    yield from ((field, rotation) for field in rotation_fields(model, rotation))


# -- read a model ----

# Some config fields depend on others; two rounds are enough for the existing families.
_ROUNDS = 3


def model_from_config(path: str) -> ModelConfig:
    """Read the model that a config.json, or its folder, describes, resolved and checked against it."""
    file = Path(path) / CONFIG if os.path.isdir(path) else Path(path)
    # Reading a device file may never end.
    if os.path.exists(file) and not os.path.isfile(file):
        raise UserError(f"{file}: is not a regular file")
    content = read_object(file)
    try:
        model_type = content.get("model_type", content.get("_class_name"))
        for family in FAMILIES.values():
            if model_type in (family.model_type, family.nested and family.nested.model_type):
                break
        else:
            known = ", ".join(family.model_type for family in FAMILIES.values())
            raise UserError(f"model_type {model_type!r} is not supported; would work: {known}")
        model = _read(family, decoder_part(family, content))
        name = re.sub(r"[^\w.-]+", "_", file.resolve().parent.name) or "from_config"
        model = dataclasses.replace(model, name=name, path=path)
        model = resolve_model(model)
        check_hf_config(model, content)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return model


def _read(family: Family, found: Mapping[str, Any]) -> ModelConfig:
    # config_fields needs values.
    numbers: dict[str, Any] = {
        each.name: 1
        for each in dataclasses.fields(ModelConfig)
        if each.default == "???" and each.name != "name"
    }
    model = ModelConfig(family=family.name, **numbers)
    for name, value in family.requires.items():
        model = _set(model, name, value, name)
    for _ in range(_ROUNDS):
        for field, content in _pairs(family, model, found):
            if field.ours is None:
                continue
            value = field.found(content)
            if field.to_ours is not None:
                try:
                    value = field.to_ours(value, content)
                except NOT_SAID:
                    rule = f"which no value of model.{field.ours} matches"
                    raise UserError(f"it has {field.theirs} {value!r}, {rule}") from None
            # Null is a value of nullable fields; else a config.json without a value leaves the
            # field as it is.
            if value is not None or (field.nullable and field.to_ours is None):
                model = _set(model, field.ours, value, field.theirs)
            elif field.to_ours is None:
                follows = ", and fields of its default are missing or invalid"
                raise UserError(
                    f"it has no {field.theirs}{follows if callable(field.default) else ''}"
                )
    for theirs, ours in family.trained.items():
        if isinstance(found.get(theirs), int | float):
            model = _set(model, ours, found[theirs], theirs)
    for name, value in (family.assumed(model) if family.assumed else {}).items():
        model = _set(model, name, value, name)
    return model


def _set(model: ModelConfig, name: str, value: Any, theirs: str) -> ModelConfig:
    """The model with a field, by its dotted name, set; UserError for another type or out of range."""
    *groups, last = name.split(".")
    owner: Any = model
    for group in groups:
        owner = getattr(owner, group)
    kind: Any = architecture_of(model).options if owner is model.options else owner.__class__
    hint = type_hints(kind)[last]
    if value is None and not fits(value, hint):
        raise UserError(f"it has no {theirs}")
    if type(value) is int and fits(0.5, hint):
        value = with_types(value, hint)
    if not fits(value, hint):
        raise UserError(f"it has {theirs} {value!r} instead of {type_in_words(hint, theirs)}")
    changed = with_value(model, name, value)
    try:
        check_rules(changed, "model.")
    except ConfigError as error:
        raise UserError(f"it has {theirs} {value!r}: {error}") from None
    return changed


def model_node(path: str) -> dict[str, Any]:
    """``model_from_config`` as plain values, an option of the config group ``model``."""
    return dataclasses.asdict(model_from_config(path))
