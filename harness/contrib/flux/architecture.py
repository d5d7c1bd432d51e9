"""Flux's entry in the table of architectures (no torch until a part is built)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.contrib.flux.config import (
    FluxConfig,
    block_modules,
    flux_of,
    is_double,
    modules,
    rows_of,
)
from harness.model.accounting import Accounting
from harness.model.architecture import Architecture, changed
from harness.util.errors import ConfigError, divisors

if TYPE_CHECKING:
    from harness.config.job import Job
    from harness.config.model import ModelConfig
    from harness.contrib.flux.model import Flux
    from harness.model.spec import ModuleSpec

_DECODERS = (
    "activation",
    "attention",
    "block",
    "block_options",
    "embedding_std",
    "moe",
    "mtp",
    "mup",
    "rope",
)
"""Fields of ``model`` that only decoders read, except ``rope.theta``; they would silently have no
effect."""


class FluxArchitecture(Architecture):
    """A diffusion transformer that makes pictures from captions."""

    batches = "images"
    makes = "pictures"
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
        return modules(model)

    def block_modules(self, model: ModelConfig, layer: int) -> Iterator[ModuleSpec]:
        return block_modules(model, layer)

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
        for module in modules(model):
            for tensor in module.tensors:
                parameters += tensor.size
                if tensor.is_matrix:
                    products += tensor.size * rows_of(model, tensor, seq_len)
        attention = model.n_layers * 2.0 * 2 * model.dim * seq_len**2
        flops = (6.0 * products + 3 * attention) / seq_len
        return Accounting(parameters, parameters, flops, flops)

    def block_kind(self, model: ModelConfig, layer: int) -> Hashable:
        return is_double(model, layer)

    def build_part(self, job: Job, modules: Collection[str] | None) -> Flux:
        from harness.contrib.flux.model import Flux

        return Flux(job.model, job.training.seq_len)
