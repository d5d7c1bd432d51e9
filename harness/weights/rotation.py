"""The rotation in a config.json, as transformers 4 and 5 write it (no torch)."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from harness.config.model import ModelConfig
from harness.util.errors import UserError
from harness.weights.families.core import ConfigField

# The fields of RopeConfig that each scaling reads, with config.json's names and defaults.
STRETCHING: dict[str, dict[str, tuple[str, object]]] = {
    "none": {},
    "linear": {"factor": ("factor", None)},
    "llama3": {
        "factor": ("factor", None),
        "low_freq_factor": ("low_freq_factor", None),
        "high_freq_factor": ("high_freq_factor", None),
        "original_max_position": ("original_max_position_embeddings", None),
    },
    "yarn": {
        "factor": ("factor", None),
        "original_max_position": ("original_max_position_embeddings", None),
        "beta_fast": ("beta_fast", 32.0),
        "beta_slow": ("beta_slow", 1.0),
        "truncate": ("truncate", True),
        "mscale": ("mscale", None),
        "mscale_all_dim": ("mscale_all_dim", None),
    },
}

_NOT_FLOATS = ("truncate", "original_max_position_embeddings")

# All names that a rotation may have.
_NAMES = ["rope_type", "type", "rope_theta", "attention_factor"]
for _fields in STRETCHING.values():
    _NAMES += [_theirs for _theirs, _ in _fields.values() if _theirs not in _NAMES]


def scaling_fields(model: ModelConfig) -> list[ConfigField]:
    """The fields that the scaling of a model's rotation reads."""
    rope = model.rope
    fields = []
    for name, (theirs, default) in STRETCHING[rope.scaling].items():
        value = getattr(rope, name)
        fields.append(ConfigField(theirs, value, f"rope.{name}", default=default, nullable=True))
    return fields


def written_rotation(model: ModelConfig) -> dict[str, Any]:
    """The rotation as both versions of transformers read it: 4 ``rope_scaling``, 5 ``rope_parameters``."""
    theta = float(model.rope.theta)
    content: dict[str, Any] = {"rope_type": model.rope.scaling}
    for field in scaling_fields(model):
        value: Any = field.value
        if value is not None:
            # transformers warns about integer factors.
            content[field.theirs] = value if field.theirs in _NOT_FLOATS else float(value)
    if model.rope.scaling == "none":
        parameters = {"rope_type": "default", "rope_theta": theta}
        return {"rope_theta": theta, "rope_scaling": None, "rope_parameters": parameters}
    parameters = {**content, "rope_theta": theta}
    return {"rope_theta": theta, "rope_scaling": content, "rope_parameters": parameters}


def rotation_of(found: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """The rotation in a config.json of transformers 4 or 5, as the content of one object.

    ``theta`` is the one of a file that has none. ``rope_type`` is our name of the scaling, or
    theirs if we do not have it. UserError if the rotation is not supported.
    """
    # In this order, because transformers 5 prefers rope_scaling where a file has both.
    name = "rope_scaling" if found.get("rope_scaling") else "rope_parameters"
    parameters = found.get(name) or {}
    if not isinstance(parameters, dict):
        raise UserError(
            f"config.json has {name} {json.dumps(parameters)}: must be an object or null"
        )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "dynamic":
        raise UserError(
            "config.json has rope_type dynamic: at inference it stretches each sequence that is longer than "
            "max_position_embeddings by its own length, and shorter ones not at all; "
            "would work: rope_scaling null"
        )
    for key, value in parameters.items():
        if key not in _NAMES and value is not None and (key, value) != ("partial_rotary_factor", 1):
            raise UserError(
                f"config.json has {key} {json.dumps(value)} in {name}, which is not read; "
                f"would work: {name} with {', '.join(_NAMES)}"
            )
    rotation = {
        "rope_theta": found.get("rope_theta", theta),
        "original_max_position_embeddings": found.get("max_position_embeddings", 2048),
        **parameters,
        "rope_type": "none" if kind == "default" else kind,
    }
    original = found.get("original_max_position_embeddings")
    if original is not None:  # transformers prefers the one outside of the object
        rotation["original_max_position_embeddings"] = original
    return rotation


def rotation_fields(model: ModelConfig, rotation: Mapping[str, Any]) -> Iterator[ConfigField]:
    """The fields of a rotation; those of its scaling if the model has the same."""
    yield ConfigField("rope_theta", model.rope.theta, "rope.theta", nullable=True)
    yield ConfigField("rope_type", model.rope.scaling, "rope.scaling", nullable=True)
    if model.rope.scaling == rotation["rope_type"]:
        yield from scaling_fields(model)


def check_attention_factor(model: ModelConfig, rotation: Mapping[str, Any]) -> None:
    """Check that a factor of the rotation is the one that follows from mscale, which it would replace."""
    rope = model.rope
    given = rotation.get("attention_factor")
    if rope.scaling != "yarn" or given is None:
        return
    if isinstance(given, int | float) and math.isclose(given, rope.rotation_scale, rel_tol=1e-6):
        return
    raise UserError(
        f"config.json has attention_factor {json.dumps(given)}: the rotation is scaled by "
        f"{rope.rotation_scale:.6g}, which follows from the other fields; would work: attention_factor "
        "null, or mscale and mscale_all_dim with the same ratio of temperatures"
    )
