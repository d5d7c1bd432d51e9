"""The rotation's fields in config.json, as transformers 4 and 5 write them (no torch)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import UserError
from harness.exchange.families import Family
from harness.model.config import ModelConfig

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


def rope_scaling_of(model: ModelConfig) -> dict[str, Any] | None:
    """The content of ``rope_scaling``."""
    rope = model.rope
    if rope.scaling == "none":
        return None
    content: dict[str, Any] = {"rope_type": rope.scaling}
    for name, (theirs, _) in STRETCHING[rope.scaling].items():
        value = getattr(rope, name)
        if value is not None:
            # Floats, because transformers warns about integer factors.
            exact = name in ("truncate", "original_max_position")
            content[theirs] = value if exact else float(value)
    return content


@dataclass(frozen=True)
class FoundRope:
    """The rotation in a config.json.

    Attributes:
        theta: base of the wavelengths.
        scaling: our name of the scaling, or theirs if we do not have it.
        fields: fields of the scaling, by their names.
    """

    theta: object
    scaling: object
    fields: Mapping[str, Any]

    def values(self) -> dict[str, tuple[str, object]]:
        """Their name and value for each field of RopeConfig that the scaling reads."""
        return {
            name: (theirs, self.fields.get(theirs, default))
            for name, (theirs, default) in STRETCHING[str(self.scaling)].items()
        }


def found_rope(family: Family, found: Mapping[str, Any]) -> FoundRope:
    """Read the rotation from a config.json of transformers 4 or 5.

    Raises:
        UserError: it is invalid, or has a scaling that training does not support.
    """
    # In this order, because transformers 5 prefers rope_scaling where a file has both.
    name = "rope_scaling" if found.get("rope_scaling") else "rope_parameters"
    parameters = found.get(name) or {}
    if not isinstance(parameters, dict):
        raise UserError(f"config.json has {name} {json.dumps(parameters)}: must be an object or null")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "dynamic":
        raise UserError(
            "config.json has rope_type dynamic: at inference it stretches each sequence that is longer than "
            "max_position_embeddings by its own length, and shorter ones not at all; "
            "would work: rope_scaling null"
        )
    return FoundRope(
        theta=parameters.get("rope_theta", found.get("rope_theta", family.theta)),
        scaling="none" if kind == "default" else kind,
        fields={"original_max_position_embeddings": found.get("max_position_embeddings", 2048), **parameters},
    )
