"""What families have in common: how tensors correspond, and what config.json says (no torch)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.errors import ConfigError, divisors
from harness.model.config import ModelConfig
from harness.model.spec import tensor_shapes

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Slot:
    """Where values of ours stand in a tensor of theirs.

    Attributes:
        name: of the tensor in a block; ``{expert}`` in it means that each expert has one.
        half: which half of the last dimension; None: all of it.
        interleaved: whether the halves alternate, else one stands behind the other.
        transposed: whether the last two dimensions are swapped.
    """

    name: str
    half: int | None = None
    interleaved: bool = False
    transposed: bool = False


Names = dict[str, str | Slot]

# Our module in a block, or outside of all blocks, to theirs; what a family adds stands in its own file.
OUTSIDE: Names = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
NORMS: Names = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
ATTENTION: Names = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
}
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
DENSE: Names = {f"feed_forward.{ours}": f"mlp.{theirs}" for ours, theirs in PROJECTIONS.items()}

_IN_BLOCK = re.compile(r"(?:layers\.(\d+)|mtp(?:\.block)?)\.(.+)")
_SUFFIX = re.compile(r"(.+)(\.weight|\.bias)")


@dataclass(frozen=True)
class Piece:
    """One of our tensors, or what it has of one expert, and where that stands in theirs.

    Attributes:
        ours: our name.
        theirs: their name.
        slot: how it stands there.
        expert: index in our first dimension of what stands there; None: all of the tensor.
        is_copy: whether it stands there once more, and is read elsewhere.
    """

    ours: str
    theirs: str
    slot: Slot
    expert: int | None = None
    is_copy: bool = False

    @property
    def is_same(self) -> bool:
        """Whether both tensors are the same."""
        return self.expert is None and self.slot.half is None and not self.slot.transposed

    def width(self, shape: Shape) -> int:
        """How much of their last dimension the values take, from the shape of our tensor."""
        return shape[-2] if self.slot.transposed else shape[-1]

    def their_shape(self, shape: Shape) -> Shape:
        """Shape of their tensor, from that of ours."""
        shape = shape if self.expert is None else shape[1:]
        if self.slot.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        return shape if self.slot.half is None else (*shape[:-1], 2 * shape[-1])


def per_expert(prefix: str) -> Names:
    """Experts with a tensor for each projection of each expert."""
    return {
        f"moe.experts.{ours}": Slot(f"{prefix}.{{expert}}.{theirs}.weight")
        for ours, theirs in PROJECTIONS.items()
    }


_NOT_SAID = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)
_MOST_LAYERS = 10_000

NEEDED = object()
"""Default of a field that every config.json has."""


@dataclass(frozen=True)
class Says:
    """One field of config.json, and what it must say.

    Attributes:
        theirs: its name.
        value: what it must say.
        ours: field of the model that it is about, without ``model.``; None: the decoder does nothing else.
        shown: value of that field, where it is not the same.
        default: what it says when it is left out, or a function of the others.
        nullable: whether null is a value, else it is as if it were left out.
        read: what is made of a value before it is compared.
        alias: another name of it.
        to_ours: our value, from theirs and all of config.json, where it is not the same; None where theirs
            does not decide it.
    """

    theirs: str
    value: object
    ours: str | None = None
    shown: object = NEEDED
    default: object = NEEDED
    nullable: bool = False
    read: Callable[[Any], object] | None = None
    alias: str | None = None
    to_ours: Callable[[Any, Mapping[str, Any]], object] | None = None

    def found(self, content: Mapping[str, Any]) -> object:
        """What a config.json says."""
        for name in (self.theirs, self.alias or self.theirs):
            if name in content and (self.nullable or content[name] is not None):
                return self._read(content[name])
        if self.default is NEEDED:
            return None
        if not callable(self.default):
            return self.default
        try:
            return self.default(content)
        except _NOT_SAID:
            return None  # what it follows from is missing or wrong, which is said of that field

    def _read(self, value: Any) -> object:
        try:
            return self.read(value) if self.read else value
        except _NOT_SAID:
            return value  # it is of another type, and so it differs

    def our_value(self, content: Mapping[str, Any]) -> object:
        """Our field's value that config.json asks for; None where it does not say one.

        Raises:
            ValueError: it says something that no value of our field has.
        """
        theirs = self.found(content)
        if self.to_ours is None:
            return theirs
        try:
            return self.to_ours(theirs, content)
        except _NOT_SAID as error:
            raise ValueError(f"{self.theirs} {theirs!r}") from error


@dataclass(frozen=True)
class Family:
    """How models of one kind look at Hugging Face.

    Attributes:
        name: as model.family has it.
        model_type: what config.json calls it.
        architecture: transformers' class.
        names: our module in a block to theirs, and our tensors that are no module's weight or bias.
        says: what config.json says of a model.
        requires: fields of the model that the family fixes, where not to their defaults.
        is_mixture: whether it has experts.
        kept: fields that it can have as they are although config.json does not say them.
        refuse: raises ConfigError for what it cannot have besides.
        unbuildable: raises ConfigError for what its files can say and transformers does not build.
        written: what is written to config.json and never looked at.
        theta: rope_theta when it is left out.
        assumed: our values of fields in ``kept``, for a model that is read from config.json alone.
        trained: fields of config.json that only training reads, and ours.
        nested: a larger model whose files are read, too.
        ignored: beginnings of names of tensors that are none of the decoder's.
        mtp: names as in a block, of multi-token prediction's modules; theirs stand in block n_layers.
        mtp_copies: our tensors that stand there once more, and their names.
    """

    name: str
    model_type: str
    architecture: str
    names: Mapping[str, str | Slot]
    says: Callable[[ModelConfig], list[Says]]
    requires: Mapping[str, object] = field(default_factory=dict)
    is_mixture: bool = False
    kept: tuple[str, ...] = ()
    refuse: Callable[[ModelConfig], None] | None = None
    unbuildable: Callable[[ModelConfig], None] | None = None
    written: Callable[[ModelConfig], dict[str, Any]] | None = None
    theta: float = 10000.0
    assumed: Callable[[ModelConfig], dict[str, object]] | None = None
    trained: Mapping[str, str] = field(default_factory=dict)
    nested: Nested | None = None
    ignored: Callable[[ModelConfig], tuple[str, ...]] | None = None
    mtp: Names = field(default_factory=dict)
    mtp_copies: Mapping[str, str] = field(default_factory=dict)

    def pieces(self, model: ModelConfig) -> Iterator[Piece]:
        """How all tensors correspond, in our order.

        Raises:
            ConfigError: the family has no place for one of them.
        """
        shapes = tensor_shapes(model)
        for name, shape in shapes.items():
            try:
                yield from self.pieces_of(name, shape, model.n_layers)
            except ValueError:
                rule = f"checkpoints of this family have no place for {name}"
                raise ConfigError("model.family", self.name, rule) from None
        for name, theirs in self.mtp_copies.items() if model.mtp.depth else ():
            slot = Slot(f"model.layers.{model.n_layers}.{theirs}")
            # A tied output projection is the table.
            yield Piece(name if name in shapes else "tok_embeddings.weight", slot.name, slot, is_copy=True)

    def pieces_of(self, name: str, shape: Shape, n_layers: int | None = None) -> Iterator[Piece]:
        """How one of our tensors corresponds to theirs.

        Args:
            name: ours.
            shape: of ours.
            n_layers: of the model, for tensors of multi-token prediction.

        Raises:
            ValueError: the family has no such tensor.
        """
        block = _IN_BLOCK.fullmatch(name)
        known: Mapping[str, str | Slot] = {**self.names, **self.mtp} if block else OUTSIDE
        prefix, inner = (f"model.layers.{block[1] or n_layers}.", block[2]) if block else ("", name)
        module = _SUFFIX.fullmatch(inner)
        slot = known.get(inner)
        if module is not None:
            parent, suffix = module.groups()
            place = known.get(parent)
            slot = Slot(f"{place}{suffix}") if isinstance(place, str) else None
        if not isinstance(slot, Slot):
            raise ValueError(f"no parameter of a decoder of family {self.name} is called {name!r}")
        if "{expert}" not in slot.name:
            yield Piece(name, prefix + slot.name, slot)
            return
        for expert in range(shape[0]):
            yield Piece(name, prefix + slot.name.format(expert=expert), slot, expert)


@dataclass(frozen=True)
class Nested:
    """A larger model that has a family's as its part.

    Attributes:
        model_type: of the larger model.
        key: where its config.json has that of the part.
        prefix: of the part's tensors.
        others: what the names of all other tensors begin with.
    """

    model_type: str
    key: str
    prefix: str
    others: tuple[str, ...]


def common(model: ModelConfig, *, head_dim: object = NEEDED, **defaults: object) -> list[Says]:
    """What config.json of every family says.

    Args:
        model: the numbers.
        head_dim: default of that field.
        defaults: those of others, by their names.
    """

    def of(theirs: str, value: object, ours: str, default: object = NEEDED) -> Says:
        return Says(theirs, value, ours, default=defaults.get(theirs, default))

    said = [
        of("vocab_size", model.vocab_size, "vocab_size"),
        of("hidden_size", model.dim, "dim"),
        of("num_hidden_layers", model.n_layers, "n_layers"),
        of("num_attention_heads", model.n_heads, "n_heads"),
        of("num_key_value_heads", model.n_kv_heads, "n_kv_heads", _heads(defaults)),
        of("rms_norm_eps", model.norm_eps, "norm_eps"),
        of("tie_word_embeddings", model.tied_embeddings, "tied_embeddings", False),
        of("max_position_embeddings", model.max_seq_len, "max_seq_len"),
        Says("hidden_act", "silu", default="silu"),
    ]
    if not model.attention.is_latent:
        said.insert(2, Says("head_dim", model.head_width, "head_dim", default=head_dim))
    return said


def _heads(defaults: Mapping[str, object]) -> Callable[[Mapping[str, Any]], object]:
    return lambda found: found.get("num_attention_heads", defaults.get("num_attention_heads"))


def layers_in(found: Mapping[str, Any]) -> range:
    """The numbers of the blocks that a config.json asks for.

    Raises:
        ValueError: it asks for none, or for too many to be meant.
    """
    layers = found["num_hidden_layers"]
    if not isinstance(layers, int) or not 0 < layers <= _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers {layers!r}")
    return range(layers)


def every_nth(marked: Sequence[bool]) -> int | None:
    """The n for which every n-th layer (n - 1, 2n - 1, ...) is marked and no other is; None for no layer.

    Raises:
        ValueError: there is none.
    """
    if not any(marked):
        return None
    every = list(marked).index(True) + 1
    if [(layer + 1) % every == 0 for layer in range(len(marked))] != list(marked):
        raise ValueError("not every n-th layer")
    return every


def head_width(found: Mapping[str, Any]) -> int:
    """Width of a head where config.json leaves it out."""
    return int(found["hidden_size"]) // int(found["num_attention_heads"])


def attention_biases(model: ModelConfig) -> list[Says]:
    """The field that gives all four projections of attention biases."""
    of = model.attention
    return [
        Says("attention_bias", of.qkv_bias, "attention.qkv_bias", default=False),
        Says("attention_bias", of.output_bias, "attention.output_bias", default=False),
    ]


def both_biases(model: ModelConfig) -> None:
    """Refuses biases of some of attention's projections only.

    Raises:
        ConfigError: one of the two fields is set.
    """
    of = model.attention
    if of.qkv_bias != of.output_bias:
        rule = "checkpoints of this family have biases in all of attention's projections or in none"
        raise ConfigError("model.attention.output_bias", of.output_bias, rule, [str(of.qkv_bias).lower()])


def dividing_heads(model: ModelConfig) -> None:
    """Refuses heads that do not divide the width.

    Raises:
        ConfigError: they do not.
    """
    if model.dim % model.n_heads:
        rule = f"transformers wants it to divide model.dim={model.dim} here, whatever model.head_dim is"
        raise ConfigError("model.n_heads", model.n_heads, rule, divisors(model.dim))


def whole_multiple(model: ModelConfig) -> None:
    """Refuses shared experts that are not a number of experts, as DeepSeek counts them.

    Raises:
        ConfigError: they are not.
    """
    of = model.moe
    if of.shared_hidden_dim < 1 or of.shared_hidden_dim % of.hidden_dim:
        rule = f"checkpoints of this family count shared experts of model.moe.hidden_dim={of.hidden_dim}"
        works = f"{of.hidden_dim}, or a multiple of it"
        raise ConfigError("model.moe.shared_hidden_dim", of.shared_hidden_dim, rule, works)
