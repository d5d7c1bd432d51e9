"""The rotation in a config.json, as transformers 4 and 5 write it (no torch)."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from harness.config.model import ModelConfig
from harness.util.errors import UserError
from harness.weights.families.core import ConfigField, Family

# The fields of RopeConfig that each scaling reads.
STRETCHING: dict[str, list[str]] = {
    "none": [],
    "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position"],
    "yarn": [
        "factor",
        "original_max_position",
        "beta_fast",
        "beta_slow",
        "truncate",
        "mscale",
        "mscale_all_dim",
    ],
}
# Names in config.json that are not ours, and defaults of fields that may be missing.
_THEIRS = {"original_max_position": "original_max_position_embeddings"}
_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}

_FRACTION = "partial_rotary_factor"
_LOCAL_THETA = "rope_local_base_freq"
_FULL = "full_attention"
_LOCAL = "sliding_attention"
# Sections of positions, in which a token of text has the same one.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
_NOT_FLOATS = ("truncate", "original_max_position_embeddings")

# All names that a rotation may have.
_NAMES = ["rope_type", "type", "rope_theta", "attention_factor"]
for _name in STRETCHING["llama3"] + STRETCHING["yarn"]:
    if _THEIRS.get(_name, _name) not in _NAMES:
        _NAMES.append(_THEIRS.get(_name, _name))


def scaling_fields(model: ModelConfig) -> list[ConfigField]:
    """The fields that the scaling of a model's rotation reads."""
    rope = model.rope
    fields = []
    for name in STRETCHING[rope.scaling]:
        theirs = _THEIRS.get(name, name)
        default = _DEFAULTS.get(name)
        value = getattr(rope, name)
        fields.append(ConfigField(theirs, value, f"rope.{name}", default=default, nullable=True))
    return fields


def written_rotation(model: ModelConfig) -> dict[str, Any]:
    """The rotation as both versions of transformers read it: 4 ``rope_scaling``, 5 ``rope_parameters``.

    Where local layers have another one, version 5 has an object for each kind of layer.
    """
    theta = float(model.rope.theta)
    is_scaled = model.rope.scaling != "none"
    content: dict[str, Any] = {"rope_type": model.rope.scaling if is_scaled else "default"}
    for field in scaling_fields(model):
        value: Any = field.value
        if value is not None:
            # transformers warns about integer factors.
            content[field.theirs] = value if field.theirs in _NOT_FLOATS else float(value)
    fraction = {}
    if model.rope.rotated_fraction != 1:
        fraction = {_FRACTION: model.rope.rotated_fraction}
        content |= fraction
    parameters: dict[str, Any] = {**content, "rope_theta": theta}
    local: dict[str, Any] = {}
    if model.rope.local_theta is not None:
        local = {_LOCAL_THETA: model.rope.local_theta}
        of_local = {"rope_type": "default", "rope_theta": model.rope.local_theta}
        parameters = {_FULL: parameters, _LOCAL: of_local}
    return {
        **fraction,
        **local,
        "rope_theta": theta,
        "rope_scaling": content if is_scaled else None,
        "rope_parameters": parameters,
    }


def rotation_of(found: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The rotation in a config.json of transformers 4 or 5, as the content of one object.

    ``rope_type`` is our name of the scaling, or theirs if we do not have it. UserError if the
    rotation is not supported.
    """
    # In this order, because transformers 5 prefers rope_scaling where a file has both.
    name = "rope_scaling" if found.get("rope_scaling") else "rope_parameters"
    parameters = found.get(name) or {}
    if not isinstance(parameters, dict):
        raise UserError(
            f"config.json has {name} {json.dumps(parameters)}: must be an object or null"
        )
    local: Any = {}
    nested = found.get("rope_parameters")
    if family.local_theta is not None and isinstance(nested, dict) and _FULL in nested:
        local = nested.get(_LOCAL) or {}
        own = nested[_FULL] or {}
        for part in (own, local):
            if not isinstance(part, dict):
                raise UserError(
                    f"config.json has rope_parameters {json.dumps(part)} of a kind of layer: "
                    "must be an object"
                )
        parameters = own if parameters is nested else {**own, **parameters}
        if local.get("rope_type", "default") != "default":
            raise UserError(
                f"config.json has rope_type {json.dumps(local['rope_type'])} of {_LOCAL}: local "
                "layers are rotated without scaling; would work: default"
            )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "dynamic":
        raise UserError(
            "config.json has rope_type dynamic: at inference it stretches each sequence that is longer than "
            "max_position_embeddings by its own length, and shorter ones not at all; "
            "would work: rope_scaling null"
        )
    names = _NAMES if family.rotated_fraction is None else [*_NAMES, _FRACTION]
    if family.nested is not None:
        names = [*names, *_OF_IMAGES]
    for key, value in parameters.items():
        if key not in names and value is not None and (key, value) != (_FRACTION, 1):
            raise UserError(
                f"config.json has {key} {json.dumps(value)} in {name}, which is not read; "
                f"would work: {name} with {', '.join(names)}"
            )
    original = "original_max_position_embeddings"
    rotation = {
        "rope_theta": found.get("rope_theta", family.theta),
        original: found.get("max_position_embeddings", 2048),
        **parameters,
        "rope_type": "none" if kind == "default" else kind,
    }
    if family.local_theta is not None:
        theta = found.get(_LOCAL_THETA, family.local_theta)
        rotation[_LOCAL_THETA] = local.get("rope_theta", theta)
    if family.rotated_fraction is not None:
        rotation.setdefault(_FRACTION, found.get(_FRACTION, family.rotated_fraction))
    if found.get(original) is not None:  # transformers prefers the one outside of the object
        rotation[original] = found[original]
    return rotation


def rotation_fields(model: ModelConfig, rotation: Mapping[str, Any]) -> Iterator[ConfigField]:
    """The fields of a rotation; those of its scaling if the model has the same."""
    yield ConfigField("rope_theta", model.rope.theta, "rope.theta", nullable=True)
    yield ConfigField("rope_type", model.rope.scaling, "rope.scaling", nullable=True)
    if _LOCAL_THETA in rotation:
        yield ConfigField(_LOCAL_THETA, model.rope.local_theta, "rope.local_theta")
    if _FRACTION in rotation:
        yield ConfigField(_FRACTION, model.rope.rotated_fraction, "rope.rotated_fraction")
    if model.rope.scaling == rotation["rope_type"]:
        yield from scaling_fields(model)


def check_attention_factor(model: ModelConfig, rotation: Mapping[str, Any]) -> None:
    """Check that a factor of the rotation is the one that follows from mscale, which it would replace."""
    scale = model.rope.rotation_scale
    given = rotation.get("attention_factor")
    if model.rope.scaling != "yarn" or given is None:
        return
    if not isinstance(given, int | float) or not math.isclose(given, scale, rel_tol=1e-6):
        raise UserError(
            f"config.json has attention_factor {json.dumps(given)}: the rotation is scaled by "
            f"{scale:.6g}, which follows from the other fields; would work: attention_factor null, or "
            "mscale and mscale_all_dim with the same ratio of temperatures"
        )
