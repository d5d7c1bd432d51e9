"""What the plan needs to know of Flux: saved activations and operations (no torch).

As ``harness.tools.plan.activations``: all widths are per token of a sequence. Tokens of captions
and pictures have the same width in a block, so the declarations do not distinguish them, except for
products.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from harness.config.model import ModelConfig
from harness.model.spec import TensorSpec, block_tensors
from harness.tools.plan.activations import (
    INNER,
    LSE,
    STREAM,
    WHOLE,
    PartActivations,
    SavedBy,
    SavedTensor,
    cut_of,
    norm_activations,
)
from harness.tools.plan.costs import AttentionCost, Costs, Operations
from harness_flux.architecture import is_double, rows_of
from harness_flux.config import flux_of

if TYPE_CHECKING:
    from harness.config.job import Job
    from harness_flux.objective import ImageBatch

# Linears of a double-stream block in the order of computation, which is not that of its modules.
_DOUBLE_PRODUCTS = (
    "img_mod",
    "txt_mod",
    "txt_attn.wq",
    "txt_attn.wk",
    "txt_attn.wv",
    "img_attn.wq",
    "img_attn.wk",
    "img_attn.wv",
    "txt_attn.wo",
    "img_attn.wo",
    "txt_mlp.w1",
    "txt_mlp.w2",
    "img_mlp.w1",
    "img_mlp.w2",
)


class FluxCosts(Costs):
    """Costs of Flux."""

    sample = "image"

    def kind(self, model: ModelConfig) -> str:
        return "models of pictures"

    def block_activations(
        self, model: ModelConfig, layer: int, seq_len: int, *, on_cpu: bool
    ) -> PartActivations:
        """Activations of one block, its input included."""
        dim = model.dim
        hidden = model.ffn_hidden_dim
        heads = model.n_heads
        attended = (SavedTensor("attended", dim, INNER), SavedTensor(LSE, heads, INNER, "float32"))
        attention = (
            *_modulated("attention", dim),
            *norm_activations(model, "q_norm", model.head_width, INNER, heads),
            *norm_activations(model, "k_norm", model.head_width, INNER, heads),
            *(SavedTensor(name, dim, INNER) for name in ("q", "k", "v")),
            *attended,
        )
        feed_forward = (
            SavedTensor("mlp.w1", hidden, INNER),
            SavedTensor("mlp.gelu", hidden, INNER),
        )
        grads = SavedTensor("grads of the hidden features", 2 * hidden, INNER)
        of_attention = SavedTensor("grads of q, k, v and attended", 4 * dim, INNER)
        gradient = SavedTensor("grad", dim, STREAM)
        region = SavedTensor("grad of the region's input", dim, WHOLE)
        if is_double(model, layer):
            first = (*attention, SavedTensor("wo.out", dim, STREAM))
            kept = (
                *first,
                *_modulated("mlp", dim),
                *feed_forward,
                SavedTensor("w2.out", dim, STREAM),
            )
        else:
            first = attention
            kept = (*attention, *feed_forward, SavedTensor("sum of both", dim, STREAM))
        return PartActivations(
            kept=kept,
            products=tuple(self._products(model, layer, seq_len)),
            always_saved=attended,
            forward=(SavedTensor("stream", dim, STREAM), region, *feed_forward),
            backward=(gradient, gradient, region, grads),
            late_backward=(*first, of_attention, gradient, gradient, region),
        )

    def entry_activations(self, model: ModelConfig, seq_len: int) -> PartActivations:
        """The inputs of the linears that make the residual stream."""
        flux = flux_of(model)
        text = flux.text_length / max(1, seq_len)
        width = text * flux.context_dim + (1 - text) * flux.token_width
        return PartActivations(kept=(SavedTensor("tokens", width, STREAM),))

    def head_activations(self, model: ModelConfig, seq_len: int) -> PartActivations:
        """The final modulation of the picture's tokens, without the prediction."""
        width = model.dim * (1 - flux_of(model).text_length / max(1, seq_len))
        return PartActivations(
            kept=_modulated("final", width),
            backward=(SavedTensor("grad of the output's input", width, WHOLE),),
        )

    def block_operations(self, model: ModelConfig, layer: int, seq_len: int) -> Operations:
        """The operations of one block for one token."""
        return Operations(
            tuple(_matrices(model, layer)),
            AttentionCost(
                model.n_heads,
                model.n_heads,
                model.head_width,
                model.head_width,
                4.0 * model.dim * seq_len,
            ),
            norm_width=(2 if is_double(model, layer) else 1) * 2 * model.dim,
            rotated_width=4 * model.dim,
            gate_width=model.ffn_hidden_dim,
            expert_gate_width=0,
            expert_width=0,
        )

    def row_share(self, model: ModelConfig, tensor: TensorSpec, seq_len: int) -> float:
        """Rows that a matrix multiplies, as a fraction of a sequence's tokens."""
        return rows_of(model, tensor, seq_len) / max(1, seq_len)

    def outputs(self, model: ModelConfig) -> int:
        return flux_of(model).token_width

    def stage_module(self, module: str) -> str:
        return {"final_mod": "norm", "output": "output"}.get(module, "tok_embeddings")

    def sample_bytes(self, model: ModelConfig, seq_len: int) -> float:
        """Latents (mean and standard deviation) and embeddings of the caption, float32."""
        flux = flux_of(model)
        latents = 2 * flux.token_width * max(0, seq_len - flux.text_length)
        return 4.0 * (latents + flux.text_length * flux.context_dim + flux.pooled_dim)

    def fake_batch(self, job: Job, rows: int) -> ImageBatch:
        import torch

        from harness_flux.objective import ImageBatch

        flux = flux_of(job.model)
        latents = torch.zeros(rows, *flux.latents_shape(job.training.seq_len))
        return ImageBatch(
            latents,
            torch.zeros_like(latents),
            torch.zeros(rows, flux.text_length, flux.context_dim),
            torch.zeros(rows, flux.pooled_dim),
            torch.zeros(rows, dtype=torch.int64),
        )

    def _products(self, model: ModelConfig, layer: int, seq_len: int) -> Iterator[SavedTensor]:
        """Results of a block's linears, in the order of computation."""
        found = {
            tensor.module.removeprefix(f"layers.{layer}."): tensor
            for tensor in _matrices(model, layer)
        }
        for name in _DOUBLE_PRODUCTS if is_double(model, layer) else found:
            tensor = found[name]
            # A single-stream block keeps this result in any case: gelu saves its input.
            kept = "mlp.w1" if name == "mlp.w1" else f"product {name}"
            width = tensor.outputs * self.row_share(model, tensor, seq_len)
            yield SavedTensor(kept, width, cut_of(tensor))


def _modulated(name: str, width: float) -> tuple[SavedTensor, ...]:
    """LayerNorm without weights, scaled and shifted: its input and statistics, the normed stream,
    the result that linears take."""
    return (
        SavedTensor(f"{name}.in", width, STREAM),
        SavedTensor(f"{name}.mean and rstd", 2, STREAM, "float32"),
        SavedTensor(f"{name}.normed", width, STREAM, by=SavedBy.EAGER),
        SavedTensor(f"{name}.out", width, WHOLE),
    )


def _matrices(model: ModelConfig, layer: int) -> list[TensorSpec]:
    return [tensor for tensor in block_tensors(model, layer) if tensor.is_matrix]
