"""Common parts of families: how tensors correspond, and the fields of config.json (no torch)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from harness.config.model import ModelConfig
from harness.model.spec import tensor_shapes
from harness.util.errors import ConfigError, divisors

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """Some rows of their tensor, such as queries in a fused projection: ``length`` of every ``period``."""

    first: int
    length: int
    period: int

    def runs(self, ours: range) -> Iterator[tuple[slice, range]]:
        """Consecutive rows: which of ``ours`` they are, counted from its first, and which of theirs."""
        row = ours.start
        while row < ours.stop:
            run, within = divmod(row, self.length)
            count = min(self.length - within, ours.stop - row)
            theirs = run * self.period + self.first + within
            begin = row - ours.start
            yield slice(begin, begin + count), range(theirs, theirs + count)
            row += count


@dataclass(frozen=True)
class TensorSlot:
    """The location of our values in one of their tensors."""

    name: str  # in a block; with "{expert}" in it, each expert has a tensor
    half: int | None = None  # which half of a dimension; None: all of it
    half_of: int = -1  # the dimension of theirs that has halves: -1 or -2
    interleaved: bool = False  # the halves alternate; else they are concatenated
    transposed: bool = False  # the last two dimensions are swapped
    within: tuple[int, int] | None = None
    """Our values are only a part of its last dimension: their first index, and its length."""
    rows: Rows | None = None
    """Our rows are only some of its rows; None: all of them."""
    ones: tuple[int, int] = (0, 0)
    """Dimensions of size 1 that it has before and after ours."""


Names = dict[str, str | TensorSlot]

# From our names of modules in a block, or outside of all blocks, to theirs. Families add more.
OUTSIDE: Names = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
NORMS: Names = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
ATTENTION: Names = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
}
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def projections(ours: str, theirs: str) -> Names:
    """Names of a feed-forward's projections, within its name and theirs."""
    return {f"{ours}.{each}": f"{theirs}.{other}" for each, other in PROJECTIONS.items()}


DENSE = projections("feed_forward", "mlp")
HEAD_NORMS: Names = {
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}


def fused(theirs: str, widths: Mapping[str, int]) -> Names:
    """Slots of linears, by our names with their outputs, of which a family makes one."""
    total = sum(widths.values())
    slots: Names = {}
    first = 0
    for ours, width in widths.items():
        slots[ours] = TensorSlot(theirs, rows=Rows(first, width, total))
        first += width
    return slots


def fused_gate(model: ModelConfig) -> Names:
    """Slots of a dense feed-forward whose gate and other factor are one tensor."""
    hidden = model.ffn_hidden_dim
    return fused("mlp.gate_up_proj", {"feed_forward.w1": hidden, "feed_forward.w3": hidden})


_IN_BLOCK = re.compile(r"(?:layers\.(\d+)|mtp(?:\.block)?)\.(.+)")
_SUFFIX = re.compile(r"(.+)(\.weight|\.bias)")


