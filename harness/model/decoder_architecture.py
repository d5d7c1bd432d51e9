"""The decoder's entry in the table of architectures, and its block (no torch until a part is built)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

from harness.config.model import (
    HEAD_WIDTHS,
    LATENT_HEAD_WIDTHS,
    PROPORTIONAL,
    ModelConfig,
    MupConfig,
)
from harness.config.registry import resolve_options
from harness.model import spec
from harness.model.architecture import Architecture, BlockKind, block_of, resolve_model
from harness.util.errors import ConfigError, divisors

if TYPE_CHECKING:
    from harness.config.job import Job
    from harness.model.accounting import Accounting
    from harness.model.decoder import Block, Decoder
    from harness.model.spec import ModuleSpec


class DecoderArchitecture(Architecture):
    """A pre-norm decoder that predicts the next token."""

    def resolve(self, model: ModelConfig) -> ModelConfig:
        schema = block_of(model).options
        owner = f"model.block={model.block}"
        options = resolve_options(model.block_options, schema, "model.block_options", owner)
        return replace(self._with_head_dim(model), block_options=options)

    def _with_head_dim(self, model: ModelConfig) -> ModelConfig:
        if model.head_dim is not None:
            return model
        if model.attention.is_latent:
            return replace(model, head_dim=model.attention.latent_head_dim)
        if model.dim % model.n_heads:
            fits = [
                d
                for d in divisors(model.dim)
                if d % model.n_kv_heads == 0 and model.dim // d % 2 == 0
            ]
            rule = f"must divide model.dim={model.dim} when model.head_dim is null"
            works = [*fits, "or model.head_dim set"] if fits else "model.head_dim set"
            raise ConfigError("model.n_heads", model.n_heads, rule, works)
        return replace(model, head_dim=model.dim // model.n_heads)

    def at_depth(self, model: ModelConfig, n_layers: int) -> ModelConfig:
        dense = round(model.moe.first_dense_layers * n_layers / model.n_layers)
        return replace(model, n_layers=n_layers, moe=replace(model.moe, first_dense_layers=dense))

    def validate(self, model: ModelConfig) -> None:
        block_of(model).validate(model)
        if model.n_heads % model.n_kv_heads:
            rule = f"must divide model.n_heads={model.n_heads}"
            raise ConfigError("model.n_kv_heads", model.n_kv_heads, rule, divisors(model.n_heads))
        if model.rotated_width < 2 or model.rotated_width % 2:
            field = "attention.qk_rope_head_dim" if model.attention.is_latent else "head_dim"
            width = model.rotated_width
            if model.rope.rotated_fraction < 1:
                rule = f"of model.head_dim={model.head_width} must be even: RoPE rotates pairs"
                works = [
                    2 * pairs / model.head_width for pairs in (max(width // 2, 1), width // 2 + 1)
                ]
                raise ConfigError(
                    "model.rope.rotated_fraction", model.rope.rotated_fraction, rule, works
                )
            works = [width - 1, width + 1] if width > 1 else [2]
            raise ConfigError(f"model.{field}", width, "must be even: RoPE rotates pairs", works)
        if model.rope.local_theta is not None and all(
            model.span(layer).is_whole for layer in range(model.n_layers)
        ):
            rule = "changes nothing: without model.attention.window or chunk no layer is local"
            raise ConfigError("model.rope.local_theta", model.rope.local_theta, rule, ["null"])
        if model.attention.is_latent and model.rope.rotated_fraction < 1:
            rule = "latent attention rotates model.attention.qk_rope_head_dim"
            raise ConfigError(
                "model.rope.rotated_fraction", model.rope.rotated_fraction, rule, [1.0]
            )
        model.rope.validate()
        model.attention.validate(model.n_heads, model.n_kv_heads, model.head_width)
        if model.layer_kinds == []:
            raise ConfigError(
                "model.layer_kinds", [], "has no kind of layer", "[delta,full], or null"
            )
        if model.has_delta:
            model.delta.validate()
        model.moe.validate(model.n_layers)
        model.mtp.validate()
        _validate_mup(model)

    def modules(self, model: ModelConfig) -> Iterator[ModuleSpec]:
        return spec.parametrized(model, spec.decoder_modules)

    def block_modules(self, model: ModelConfig, layer: int) -> Iterator[ModuleSpec]:
        return spec.parametrized(model, lambda each: block_of(each).modules(each, layer))

    def block_prefix(self, model: ModelConfig, layer: int) -> str:
        """Block ``n_layers`` is multi-token prediction's."""
        return f"layers.{layer}." if layer < model.n_layers else "mtp.block."

    def fsdp_groups(self, model: ModelConfig, experts_apart: bool) -> dict[str, str]:
        groups: dict[str, str] = {}
        for layer in range(model.num_blocks):
            block = self.block_prefix(model, layer).removesuffix(".")
            if experts_apart and model.has_experts(layer):
                groups[f"{block}.moe.experts"] = f"{block}.experts"
            groups[block] = block
        groups["mtp"] = "mtp"
        # A tied table is used at both ends, so its users share one group: the root's, which stays
        # gathered.
        if not model.tied_embeddings:
            groups |= {"tok_embeddings": "tok_embeddings", "norm": "head", "output": "head"}
        return groups | {"": "root"}

    def account(self, model: ModelConfig, seq_len: int) -> Accounting:
        from harness.model.accounting import account_decoder

        return account_decoder(model, seq_len)

    def block_kind(self, model: ModelConfig, layer: int) -> Hashable:
        if model.is_delta(layer):
            return model.has_experts(layer), "delta"
        return model.has_experts(layer), model.span(layer), model.attention.is_rotated(layer)

    def build_part(self, job: Job, modules: Collection[str] | None) -> Decoder:
        from harness.model.decoder import Decoder

        return Decoder(job.model, job.training.seq_len, modules)


def _validate_mup(model: ModelConfig) -> None:
    of = model.mup
    field = "model.mup.base_widths"
    heads = LATENT_HEAD_WIDTHS if model.attention.is_latent else HEAD_WIDTHS
    widths = [name for name in (*PROPORTIONAL, *heads) if attrgetter(name)(model)]
    for name in of.base_widths:
        if name not in widths:
            raise ConfigError(field, name, f"no such width of model={model.name}", widths)
    if of.base_dim is not None:
        base = model.at_width(of.base_dim, of.base_widths, "model.mup.base_dim")
        try:
            resolve_model(replace(base, mup=MupConfig()))
        except ConfigError as error:
            rule = f"makes a base model that is not possible: {error}"
            raise ConfigError(field, of.base_widths, rule) from None


class PreNorm(BlockKind):
    """Attention and a feed-forward or mixture of experts, each after a norm."""

    def modules(self, model: ModelConfig, layer: int) -> Iterator[ModuleSpec]:
        return spec.PreNormBlock(model, layer).modules()

    def build(self, model: ModelConfig, layer: int) -> Block:
        from harness.model.decoder import Block

        return Block(model, layer)
