"""Rotation as config.json has it, in the forms of transformers 4 and 5 (no torch)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import UserError
from harness.model.config import ModelConfig
from harness.model.families import Family

# Fields of RopeConfig: those that each scaling reads, with config.json's names and defaults.
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


def said_scaling(model: ModelConfig) -> dict[str, Any] | None:
    """The content of ``rope_scaling``."""
    rope = model.rope
    if rope.scaling == "none":
        return None
    said: dict[str, Any] = {"rope_type": rope.scaling}
    for name, (theirs, _) in STRETCHING[rope.scaling].items():
        value = getattr(rope, name)
        if value is not None:
            # Floats, because transformers warns of a factor that is an integer.
            exact = name in ("truncate", "original_max_position")
            said[theirs] = value if exact else float(value)
    return said


@dataclass(frozen=True)
class FoundRope:
    """What config.json says of the rotation.

    Attributes:
        theta: base of the wavelengths.
        scaling: ours, as far as we have it; else theirs.
        fields: what it says of the scaling, by its own names.
    """

    theta: object
    scaling: object
    fields: Mapping[str, Any]

    def values(self) -> dict[str, tuple[str, object]]:
        """Fields of RopeConfig that the scaling reads, each with their name and value."""
        return {
            name: (theirs, self.fields.get(theirs, default))
            for name, (theirs, default) in STRETCHING[str(self.scaling)].items()
        }


def found_rope(family: Family, found: Mapping[str, Any]) -> FoundRope:
    """What config.json says of the rotation, in either of the forms that transformers writes.

    Raises:
        UserError: it has no such form, or a scaling that training cannot have.
    """
    # In this order, because transformers 5 prefers rope_scaling where a file has both.
    name = "rope_scaling" if found.get("rope_scaling") else "rope_parameters"
    says = found.get(name) or {}
    if not isinstance(says, dict):
        raise UserError(f"config.json has {name} {json.dumps(says)}: an object belongs there, or null")
    kind = says.get("rope_type", says.get("type", "default"))
    if kind == "dynamic":
        raise UserError(
            "config.json has rope_type dynamic: at inference it stretches each sequence that is longer than "
            "max_position_embeddings by its own length, and shorter ones not at all; "
            "would work: rope_scaling null"
        )
    return FoundRope(
        theta=says.get("rope_theta", found.get("rope_theta", family.theta)),
        scaling="none" if kind == "default" else kind,
        fields={"original_max_position_embeddings": found.get("max_position_embeddings", 2048), **says},
    )