@dataclass(frozen=True)
class TensorMapping:
    """Maps one of our tensors, or an expert's slice of it, to one of their tensors."""

    ours: str
    theirs: str
    slot: TensorSlot
    expert: int | None = None  # index in our first dimension; None: all of our tensor
    is_copy: bool = False  # an additional copy, which is written and not read

    @property
    def is_same(self) -> bool:
        """Whether both tensors are the same."""
        return self.expert is None and self.slot == TensorSlot(self.slot.name)

    def their_shape(self, shape: Shape) -> Shape:
        """Shape of their tensor, for our tensor's shape."""
        shape = shape if self.expert is None else shape[1:]
        before, after = self.slot.ones
        shape = (*(1,) * before, *shape, *(1,) * after)
        if self.slot.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        if self.slot.within is not None:
            return (*shape[:-1], self.slot.within[1])
        rows = self.slot.rows
        if rows is not None:
            return (shape[0] // rows.length * rows.period, *shape[1:])
        if self.slot.half is not None:
            halved = len(shape) + self.slot.half_of
            return (*shape[:halved], 2 * shape[halved], *shape[halved + 1 :])
        return shape


PER_EXPERT: Names = {
    f"moe.experts.{ours}": TensorSlot(f"mlp.experts.{{expert}}.{theirs}.weight")
    for ours, theirs in PROJECTIONS.items()
}
"""Names of experts with one tensor per projection and expert."""


NOT_SAID = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Errors of a function of config.json's fields when one of them is missing or invalid."""
_MOST_LAYERS = 10_000

NEEDED = object()
"""Default of a required field."""


@dataclass(frozen=True)
class ConfigField:
    """One field of config.json: its name and the value that it must have for a model.

    Attributes:
        ours: our field, without ``model.``; None: the decoder supports ``value`` only.
        default: its value when it is missing, or a function of the other fields.
        nullable: whether null is a value; else null means missing.
        read: applied to a value before it is compared.
        alias: another name of it.
        to_ours: maps their value and all of config.json to our value, if different; returns None if
            this field does not determine ours.
    """

    theirs: str
    value: object
    ours: str | None = None
    default: object = NEEDED
    nullable: bool = False
    read: Callable[[Any], object] | None = None
    alias: str | None = None
    to_ours: Callable[[Any, Mapping[str, Any]], object] | None = None

    def found(self, content: Mapping[str, Any]) -> object:
        """The value in a config.json, or the default."""
        for name in (self.theirs, self.alias or self.theirs):
            if name in content and (self.nullable or content[name] is not None):
                try:
                    return self.read(content[name]) if self.read else content[name]
                except NOT_SAID:
                    return content[name]  # of another type, so it will differ
        if self.default is NEEDED:
            return None
        if not callable(self.default):
            return self.default
        try:
            return self.default(content)
        except NOT_SAID:
            return None  # a field that the default depends on is missing or invalid, and reported itself


def undetermined(_theirs: object, _found: object) -> None:
    """``to_ours`` of a field that does not determine ours."""


@dataclass(frozen=True)
class Family:
    """The format of one family's checkpoints at Hugging Face.

    Attributes:
        architecture: transformers' class.
        names: from our modules in a block to theirs, and our tensors that are not a module's weight
            or bias.
        config_fields: the fields of config.json for a model.
        requires: our fields that the family fixes to another value than the default.
        kept: our fields that may have any value although config.json does not contain them.
        refuse: raises ConfigError for other models that its files cannot represent.
        unbuildable: raises ConfigError for models that its files can represent and transformers
            cannot build.
        written: further fields to write to config.json, which are not read.
        theta: default of rope_theta.
        rotated_fraction: default of partial_rotary_factor; None: transformers does not read it and
            rotates all of a head.
        local_theta: default of the base of rotation in local layers; None: they have no own.
        slots: like ``names``, of tensors whose places depend on the model's widths.
        assumed: values of fields in ``kept`` for a model that is read from config.json alone.
        harmless: fields of config.json that change nothing beside ``config_fields``; all families'
            are in ``harness.weights.families.harmless``.
        trained: from fields of config.json that only affect training to ours, for reading and
            writing.
        nested: a larger model whose files can be read too.
        ignored: prefixes of names of tensors that are not the decoder's.
        mtp: like ``names``, of multi-token prediction's modules; theirs are in block n_layers.
        mtp_copies: our tensors of which that block has copies, and their names there.
    """

    name: str  # value of model.family
    model_type: str  # in config.json
    architecture: str
    names: Mapping[str, str | TensorSlot]
    config_fields: Callable[[ModelConfig], list[ConfigField]]
    requires: Mapping[str, object] = field(default_factory=dict)
    is_mixture: bool = False
    kept: tuple[str, ...] = ()
    refuse: Callable[[ModelConfig], None] | None = None
    unbuildable: Callable[[ModelConfig], None] | None = None
    written: Callable[[ModelConfig], dict[str, Any]] | None = None
    theta: float = 10000.0
    rotated_fraction: float | None = None
    local_theta: float | None = None
    slots: Callable[[ModelConfig], Names] | None = None
    assumed: Callable[[ModelConfig], dict[str, object]] | None = None
    trained: Mapping[str, str] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    nested: Nested | None = None
    ignored: Callable[[ModelConfig], tuple[str, ...]] | None = None
    mtp: Names = field(default_factory=dict)
    mtp_copies: Mapping[str, str] = field(default_factory=dict)
    library: str = "transformers"  # or diffusers

    @property
    def is_diffusers(self) -> bool:
        """Whether config.json and the names of files are those of diffusers."""
        return self.library == "diffusers"

    @property
    def type_key(self) -> str:
        """The field of config.json that has ``model_type``."""
        return "_class_name" if self.is_diffusers else "model_type"

    @property
    def stem(self) -> str:
        """The beginning of the names of the files of weights."""
        return "diffusion_pytorch_model" if self.is_diffusers else "model"

    def pieces(self, model: ModelConfig) -> Iterator[TensorMapping]:
        """The mapping of all tensors, in our order."""
        shapes = tensor_shapes(model)
        in_blocks: Names = {**self.names, **self.mtp}
        if self.slots is not None:
            in_blocks |= self.slots(model)
        for name, shape in shapes.items():
            block = _IN_BLOCK.fullmatch(name)
            known = in_blocks if block else OUTSIDE
            prefix = f"model.layers.{block[1] or model.n_layers}." if block else ""
            inner = block[2] if block else name
            slot = known.get(inner)
            module = _SUFFIX.fullmatch(inner)
            if module is not None:
                place = known.get(module[1])
                slot = TensorSlot(f"{place}{module[2]}") if isinstance(place, str) else None
                if isinstance(place, TensorSlot):
                    slot = replace(place, name=f"{place.name}{module[2]}")
            if not isinstance(slot, TensorSlot):
                rule = f"checkpoints of this family have no place for {name}"
                raise ConfigError("model.family", self.name, rule)
            if "{expert}" not in slot.name:
                yield TensorMapping(name, prefix + slot.name, slot)
                continue
            for expert in range(shape[0]):
                yield TensorMapping(name, prefix + slot.name.format(expert=expert), slot, expert)
        for name, theirs in self.mtp_copies.items() if model.mtp.depth else ():
            slot = TensorSlot(f"model.layers.{model.n_layers}.{theirs}")
            ours = (
                name if name in shapes else "tok_embeddings.weight"
            )  # a tied projection is the table
            yield TensorMapping(ours, slot.name, slot, is_copy=True)


@dataclass(frozen=True)
class Nested:
    """A larger model that contains a family's decoder."""

    model_type: str
    key: str  # of the decoder's config in config.json
    prefix: str  # that names of the decoder's tensors have more, at their begin or inside
    others: tuple[str, ...]  # prefixes of all other tensors


def fixed(theirs: str, value: object) -> ConfigField:
    """A field of config.json that has one value for all models, which is its default too."""
    return ConfigField(theirs, value, default=value)


def same_fields(
    model: ModelConfig, names: Mapping[str, str], **defaults: object
) -> list[ConfigField]:
    """Fields of config.json that have the values of ours.

    Args:
        model: the model.
        names: our fields, without ``model.``, by theirs.
        defaults: values of missing fields, by their names.
    """
    fields = []
    for theirs, ours in names.items():
        value = attrgetter(ours)(model)
        fields.append(ConfigField(theirs, value, ours, default=defaults.get(theirs, NEEDED)))
    return fields


_COMMON = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
    "max_position_embeddings": "max_seq_len",
}


