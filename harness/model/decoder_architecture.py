"""The decoder's entry in the table of architectures (no torch until a part is built)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from harness.config.model import ModelConfig, field_of
from harness.config.mup import HEAD_WIDTHS, LATENT_HEAD_WIDTHS, PROPORTIONAL, MupConfig
from harness.config.registry import resolve_options
from harness.model import accounting, spec
from harness.model.architecture import Architecture, changed, resolve_model
from harness.model.blocks import block_of
from harness.tools.plan import activations, operations
from harness.util.errors import ConfigError, divisors

if TYPE_CHECKING:
    import torch

    from harness.config.job import Job
    from harness.data.batch import Batch, Loader
    from harness.data.tokenizer import Tokenizer
    from harness.model.accounting import Accounting
    from harness.model.decoder import Decoder
    from harness.model.spec import ModuleSpec
    from harness.parallelism.execute import Executor
    from harness.parallelism.loss import TokenLoss
    from harness.parallelism.mesh import Mesh
    from harness.tools.plan.activations import PartActivations
    from harness.tools.plan.operations import Operations


class DecoderArchitecture(Architecture):
    """A pre-norm decoder that predicts the next token."""

    def resolve(self, model: ModelConfig) -> ModelConfig:
        schema, owner = block_of(model).options, f"model.block={model.block}"
        options = resolve_options(model.block_options, schema, "model.block_options", owner)
        return replace(self._with_head_dim(model), block_options=options)

    def _with_head_dim(self, model: ModelConfig) -> ModelConfig:
        if model.head_dim is not None:
            return model
        if model.attention.is_latent:
            return replace(model, head_dim=model.attention.latent_head_dim)
        if model.dim % model.n_heads:
            fits = [d for d in divisors(model.dim) if d % model.n_kv_heads == 0 and model.dim // d % 2 == 0]
            raise ConfigError(
                "model.n_heads",
                model.n_heads,
                f"must divide model.dim={model.dim} when model.head_dim is null",
                [*fits, "or model.head_dim set"] if fits else "model.head_dim set",
            )
        return replace(model, head_dim=model.dim // model.n_heads)

    def at_depth(self, model: ModelConfig, n_layers: int) -> ModelConfig:
        dense = round(model.moe.first_dense_layers * n_layers / model.n_layers)
        return replace(model, n_layers=n_layers, moe=replace(model.moe, first_dense_layers=dense))

    def validate(self, model: ModelConfig) -> None:
        block_of(model).validate(model)
        if model.n_heads % model.n_kv_heads:
            raise ConfigError(
                "model.n_kv_heads",
                model.n_kv_heads,
                f"must divide model.n_heads={model.n_heads}",
                divisors(model.n_heads),
            )
        if model.rotated_width < 2 or model.rotated_width % 2:
            field = "attention.qk_rope_head_dim" if model.attention.is_latent else "head_dim"
            width = model.rotated_width
            works = [width - 1, width + 1] if width > 1 else [2]
            raise ConfigError(f"model.{field}", width, "must be even: RoPE rotates pairs", works)
        model.rope.validate()
        model.attention.validate(model.n_heads, model.n_kv_heads, model.head_width)
        model.moe.validate(model.n_layers)
        model.mtp.validate()
        _validate_mup(model)

    def check(self, job: Job) -> None:
        if job.validation.pictures:
            rule = f"has no effect: model={job.model.name} makes no pictures"
            raise ConfigError("validation.pictures", job.validation.pictures, rule, [0])
        others = chain(changed(job.model.flux, "model.flux."), changed(job.training.flow, "training.flow."))
        for name, value, default in others:
            rule = f"has no effect: model={job.model.name} is a decoder"
            raise ConfigError(name, value, rule, str(default).lower())

    def modules(self, model: ModelConfig) -> Iterator[ModuleSpec]:
        return spec.decoder_modules(model)

    def block_modules(self, model: ModelConfig, layer: int) -> Iterator[ModuleSpec]:
        return spec.decoder_block_modules(model, layer)

    def block_prefix(self, model: ModelConfig, layer: int) -> str:
        """Block ``n_layers`` is multi-token prediction's."""
        return f"layers.{layer}." if layer < model.n_layers else "mtp.block."

    def fsdp_groups(self, model: ModelConfig, *, experts_apart: bool) -> dict[str, str]:
        groups: dict[str, str] = {}
        for layer in range(model.num_blocks):
            block = self.block_prefix(model, layer).removesuffix(".")
            if experts_apart and model.has_experts(layer):
                groups[f"{block}.moe.experts"] = f"{block}.experts"
            groups[block] = block
        groups["mtp"] = "mtp"
        # A tied table is used at both ends, so its users share one group: the root's, which stays gathered.
        if not model.tied_embeddings:
            groups |= {"tok_embeddings": "tok_embeddings", "norm": "head", "output": "head"}
        return groups | {"": "root"}

    def account(self, model: ModelConfig, seq_len: int) -> Accounting:
        return accounting.account_decoder(model, seq_len)

    def block_kind(self, model: ModelConfig, layer: int) -> Hashable:
        return model.has_experts(layer), model.span(layer), model.attention.is_rotated(layer)

    def block_activations(
        self, model: ModelConfig, layer: int, seq_len: int, *, on_cpu: bool
    ) -> PartActivations:
        return activations.block_activations(model, layer, on_cpu=on_cpu)

    def entry_activations(self, model: ModelConfig, seq_len: int) -> PartActivations:
        """The embedding saves nothing but the batch."""
        return activations.PartActivations(())

    def head_activations(self, model: ModelConfig, seq_len: int) -> PartActivations:
        return activations.head_activations(model)

    def block_operations(self, model: ModelConfig, layer: int, seq_len: int) -> Operations:
        return operations.block_operations(model, layer, seq_len)

    def fake_batch(self, job: Job, rows: int) -> Batch:
        import torch

        from harness.data.prefetch import DeviceBatch

        shape = rows, job.training.seq_len
        batch = DeviceBatch(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64))
        batch.num_valid = rows * job.training.seq_len
        return batch

    def build_part(self, job: Job, modules: Collection[str] | None) -> Decoder:
        from harness.model.decoder import Decoder

        return Decoder(job.model, job.training.seq_len, modules)

    def build_loss(self, job: Job, mesh: Mesh, parts: Sequence[Any]) -> TokenLoss:
        from harness.parallelism.chunked_loss import build_loss

        return build_loss(job, mesh, parts)

    def build_executor(
        self, job: Job, mesh: Mesh, parts: Sequence[Any], loss: TokenLoss, device: torch.device
    ) -> Executor:
        from harness.parallelism.execute import build_executor

        return build_executor(job, mesh, parts, loss, device)

    def build_loader(self, job: Job, tokenizer: Tokenizer, rows: range, split: str, **process: Any) -> Loader:
        from harness.data.loader import build_loader

        return build_loader(
            job.data,
            tokenizer,
            seq_len=job.training.seq_len,
            global_batch_size=job.global_batch_size,
            seed=job.training.seed,
            rows=rows,
            split=split,
            model_vocab_size=job.model.vocab_size,
            sizes=job.sizes if split == "train" else None,
            **process,
        )


def _validate_mup(model: ModelConfig) -> None:
    """Check that the base model of muP is possible."""
    of, field = model.mup, "model.mup.base_widths"
    if of.base_widths and of.base_dim is None:
        rule = "has no effect without model.mup.base_dim"
        raise ConfigError(field, of.base_widths, rule, "{}, or model.mup.base_dim set")
    heads = LATENT_HEAD_WIDTHS if model.attention.is_latent else HEAD_WIDTHS
    widths = [name for name in (*PROPORTIONAL, *heads) if field_of(model, name)]
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
