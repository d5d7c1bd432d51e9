"""Flux's entry in the table of architectures (no torch until a part is built)."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from harness.config.data_kinds import DATA_KINDS
from harness.contrib.flux import plan, spec
from harness.contrib.flux.config import PATCH, PIXELS, FlowConfig
from harness.model.accounting import Accounting
from harness.model.architecture import Architecture, changed
from harness.util.errors import ConfigError, divisors
from harness.util.versions import torch_version

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from harness.checkpoint.rank_group import RankGroup
    from harness.config.data import DataConfig
    from harness.config.job import Job
    from harness.config.model import ModelConfig
    from harness.config.training import TrainingConfig
    from harness.contrib.flux.execute import FlowExecutor
    from harness.contrib.flux.model import Flux
    from harness.contrib.flux.objective import FlowLoss
    from harness.contrib.flux.sheet import SampleSheet
    from harness.data.batch import ImageBatch, Loader
    from harness.data.tokenizer import Tokenizer
    from harness.model.spec import ModuleSpec, TensorSpec
    from harness.parallelism.mesh import Mesh
    from harness.tools.plan.activations import PartActivations
    from harness.tools.plan.operations import Operations
    from harness.train.engine import Engine

_DECODERS = (
    *("activation", "attention", "block", "block_options", "embedding_std", "moe", "mtp", "mup"),
    "rope",
)
"""Fields of ``model`` that only decoders read, except ``rope.theta``; they would silently have no effect."""


class FluxArchitecture(Architecture):
    """A diffusion transformer that makes pictures from captions."""

    takes_pictures = True

    def resolve(self, model: ModelConfig) -> ModelConfig:
        return replace(model, head_dim=model.head_dim or model.dim // model.n_heads)

    def at_depth(self, model: ModelConfig, n_layers: int) -> ModelConfig:
        double = round(model.flux.double_layers * n_layers / model.n_layers)
        return replace(model, n_layers=n_layers, flux=replace(model.flux, double_layers=double))

    def validate(self, model: ModelConfig) -> None:
        flux = model.flux
        if flux.double_layers > model.n_layers:
            rule = f"must not exceed model.n_layers={model.n_layers}, the blocks of both kinds"
            raise ConfigError(
                "model.flux.double_layers", flux.double_layers, rule, f"at most {model.n_layers}"
            )
        if model.n_kv_heads != model.n_heads:
            rule = f"model.architecture=flux has as many as model.n_heads={model.n_heads}"
            raise ConfigError("model.n_kv_heads", model.n_kv_heads, rule, [model.n_heads])
        if model.n_heads * model.head_width != model.dim:
            rule = f"must divide model.dim={model.dim} into heads of model.head_dim={model.head_width}"
            raise ConfigError("model.n_heads", model.n_heads, rule, divisors(model.dim))
        even = len(flux.axes_dims) == 3 and not any(width % 2 for width in flux.axes_dims)
        if not even or sum(flux.axes_dims) != model.head_width:
            rule = f"must be three even widths whose sum is the width of a head, {model.head_width}"
            third = model.head_width // 8 * 2
            works = f"[{model.head_width - 2 * third},{third},{third}]"
            works = works if model.head_width % 2 == 0 else "an even model.head_dim"
            raise ConfigError("model.flux.axes_dims", flux.axes_dims, rule, works)
        if flux.time_dim % 2:
            rule = "must be even: cosines and sines"
            raise ConfigError("model.flux.time_dim", flux.time_dim, rule, [flux.time_dim + 1])
        if model.vocab_size != 1:
            rule = "Flux has no vocabulary: captions come as embeddings"
            raise ConfigError("model.vocab_size", model.vocab_size, rule, [1])
        if model.tied_embeddings:
            raise ConfigError("model.tied_embeddings", True, "Flux has no embeddings", "false")
        for name, value, default in changed(model, "model."):
            if name.split(".")[1] in _DECODERS and name != "model.rope.theta":
                shown = "null" if default is None else str(default).lower()
                rule = "is a decoder's, and model.architecture is flux"
                raise ConfigError(name, value, rule, shown)

    def check(self, job: Job) -> None:
        layout, training = job.parallelism, job.training
        self._check_length(job)
        if layout.tp > 1 and torch_version().startswith("2.11."):
            rule = "torch 2.11 cannot split the tokens that enter model.architecture=flux"
            raise ConfigError("parallelism.tp", layout.tp, rule, "1, or torch 2.13")
        for field, value, works, why in (
            ("training.attention", training.attention, "sdpa", "attention is not causal"),
            ("training.loss_chunks", training.loss_chunks, 1, "the loss has no vocabulary"),
            ("schedule.seq_len", job.schedule.seq_len, [], "a picture cannot be cut"),
            ("evaluation.interval", job.evaluation.interval, 0, "the tasks are texts"),
            ("parallelism.pp", layout.pp, 1, "stages pass on one tensor, and blocks need a second one"),
        ):
            if value != works:
                rule = f"is not possible with model.architecture=flux: {why}"
                raise ConfigError(field, value, rule, str(works))
        guidance = training.flow.guidance
        if not job.model.flux.guidance and guidance != FlowConfig().guidance:
            rule = f"is read only with model.flux.guidance=true, and model={job.model.name} has no such input"
            raise ConfigError("training.flow.guidance", guidance, rule, [FlowConfig().guidance])
        if layout.cp > 1 and layout.cp_method == "ring":
            rule = "its kernels support the causal mask only, and model.architecture=flux has none"
            raise ConfigError("parallelism.cp_method", "ring", rule, ["ulysses"])

    def _check_length(self, job: Job) -> None:
        """Check that the sequence is a caption and a square picture, which the layout can split."""
        length, text, layout = job.training.seq_len, job.model.flux.text_length, job.parallelism
        side = math.isqrt(max(0, length - text))
        if not side or length != text + side**2:
            near, pixels = max(1, side), PATCH * PIXELS
            rule = f"must be model.flux.text_length={text} and the tokens of a square picture"
            works = [
                f"{text + n**2} ({pixels * n} x {pixels * n} pixels)"
                for n in (near, near + 1)
                if text + n**2 != length
            ]
            raise ConfigError("training.seq_len", length, rule, works)
        unit = layout.cp * (layout.tp if layout.uses_sequence_parallel else 1)
        if text % unit or side**2 % unit:
            rule = (
                f"its {text} tokens of the caption and {side**2} of the picture are each split into {unit}, "
                f"parallelism.cp={layout.cp}, tp={layout.tp}"
            )
            divides = f"degrees whose product divides {math.gcd(text, side**2)}"
            raise ConfigError("training.seq_len", length, rule, divides)
        if job.model.flux.token_width % layout.tp:
            rule = f"must divide the {job.model.flux.token_width} values of a token"
            raise ConfigError("parallelism.tp", layout.tp, rule, divisors(job.model.flux.token_width))

    def for_generation(
        self, data: DataConfig, training: TrainingConfig, model: ModelConfig
    ) -> dict[str, Any]:
        """The smallest picture, and only the encoders of the data."""
        kind = data.kind if DATA_KINDS[data.kind].has_pictures else "latents_synthetic"
        return {
            "data": replace(data, kind=kind),
            "training": replace(training, seq_len=model.flux.text_length + 1),
        }

    def build_sheet(
        self, job: Job, engine: Engine, loader: Loader, ranks: RankGroup, run_dir: Path
    ) -> SampleSheet | None:
        if not job.validation.pictures:
            return None
        from harness.contrib.flux.pictures.loader import PictureLoader
        from harness.contrib.flux.sheet import SampleSheet

        assert isinstance(loader, PictureLoader)
        return SampleSheet(job, engine, loader, ranks, run_dir)

    def modules(self, model: ModelConfig) -> Iterator[ModuleSpec]:
        return spec.modules(model)

    def block_modules(self, model: ModelConfig, layer: int) -> Iterator[ModuleSpec]:
        return spec.block_modules(model, layer)

    def fsdp_groups(self, model: ModelConfig, *, experts_apart: bool) -> dict[str, str]:
        return spec.fsdp_groups(model)

    def account(self, model: ModelConfig, seq_len: int) -> Accounting:
        """Count parameters and FLOPs; all of a sample are spread over its tokens.

        A matrix counts 6 FLOPs per value for every row that it multiplies: tokens of the caption, of the
        picture, or of both, or one row per sample. All positions attend to all, so both counts of attention
        are the full square.
        """
        tensors = [tensor for module in spec.modules(model) for tensor in module.tensors]
        products = sum(
            tensor.size * spec.rows_of(model, tensor, seq_len) for tensor in tensors if tensor.is_matrix
        )
        attention = model.n_layers * 2.0 * 2 * model.dim * seq_len**2
        flops = (6.0 * products + 3 * attention) / seq_len
        parameters = sum(tensor.size for tensor in tensors)
        return Accounting(parameters, parameters, flops, flops)

    def block_kind(self, model: ModelConfig, layer: int) -> Hashable:
        return plan.is_double(model, layer)

    def block_activations(
        self, model: ModelConfig, layer: int, seq_len: int, *, on_cpu: bool
    ) -> PartActivations:
        return plan.block_activations(model, layer, seq_len)

    def entry_activations(self, model: ModelConfig, seq_len: int) -> PartActivations:
        return plan.entry_activations(model, seq_len)

    def head_activations(self, model: ModelConfig, seq_len: int) -> PartActivations:
        return plan.head_activations(model, seq_len)

    def block_operations(self, model: ModelConfig, layer: int, seq_len: int) -> Operations:
        return plan.block_operations(model, layer, seq_len)

    def row_share(self, model: ModelConfig, tensor: TensorSpec, seq_len: int) -> float:
        return plan.row_share(model, tensor, seq_len)

    def outputs(self, model: ModelConfig) -> int:
        return model.flux.token_width

    def stage_module(self, module: str) -> str:
        return {"final_mod": "norm", "output": "output"}.get(module, "tok_embeddings")

    def sample_bytes(self, model: ModelConfig, seq_len: int) -> float:
        """Latents (mean and standard deviation) and embeddings of the caption, float32."""
        flux = model.flux
        latents = 2 * flux.token_width * max(0, seq_len - flux.text_length)
        return 4.0 * (latents + flux.text_length * flux.context_dim + flux.pooled_dim)

    def fake_batch(self, job: Job, rows: int) -> ImageBatch:
        import torch

        from harness.data.batch import ImageBatch

        flux = job.model.flux
        side = PATCH * math.isqrt(job.training.seq_len - flux.text_length)
        latents = torch.zeros(rows, flux.latent_channels, side, side)
        return ImageBatch(
            latents,
            torch.zeros_like(latents),
            torch.zeros(rows, flux.text_length, flux.context_dim),
            torch.zeros(rows, flux.pooled_dim),
            torch.zeros(rows, dtype=torch.int64),
        )

    def without_values(self) -> AbstractContextManager[Any]:
        from harness.contrib.flux import objective

        return patch.object(objective, "numbers_of", lambda batch: [0] * len(batch.numbers_B))

    def build_part(self, job: Job, modules: Collection[str] | None) -> Flux:
        from harness.contrib.flux.model import Flux

        return Flux(job.model, job.training.seq_len, modules)

    def build_loss(self, job: Job, mesh: Mesh, parts: Sequence[Any]) -> FlowLoss:
        from harness.contrib.flux.objective import FlowLoss

        return FlowLoss()

    def build_executor(
        self, job: Job, mesh: Mesh, parts: Sequence[Any], loss: FlowLoss, device: torch.device
    ) -> FlowExecutor:
        from harness.contrib.flux.execute import FlowExecutor

        return FlowExecutor(job, parts[0], loss)

    def build_loader(self, job: Job, tokenizer: Tokenizer, rows: range, split: str, **process: Any) -> Loader:
        from harness.contrib.flux.loader import build_loader

        return build_loader(job, rows, split, **process)
