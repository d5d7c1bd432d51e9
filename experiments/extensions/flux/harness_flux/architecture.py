"""Flux's entry in the table of architectures (no torch until a part is built)."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.model.accounting import Accounting
from harness.model.architecture import Architecture, changed
from harness.model.spec import ONES, ZEROS, Init, ModuleSpec, Split, TensorSpec, linear, tensors
from harness.util.errors import ConfigError, divisors
from harness_flux.config import FluxConfig, flux_of

if TYPE_CHECKING:
    from harness.config.job import Job
    from harness.config.model import ModelConfig
    from harness_flux.model import Flux

_DECODERS = (
    "activation",
    "attention",
    "block",
    "block_options",
    "delta",
    "embedding_multiplier",
    "embedding_std",
    "layer_kinds",
    "logits_cap",
    "logits_scaling",
    "moe",
    "mtp",
    "mup",
    "norm_position",
    "norm_zero_centred",
    "residual_multiplier",
    "rope",
)
"""Fields of ``model`` that only decoders read, except ``rope.theta``; they would silently have no
effect."""


class FluxArchitecture(Architecture):
    """A diffusion transformer that makes pictures from captions."""

    batches = "images"
    makes = "pictures"
    context_methods = ("ulysses",)  # the others are causal
    options = FluxConfig

    def resolve(self, model: ModelConfig) -> ModelConfig:
        return replace(model, head_dim=model.head_dim or model.dim // model.n_heads)

    def at_depth(self, model: ModelConfig, n_layers: int) -> ModelConfig:
        double = round(flux_of(model).double_layers * n_layers / model.n_layers)
        return replace(model, n_layers=n_layers, options={**model.options, "double_layers": double})

    def validate(self, model: ModelConfig) -> None:
        flux = flux_of(model)
        heads = model.n_heads
        width = model.head_width
        axes = flux.axes_dims
        third = width // 8 * 2
        for holds, name, value, rule, works in (
            (
                flux.double_layers <= model.n_layers,
                "options.double_layers",
                flux.double_layers,
                f"must not exceed model.n_layers={model.n_layers}, the blocks of both kinds",
                f"at most {model.n_layers}",
            ),
            (
                model.n_kv_heads == heads,
                "n_kv_heads",
                model.n_kv_heads,
                f"model.architecture=flux has as many as model.n_heads={heads}",
                [heads],
            ),
            (
                heads * width == model.dim,
                "n_heads",
                heads,
                f"must divide model.dim={model.dim} into heads of model.head_dim={width}",
                divisors(model.dim),
            ),
            (
                len(axes) == 3 and sum(axes) == width and not any(axis % 2 for axis in axes),
                "options.axes_dims",
                axes,
                f"must be three even widths whose sum is the width of a head, {width}",
                f"[{width - 2 * third},{third},{third}]"
                if width % 2 == 0
                else "an even model.head_dim",
            ),
            (
                flux.time_dim % 2 == 0,
                "options.time_dim",
                flux.time_dim,
                "must be even: cosines and sines",
                [flux.time_dim + 1],
            ),
            (
                model.vocab_size == 1,
                "vocab_size",
                model.vocab_size,
                "Flux has no vocabulary: captions come as embeddings",
                [1],
            ),
            (
                not model.tied_embeddings,
                "tied_embeddings",
                True,
                "Flux has no embeddings",
                "false",
            ),
        ):
            if not holds:
                raise ConfigError(f"model.{name}", value, rule, works)
        for name, value, default in changed(model, "model."):
            if name.split(".")[1] in _DECODERS and name != "model.rope.theta":
                shown = "null" if default is None else str(default).lower()
                rule = "is a decoder's, and model.architecture is flux"
                raise ConfigError(name, value, rule, shown)

    def modules(self, model: ModelConfig) -> Iterator[ModuleSpec]:
        flux = flux_of(model)
        dim = model.dim
        yield _linear("img_in", dim, flux.token_width, Split.ENTRY)
        yield _linear("txt_in", dim, flux.context_dim, Split.ENTRY)
        embedded = {"time_in": flux.time_dim, "vector_in": flux.pooled_dim}
        if flux.guidance:
            embedded["guidance_in"] = flux.time_dim
        for name, width in embedded.items():
            yield _linear(f"{name}.w1", dim, width, Split.REPLICATED)
            yield _linear(f"{name}.w2", dim, dim, Split.REPLICATED)
        for layer in range(model.n_layers):
            yield from self.block_modules(model, layer)
        yield _modulation("final_mod", 2, model)
        yield _linear("output", flux.token_width, dim, Split.OUTPUT, zero=flux.zero_init)

    def block_modules(self, model: ModelConfig, layer: int) -> Iterator[ModuleSpec]:
        prefix = f"layers.{layer}."
        if not is_double(model, layer):
            yield _modulation(f"{prefix}mod", 3, model)
            yield from _attention(f"{prefix}attn", model)
            # One linear takes the results of both; it is stored as two, because tensor parallel splits
            # each.
            yield from _feed_forward(f"{prefix}mlp", model, output_bias=False)
            return
        for stream in ("img", "txt"):
            yield _modulation(f"{prefix}{stream}_mod", 6, model)
            yield from _attention(f"{prefix}{stream}_attn", model)
            yield from _feed_forward(f"{prefix}{stream}_mlp", model)

    def fsdp_groups(self, model: ModelConfig, experts_apart: bool) -> dict[str, str]:
        # A group for every block; all else is small and stays in the root's.
        return {f"layers.{layer}": f"layers.{layer}" for layer in range(model.n_layers)} | {
            "": "root"
        }

    def account(self, model: ModelConfig, seq_len: int) -> Accounting:
        """Count parameters and FLOPs; all of a sample are spread over its tokens.

        A matrix counts 6 FLOPs per value for every row that it multiplies: tokens of the caption,
        of the picture, or of both, or one row per sample. All positions attend to all, so both
        counts of attention are the full square.
        """
        parameters = 0
        products = 0.0
        for tensor in tensors(model).values():
            parameters += tensor.size
            if tensor.is_matrix:
                products += tensor.size * rows_of(model, tensor, seq_len)
        attention = model.n_layers * 2.0 * 2 * model.dim * seq_len**2
        flops = (6.0 * products + 3 * attention) / seq_len
        return Accounting(parameters, parameters, flops, flops)

    def block_kind(self, model: ModelConfig, layer: int) -> Hashable:
        return is_double(model, layer)

    def build_part(self, job: Job, modules: Collection[str] | None) -> Flux:
        from harness_flux.model import Flux

        return Flux(job.model, job.training.seq_len)


def _attention(prefix: str, model: ModelConfig) -> Iterator[ModuleSpec]:
    width = model.n_heads * model.head_width
    yield ModuleSpec(prefix, Split.REGION)
    for name in ("wq", "wk", "wv"):
        yield _linear(f"{prefix}.{name}", width, model.dim, Split.COLUMN)
    yield _linear(f"{prefix}.wo", model.dim, width, Split.ROW)
    for name in (f"{prefix}.q_norm", f"{prefix}.k_norm"):
        weight = TensorSpec(f"{name}.weight", name, (model.head_width,), Split.HEAD_NORM, ONES)
        yield ModuleSpec(name, Split.HEAD_NORM, (weight,))


def _feed_forward(
    prefix: str, model: ModelConfig, *, output_bias: bool = True
) -> Iterator[ModuleSpec]:
    yield ModuleSpec(prefix, Split.REGION)
    yield _linear(f"{prefix}.w1", model.ffn_hidden_dim, model.dim, Split.COLUMN)
    yield _linear(f"{prefix}.w2", model.dim, model.ffn_hidden_dim, Split.ROW, bias=output_bias)


def _modulation(name: str, vectors: int, model: ModelConfig) -> ModuleSpec:
    return _linear(
        name, vectors * model.dim, model.dim, Split.MODULATION, zero=flux_of(model).zero_init
    )


def _linear(
    name: str, outputs: int, inputs: int, split: Split, *, zero: bool = False, bias: bool = True
) -> ModuleSpec:
    """A linear whose initial values are 0, or normal with Glorot's standard deviation."""
    init = ZEROS if zero else Init(math.sqrt(2 / (inputs + outputs)))
    return linear(name, outputs, inputs, split, init, bias=bias)


def rows_of(model: ModelConfig, tensor: TensorSpec, seq_len: int) -> int:
    """Rows of one sample that a matrix multiplies: tokens of one stream or both, or one for the sample."""
    if tensor.split in (Split.MODULATION, Split.REPLICATED):
        return 1
    text = flux_of(model).text_length
    if tensor.module == "txt_in" or ".txt_" in tensor.module:
        return text
    joined = tensor.module.startswith("layers.") and ".img_" not in tensor.module
    return seq_len if joined else seq_len - text


def is_double(model: ModelConfig, layer: int) -> bool:
    """Whether a block has separate weights for captions and pictures."""
    return layer < flux_of(model).double_layers
