"""Models as Hugging Face keeps them: names, shapes and config.json (no torch).

What is peculiar to a family lies in ``harness.model.families``. Weights go back and forth unchanged, because
``harness.model.rope`` rotates the pairs that each family's files are made for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config import NUMERICS, leaves
from harness.errors import ConfigError, UserError
from harness.model.config import ModelConfig
from harness.model.families import ALL, Family
from harness.model.families.core import NEEDED, Piece, Says, Shape
from harness.model.huggingface_rope import STRETCHING, found_rope, said_scaling
from harness.model.spec import tensor_shapes

HEAD = "lm_head.weight"

# Older files keep these beside the parameters; whoever runs the model computes them.
_BUFFER = ".rotary_emb.inv_freq"
_SHOWN = 3  # names of a kind in one line of error; the count says how many there are
_SHOWN_ITEMS = 8  # of a list

# What a model was trained with, and no longer computes with.
_TRAINING = ("embedding_std", "moe.aux_loss_coeff", "mtp.loss_weight")


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file, with or without a byte order mark.

    Raises:
        UserError: there is none.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
    except FileNotFoundError:
        raise UserError(f"{file}: is missing") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read as JSON: {error}") from None
    return content


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
    said = _said(family, model)
    for name, value in relevant(model):
        if not _can_say(family, said, name, value):
            raise _cannot_say(family, model, name, value)
    return family


def relevant(model: ModelConfig) -> Iterator[tuple[str, object]]:
    """The fields of a model that change what it computes, with their values."""
    attention, of, rope = model.attention, model.moe, model.rope
    unread = {*_TRAINING, *(f"rope.{name}" for name in STRETCHING["llama3"] | STRETCHING["yarn"])}
    unread -= {f"rope.{name}" for name in STRETCHING[rope.scaling]}
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
    able = [
        f"model.family={each.name}"
        for each in ALL.values()
        if _can_say(each, _said(each, model), name, value)
    ]
    lacks = "cannot say it"
    if name == "moe.balance_coeff":
        lacks = f"have no place for layers.{model.expert_layers[0]}.moe.balance_bias"
    rule = f"checkpoints of model.family={family.name} {lacks}"
    return ConfigError(f"model.{name}", value, rule, [_typed(_required(family, name)), *able])


def _said(family: Family, model: ModelConfig) -> set[str | None]:
    """The fields that config.json of a family has."""
    return {says.ours for says in family.says(model)}


def _can_say(family: Family, said: set[str | None], name: str, value: object) -> bool:
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
    scaling = said_scaling(model)
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


@dataclass(frozen=True)
class _Fact:
    """One thing that both sides say: our field and value, their field and value."""

    field: str
    value: object
    hf_field: str
    hf_value: object
    works: object = None

    def __str__(self) -> str:
        said = f"{self.field}={_typed(self.value)}: config.json has {self.hf_field} {_typed(self.hf_value)}"
        return said if self.works is None else f"{said}, which is {self.field}={_typed(self.works)}"


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
    found = own_part(family, found)
    quantized = found.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else ""
        raise UserError(
            f"config.json has quantization_config: weights quantized by {method or 'some method'} are not "
            "read; would work: the same in bfloat16"
        )
    facts: list[_Fact] = []
    for says in family.says(model):
        theirs = says.found(found)
        if theirs == says.value:
            continue
        if says.ours is None:
            only = f"the decoder only knows {says.theirs} {_typed(says.value)}"
            raise UserError(f"config.json has {says.theirs} {_typed(theirs)}: {only}")
        facts.append(_Fact(f"model.{says.ours}", _shown(says), says.theirs, theirs, _works(says, found)))
    facts += [fact for fact in _rope_facts(family, model, found) if fact.value != fact.hf_value]
    if facts:
        raise UserError(
            f"{'; '.join(map(str, facts))}; would work: model=from_config, which takes all of them"
        )
    family_of(model)


def _shown(says: Says) -> object:
    return says.value if says.shown is NEEDED else says.shown


def _works(says: Says, found: Mapping[str, Any]) -> object:
    """What to type where our field has another unit than theirs; None where it has the same."""
    try:
        value = says.our_value(found) if says.to_ours else None
    except ValueError:
        return None
    return value if isinstance(value, str | int | float) and value != _shown(says) else None


def own_part(family: Family, found: Mapping[str, Any]) -> Mapping[str, Any]:
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
    rope, says = model.rope, found_rope(family, found)
    facts = [
        _Fact("model.rope.theta", rope.theta, "rope_theta", says.theta),
        _Fact("model.rope.scaling", rope.scaling, "rope_type", says.scaling),
    ]
    if rope.scaling == says.scaling:
        facts += [
            _Fact(f"model.rope.{name}", getattr(rope, name), theirs, value)
            for name, (theirs, value) in says.values().items()
        ]
        # It would be in the place of what mscale says.
        given = says.fields.get("attention_factor") if says.scaling == "yarn" else None
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
