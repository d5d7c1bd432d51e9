"""Models as Hugging Face keeps them: names, shapes and config.json (no torch).

What is peculiar to a family lies in ``harness.model.families``. Weights go back and forth unchanged, because
``harness.model.rope`` rotates the pairs that each family's files are made for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.config import NUMERICS, leaves
from harness.errors import ConfigError, UserError
from harness.model.config import ModelConfig
from harness.model.families import ALL, Family
from harness.model.families.core import NEEDED, Piece, Says, Shape
from harness.model.shapes import tensor_shapes

HEAD = "lm_head.weight"

# Older files keep these beside the parameters; whoever runs the model computes them.
_BUFFER = ".rotary_emb.inv_freq"
_SHOWN = 3  # names of a kind in one line of error; the count says how many there are
_SHOWN_ITEMS = 8  # of a list

# What a model was trained with, and no longer computes with.
_TRAINING = ("embedding_std", "moe.aux_loss_coeff", "mtp.loss_weight")
# Fields of RopeConfig: those that each scaling reads, with config.json's names and defaults.
_STRETCHING: dict[str, dict[str, tuple[str, object]]] = {
    "none": {},
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


def family_of(model: ModelConfig) -> Family:
    """The family whose files a model is read from and written to.

    Raises:
        ConfigError: they cannot say what the model is.
    """
    family = _speaking(model)
    if family.refuse is not None:
        family.refuse(model)
    return family


def _speaking(model: ModelConfig) -> Family:
    """The same, where each field is one that the family can say; not all of them need go together."""
    family = ALL[model.family]
    if family.is_mixture and not model.moe.enabled:
        rule = f"checkpoints of model.family={family.name} have experts"
        raise ConfigError("model.moe.num_experts", 0, rule, "at least 1")
    for name, value in relevant(model):
        if not _can_say(family, model, name, value):
            raise _cannot_say(family, model, name, value)
    return family


def relevant(model: ModelConfig) -> Iterator[tuple[str, object]]:
    """The fields of a model that change what it computes, with their values."""
    attention, of, rope = model.attention, model.moe, model.rope
    unread = {*_TRAINING, *(f"rope.{name}" for name in _STRETCHING["llama3"] | _STRETCHING["yarn"])}
    unread -= {f"rope.{name}" for name in _STRETCHING[rope.scaling]}
    if attention.is_latent:
        unread |= {"n_kv_heads", "head_dim"}
    if attention.nope_every_nth_layer is None:
        unread.add("attention.nope_temperature")
    if attention.nope_every_nth_layer is None or not attention.nope_temperature:
        unread.add("attention.nope_temperature_floor")
    if of.num_groups == 1:
        unread |= {"moe.top_groups", "moe.group_score"}
    if len(model.expert_layers) == model.num_blocks:
        unread.add("ffn_hidden_dim")
    for name, role, value in leaves(model):
        without = name.startswith("moe.") and not of.enabled and name != "moe.num_experts"
        if role == NUMERICS and name not in unread and not without:
            yield name, value


def _cannot_say(family: Family, model: ModelConfig, name: str, value: object) -> ConfigError:
    able = [f"model.family={each.name}" for each in ALL.values() if _can_say(each, model, name, value)]
    lacks = "cannot say it"
    if name == "moe.balance_coeff":
        lacks = f"have no place for layers.{model.expert_layers[0]}.moe.balance_bias"
    rule = f"checkpoints of model.family={family.name} {lacks}"
    return ConfigError(f"model.{name}", value, rule, [_typed(_required(family, name)), *able])


def _can_say(family: Family, model: ModelConfig, name: str, value: object) -> bool:
    said = {says.ours for says in family.says(model)}
    free = name in said or name in family.kept or (name.startswith("rope.") and name != "rope.interleaved")
    return free or value == _required(family, name)


def _required(family: Family, name: str) -> object:
    """The one value that a family has for a field that it does not say."""
    return family.requires.get(name, _DEFAULTS[name])


_DEFAULTS = {name: value for name, _, value in leaves(ModelConfig())}


def hf_tensors(model: ModelConfig) -> dict[str, list[Piece]]:
    """All tensors of Hugging Face's, and what of ours stands in each; in our order.

    Raises:
        ConfigError: the model's family cannot say what it is.
    """
    return _grouped(family_of(model).pieces(model), lambda piece: piece.theirs)


def our_tensors(model: ModelConfig) -> dict[str, list[Piece]]:
    """All tensors of ours, and where each stands in theirs; in our order.

    Raises:
        ConfigError: the model's family cannot say what it is.
    """
    pieces = (piece for piece in family_of(model).pieces(model) if not piece.is_copy)
    return _grouped(pieces, lambda piece: piece.ours)


def copied_tensors(model: ModelConfig) -> dict[str, list[Piece]]:
    """Tensors of ours that stand in theirs more than once, and where they do besides.

    Raises:
        ConfigError: the model's family cannot say what it is.
    """
    pieces = (piece for piece in family_of(model).pieces(model) if piece.is_copy)
    return _grouped(pieces, lambda piece: piece.ours)


def _grouped(pieces: Iterable[Piece], key: Any) -> dict[str, list[Piece]]:
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(key(piece), []).append(piece)
    return groups


def hf_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Name and shape of all tensors of Hugging Face's.

    Raises:
        ConfigError: the model's family cannot say what it is.
    """
    ours = tensor_shapes(model)
    return {name: pieces[0].their_shape(ours[pieces[0].ours]) for name, pieces in hf_tensors(model).items()}


