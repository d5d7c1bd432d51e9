"""Config of a model; a new model of a known kind is a new YAML of these fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar, cast

from harness.config.attention import AttentionConfig, Span
from harness.config.fields import NUMERICS, from_dict, known_fields, label, leaves, numerics, part, with_value
from harness.config.moe import MoEConfig
from harness.config.mtp import MTPConfig
from harness.config.mup import PROPORTIONAL, MupConfig
from harness.config.registry import Registry
from harness.config.rope import RopeConfig
from harness.util.errors import ConfigError

_FILES = "harness.weights.families"
ARCHITECTURES: Registry[Any] = Registry(
    "architecture",
    {"decoder": "harness.model.decoder_architecture:DecoderArchitecture"},
    field="model.architecture",
    expects="harness.model.architecture:Architecture",
)
"""Kinds of models."""
BLOCKS: Registry[Any] = Registry(
    "block",
    {"pre_norm": "harness.model.pre_norm:PreNorm"},
    field="model.block",
    expects="harness.model.blocks:BlockKind",
)
"""Kinds of decoder blocks."""
FAMILIES: Registry[Any] = Registry(
    "family",
    {
        "llama": f"{_FILES}.llama:LLAMA",
        "qwen2": f"{_FILES}.qwen2:QWEN2",
        "qwen3": f"{_FILES}.qwen3:QWEN3",
        "qwen3_moe": f"{_FILES}.qwen3:QWEN3_MOE",
        "mistral": f"{_FILES}.mistral:MISTRAL",
        "mixtral": f"{_FILES}.mistral:MIXTRAL",
        "deepseek_v2": f"{_FILES}.deepseek:DEEPSEEK_V2",
        "deepseek_v3": f"{_FILES}.deepseek:DEEPSEEK_V3",
        "gpt_oss": f"{_FILES}.gpt_oss:GPT_OSS",
        "llama4": f"{_FILES}.llama4:LLAMA4",
    },
    field="model.family",
    expects=f"{_FILES}.core:Family",
)
"""Families of models at Hugging Face."""
ACTIVATIONS = ("swiglu", "swiglu_clamped")
OfModel = TypeVar("OfModel", bound="Callable[..., Any]")


@dataclass(frozen=True)
class ModelConfig:
    """A model. The fields describe a pre-norm decoder: attention and a feed-forward, dense or a mixture of
    experts, in every block. Another architecture uses some of them, and a part of its own."""

    name: str = label("???")
    """Name of the model: the name of its file under conf/model."""
    path: str | None = label(None)
    """With model=from_config: the config.json to read, or its folder."""
    architecture: str = numerics("decoder", choices=ARCHITECTURES, id_omits_default=True)
    """Kind of model; packages can add others."""
    family: str = label("llama", choices=FAMILIES)
    """Family of checkpoints to exchange with, by transformers' name of the model type."""
    vocab_size: int = numerics("???", least=1)
    """Rows of the embedding table; 1 for a model without one."""
    dim: int = numerics("???", least=1)
    """Width of the residual stream."""
    n_layers: int = numerics("???", least=1)
    """Number of blocks."""
    n_heads: int = numerics("???", least=1)
    """Query heads."""
    n_kv_heads: int = numerics("???", least=1)
    """Key and value heads; each serves n_heads / n_kv_heads query heads."""
    head_dim: int | None = numerics(None)
    """Width of a head, with latent attention of a query head; null means dim / n_heads."""
    ffn_hidden_dim: int = numerics("???", least=1)
    """Width of the dense feed-forward's hidden layer."""
    activation: str = numerics("swiglu", choices=ACTIVATIONS)
    """Activation of the feed-forward: ``swiglu`` (arXiv:2002.05202), or ``swiglu_clamped`` (GPT-OSS)."""
    block: str = numerics("pre_norm", choices=BLOCKS, id_omits_default=True)
    """Kind of the blocks; packages can add others."""
    block_options: dict[str, Any] = numerics(factory=dict, id_omits_default=True)
    """Options of a kind of blocks that another package has added."""
    norm_eps: float = numerics(1e-5, above=0)
    """Added to the mean square inside RMSNorm."""
    tied_embeddings: bool = numerics(False)
    """Whether the output projection is the embedding table."""
    embedding_std: float = numerics(1.0, above=0)
    """Standard deviation of the embedding table's initial values, if it is not tied."""
    max_seq_len: int = numerics("???", least=1)
    """Longest sequence, in tokens, that the model supports."""
    rope: RopeConfig = part(RopeConfig)
    """Rotary position embedding."""
    attention: AttentionConfig = part(AttentionConfig)
    """Attention."""
    moe: MoEConfig = part(MoEConfig)
    """Mixture of experts, instead of some dense feed-forwards."""
    mtp: MTPConfig = part(MTPConfig)
    """Multi-token prediction: one more block, which predicts the token after the next."""
    mup: MupConfig = part(MupConfig)
    """Maximal update parametrization: hyperparameters apply to any width."""
    options: dict[str, Any] = numerics(factory=dict, id_omits_default=True)
    """Options of an architecture that another package has added."""

    def at_width(
        self, dim: int, given: Mapping[str, int] | None = None, field: str = "model.dim"
    ) -> ModelConfig:
        """Return the model with another ``dim``, and the other widths in proportion; heads keep their width.

        Args:
            dim: width of the residual stream.
            given: widths that are not proportional, by field.
            field: the field that has ``dim``, for the error.

        Raises:
            ConfigError: a width would not be an integer.
        """
        given = given or {}
        model = replace(self, dim=dim, head_dim=self.head_width)
        widths = {name: field_of(self, name) or 0 for name in PROPORTIONAL if name not in given}
        for name, width in widths.items():
            if width * dim % self.dim:
                rule = f"model.{name}={width} x {dim} / {self.dim} is no integer"
                unit = self.dim // math.gcd(self.dim, *widths.values())
                works = f"a multiple of {unit}"
                if field == "model.mup.base_dim":
                    works += f", or model.mup.base_widths={{{name}: ...}}"
                raise ConfigError(field, dim, rule, works)
            if width:
                model = with_value(model, name, width * dim // self.dim)
        for name, width in given.items():
            model = with_value(model, name, width)
        return replace(model, head_dim=model.attention.latent_head_dim) if self.attention.is_latent else model

    @classmethod
    def from_stored(cls, plain: dict[str, Any]) -> ModelConfig:
        """Build a model that this or an earlier version stored.

        Raises:
            ConfigError: a value of the wrong type, or a missing field.
        """
        # Earlier versions stored the options of an architecture in a part of its name.
        own = plain.get(plain.get("architecture", ""))
        if isinstance(own, dict):
            plain = {**plain, "options": own}
        model: ModelConfig = from_dict(cls, known_fields(cls, plain))
        return model

    @property
    def base(self) -> ModelConfig | None:
        """The base model of muP, in the standard parametrization; None without muP."""
        if self.mup.base_dim is None:
            return None
        return replace(self.at_width(self.mup.base_dim, self.mup.base_widths), mup=MupConfig())

    @property
    def output_multiplier(self) -> float:
        """muP's factor of the logits of the output projection and of routers."""
        return 1.0 if self.mup.base_dim is None else self.mup.base_dim / self.dim

    @property
    def score_multiplier(self) -> float:
        """muP's factor of attention scores: they are proportional to 1 / head width, not to its root."""
        base = self.base or self
        return (base.head_width / self.head_width) ** 0.5

    @property
    def score_scale(self) -> float:
        """Factor of attention scores, without that of the rotation's scaling."""
        return self.head_width**-0.5 * self.score_multiplier

    @property
    def head_width(self) -> int:
        """Width of a query and key head, resolved."""
        return self.head_dim if self.head_dim is not None else self.dim // self.n_heads

    @property
    def rotated_width(self) -> int:
        """Width of the rotated part of a query or key head."""
        return self.attention.qk_rope_head_dim if self.attention.is_latent else self.head_width

    @property
    def value_width(self) -> int:
        """Width of a value head."""
        return self.attention.v_head_dim if self.attention.is_latent else self.head_width

    @property
    def num_blocks(self) -> int:
        """Number of blocks: the decoder's, and that of multi-token prediction, number n_layers."""
        return self.n_layers + self.mtp.depth

    def has_experts(self, layer: int) -> bool:
        """Whether a block has experts; multi-token prediction's is like the decoder's last."""
        return self.moe.enabled and self.moe.is_at(min(layer, self.n_layers - 1))

    @property
    def expert_layers(self) -> list[int]:
        """The blocks with experts, including multi-token prediction's."""
        return [layer for layer in range(self.num_blocks) if self.has_experts(layer)]

    def span(self, layer: int) -> Span:
        """The span of a block's attention."""
        return self.attention.span(layer)


def of_one_model(make: OfModel) -> OfModel:
    """Make a function of a model keep its last result: a plan, and a search, ask often for the same model."""
    last: list[Any] = []

    @wraps(make)
    def kept(model: ModelConfig, *others: Any, **named: Any) -> Any:
        if not last or last[0] is not model or last[1:3] != [others, named]:
            last[:] = model, others, named, make(model, *others, **named)
        return last[3]

    return cast(OfModel, kept)


def named_fields(model: ModelConfig) -> Iterator[tuple[str, str, Any]]:
    """Yield ``(dotted name, role, value)`` of every field, each option of the architecture by itself."""
    yield from (each for each in leaves(model) if each[0] != "options")
    yield from ((f"options.{name}", NUMERICS, value) for name, value in model.options.items())


def field_of(model: ModelConfig, name: str) -> Any:
    """Return the value of a dotted field."""
    first, _, rest = name.partition(".")
    value = getattr(model, first)
    return getattr(value, rest) if rest else value