def common(
    model: ModelConfig, *, head_dim: object = NEEDED, activation: str = "silu", **defaults: object
) -> list[ConfigField]:
    """Fields of config.json that every family has; ``defaults`` are those of fields by name."""
    heads = "num_attention_heads"
    known = {
        "num_key_value_heads": lambda found: found.get(heads, defaults.get(heads)),
        "tie_word_embeddings": False,
        **defaults,
    }
    fields = same_fields(model, _COMMON, **known)
    fields.append(fixed("hidden_act", activation))
    if not model.attention.is_latent:
        fields.insert(2, ConfigField("head_dim", model.head_width, "head_dim", default=head_dim))
    return fields


def layers_in(found: Mapping[str, Any]) -> range:
    """The numbers of the blocks in a config.json."""
    layers = found["num_hidden_layers"]
    if not isinstance(layers, int) or not 0 < layers <= _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers {layers!r}")
    return range(layers)


def every_nth(marked: Sequence[bool]) -> int | None:
    """The n such that exactly every n-th layer (n - 1, 2n - 1, ...) is marked; None if no layer is."""
    if not any(marked):
        return None
    every = list(marked).index(True) + 1
    if [(layer + 1) % every == 0 for layer in range(len(marked))] != list(marked):
        raise ValueError("not every n-th layer")
    return every