def hf_config(model: ModelConfig, *, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
    """The content of config.json with which transformers builds the same model.

    Rotation and number format are said twice: 4.x reads ``rope_theta``, ``rope_scaling`` and ``torch_dtype``,
    5.x writes ``rope_parameters`` and ``dtype``. Each ignores, or reads and agrees with, what is the other's.

    Args:
        model: the model's numbers.
        dtype: format of the stored weights as torch calls it, e.g. ``bfloat16``.
        bos_id: id of the token that begins a document, None where there is none.
        eos_id: id of the token that ends a document, None where there is none.

    Raises:
        ConfigError: a model that the family's files cannot say, or that transformers refuses.
    """
    family = family_of(model)
    if family.unbuildable is not None:
        family.unbuildable(model)
    theta = float(model.rope.theta)
    scaling = _hf_scaling(model)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{says.theirs: says.value for says in family.says(model)},
        **(family.written(model) if family.written else {}),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": theta},
        "attention_dropout": 0.0,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def _hf_scaling(model: ModelConfig) -> dict[str, Any] | None:
    rope = model.rope
    if rope.scaling == "none":
        return None
    said: dict[str, Any] = {"rope_type": rope.scaling}
    for name, (theirs, _) in _STRETCHING[rope.scaling].items():
        value = getattr(rope, name)
        if value is not None:
            # Floats, because transformers warns of a factor that is an integer.
            exact = name in ("truncate", "original_max_position")
            said[theirs] = value if exact else float(value)
    return said


@dataclass(frozen=True)
class _Fact:
    """One thing that both sides say: our field and value, their field and value."""

    field: str
    value: object
    hf_field: str
    hf_value: object

    def __str__(self) -> str:
        return f"{self.field}={_typed(self.value)}: config.json has {self.hf_field} {_typed(self.hf_value)}"


def _typed(value: object) -> str:
    """The value as YAML and JSON have it; of a long list the beginning."""
    if isinstance(value, list) and len(value) > _SHOWN_ITEMS:
        return f"{json.dumps(value[:_SHOWN_ITEMS])[:-1]}, ...]"
    return value if isinstance(value, str) else json.dumps(value)


def check_hf_config(model: ModelConfig, found: Mapping[str, Any]) -> None:
    """Refuses a checkpoint of another model than ``model``, by what its config.json says.

    Reads what transformers 4.x writes (``rope_theta``, ``rope_scaling``) and what 5.x does
    (``rope_parameters``); a field that is left out has transformers' default.

    Raises:
        UserError: one line that names every field of the model that differs, or what the model cannot do.
    """
    family = _speaking(model)
    found = _own_part(family, found)
    if found.get("quantization_config"):
        method = found["quantization_config"].get("quant_method", "some method")
        raise UserError(
            f"config.json has quantization_config: weights quantized by {method} are not read; "
            "would work: the same in bfloat16"
        )
    facts: list[_Fact] = []
    for says in family.says(model):
        theirs = says.found(found)
        if theirs == says.value:
            continue
        if says.ours is None:
            only = f"the decoder only knows {says.theirs} {_typed(says.value)}"
            raise UserError(f"config.json has {says.theirs} {_typed(theirs)}: {only}")
        facts.append(_Fact(f"model.{says.ours}", _shown(says), says.theirs, theirs))
    facts += [fact for fact in _rope_facts(family, model, found) if fact.value != fact.hf_value]
    if facts:
        raise UserError("; ".join(map(str, facts)))
    family_of(model)


def _shown(says: Says) -> object:
    return says.value if says.shown is NEEDED else says.shown


def _own_part(family: Family, found: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json says of the decoder, which may be part of a larger model."""
    model_type, nested = found.get("model_type"), family.nested
    if nested is not None and model_type == nested.model_type and isinstance(found.get(nested.key), dict):
        quantized = {name: found[name] for name in ("quantization_config",) if name in found}
        return {**found[nested.key], **quantized}
    if model_type == family.model_type:
        return found
    said = f"model_type {model_type}" if model_type else "no model_type"
    read = f"with model_type {family.model_type} are read, model.family being {family.name}"
    raise UserError(f"config.json has {said}: only checkpoints {read}")


def _rope_facts(family: Family, model: ModelConfig, found: Mapping[str, Any]) -> list[_Fact]:
    # In this order, because transformers 5 prefers rope_scaling where a file has both.
    says = found.get("rope_scaling") or found.get("rope_parameters") or {}
    rope = model.rope
    theta = says.get("rope_theta", found.get("rope_theta", family.theta))
    kind = says.get("rope_type", says.get("type", "default"))
    scaling = "none" if kind == "default" else kind
    facts = [
        _Fact("model.rope.theta", rope.theta, "rope_theta", theta),
        _Fact("model.rope.scaling", rope.scaling, "rope_type", scaling),
    ]
    if rope.scaling == scaling:
        says = {"original_max_position_embeddings": found.get("max_position_embeddings", 2048), **says}
        facts += [
            _Fact(f"model.rope.{name}", getattr(rope, name), theirs, says.get(theirs, default))
            for name, (theirs, default) in _STRETCHING[scaling].items()
        ]
        # It would be in the place of what mscale says.
        given = says.get("attention_factor") if scaling == "yarn" else None
        if given is not None:
            facts.append(_Fact("model.rope.mscale", rope.mscale, "attention_factor", given))
    return facts


def own_name(model: ModelConfig, name: str) -> str | None:
    """The name of a checkpoint's tensor without what a larger model puts before it; None: it is not ours."""
    family = ALL[model.family]
    nested = family.nested
    others = (nested.others if nested else ()) + (family.ignored(model) if family.ignored else ())
    if name.endswith(_BUFFER) or (others and name.startswith(others)):
        return None
    return name.removeprefix(nested.prefix) if nested else name


def check_hf_tensors(model: ModelConfig, found: Mapping[str, Shape]) -> None:
    """Refuses a checkpoint whose tensors are not the model's.

    Tolerates those that say nothing new: the output projection of a model whose embeddings are tied, the
    rotation's inverse frequencies, and what ``own_name`` says is not ours. Copies need not be there.

    Args:
        model: the model's numbers.
        found: name and shape of every tensor in the checkpoint.

    Raises:
        UserError: one line with the number and the first names of those missing, unexpected or misshapen.
    """
    found = {own: shape for name, shape in found.items() if (own := own_name(model, name)) is not None}
    expected = hf_shapes(model)
    optional = {HEAD: (model.vocab_size, model.dim)} if model.tied_embeddings else {}
    allowed = expected | optional
    copies = {piece.theirs for pieces in copied_tensors(model).values() for piece in pieces}
    missing = [name for name in expected if name not in found and name not in copies]
    unexpected = [name for name in found if name not in allowed]
    misshapen = [
        f"{name} is {list(shape)} and not {list(allowed[name])}"
        for name, shape in found.items()
        if name in allowed and tuple(shape) != allowed[name]
    ]
    groups = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
    wrong = [f"{len(names)} {what} ({_first(names)})" for what, names in groups.items() if names]
    if wrong:
        raise UserError(f"the checkpoint's tensors are not those of model={model.name}: {', '.join(wrong)}")


def _first(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join([*every[:_SHOWN], *(["..."] if len(every) > _SHOWN else [])])