def layer_types(
    model: ModelConfig, partial: str, width: str, default: Callable[[Mapping[str, Any]], list[str]]
) -> ConfigField:
    """The field that lists which layers attend to all tokens; others are ``partial``.

    A null in the field ``width`` of config.json means that all layers do, whatever is listed.
    """

    def to_ours(types: Any, found: Mapping[str, Any]) -> int | None:
        if found.get(width, 0) is None:
            return None
        return every_nth([each == "full_attention" for each in types])

    types = [
        "full_attention" if model.span(layer).is_whole else partial
        for layer in range(model.n_layers)
    ]
    ours = "attention.global_every_nth_layer"
    return ConfigField("layer_types", types, ours, default=default, to_ours=to_ours)


def global_layers(found: Mapping[str, Any], every: int) -> list[str]:
    """Default of ``layer_types`` if every n-th layer attends to all tokens, and others within a window."""
    return [
        "full_attention" if (layer + 1) % every == 0 else "sliding_attention"
        for layer in layers_in(found)
    ]


def window_field(model: ModelConfig, default: int | None) -> ConfigField:
    """The field of the window within which layers attend."""
    window = model.attention.window
    return ConfigField("sliding_window", window, "attention.window", default, nullable=True)


def head_width(found: Mapping[str, Any]) -> int:
    """Default width of a head."""
    return int(found["hidden_size"]) // int(found["num_attention_heads"])


def attention_biases(model: ModelConfig) -> list[ConfigField]:
    """The field that gives all four projections of attention biases."""
    return [
        *same_fields(model, {"attention_bias": "attention.qkv_bias"}, attention_bias=False),
        *same_fields(model, {"attention_bias": "attention.output_bias"}, attention_bias=False),
    ]


def both_biases(model: ModelConfig) -> None:
    """Check that all of attention's projections have biases, or none."""
    attention = model.attention
    if attention.qkv_bias != attention.output_bias:
        rule = "checkpoints of this family have biases in all of attention's projections or in none"
        works = [str(attention.qkv_bias).lower()]
        raise ConfigError("model.attention.output_bias", attention.output_bias, rule, works)


def own_local_rotation(model: ModelConfig) -> None:
    """Check that local layers have a rotation of their own."""
    if model.rope.local_theta is None:
        rule = "checkpoints of this family have a base of rotation for local layers"
        raise ConfigError("model.rope.local_theta", None, rule, [model.rope.theta])


def dividing_heads(model: ModelConfig) -> None:
    """Check that the number of heads divides the width."""
    if model.dim % model.n_heads:
        rule = f"transformers wants it to divide model.dim={model.dim} here, whatever model.head_dim is"
        raise ConfigError("model.n_heads", model.n_heads, rule, divisors(model.dim))
