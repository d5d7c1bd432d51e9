"""Every module and tensor of Flux, computed from its config (no torch). See ``harness.model.spec``."""

from __future__ import annotations

import math
from collections.abc import Iterator

from harness.config.model import ModelConfig
from harness.contrib.flux.config import flux_of
from harness.model.spec import ONES, ZEROS, Init, ModuleSpec, Split, TensorSpec

STREAMS = ("img", "txt")


def modules(model: ModelConfig) -> Iterator[ModuleSpec]:
    """Every module, in order."""
    flux, dim = flux_of(model), model.dim
    yield _linear("img_in", dim, flux.token_width, Split.ENTRY)
    yield _linear("txt_in", dim, flux.context_dim, Split.ENTRY)
    embedded = {"time_in": flux.time_dim, "vector_in": flux.pooled_dim}
    if flux.guidance:
        embedded["guidance_in"] = flux.time_dim
    for name, width in embedded.items():
        yield _linear(f"{name}.w1", dim, width, Split.REPLICATED)
        yield _linear(f"{name}.w2", dim, dim, Split.REPLICATED)
    for layer in range(model.n_layers):
        yield from block_modules(model, layer)
    yield _modulation("final_mod", 2, model)
    yield _linear("output", flux.token_width, dim, Split.OUTPUT, zero=flux.zero_init)


def block_modules(model: ModelConfig, layer: int) -> Iterator[ModuleSpec]:
    """Every module of one block."""
    at = f"layers.{layer}."
    if layer >= flux_of(model).double_layers:
        yield _modulation(f"{at}mod", 3, model)
        yield from _attention(f"{at}attn", model)
        # One linear takes the results of both; it is stored as two, because tensor parallel splits each.
        yield from _feed_forward(f"{at}mlp", model, output_bias=False)
        return
    for stream in STREAMS:
        yield _modulation(f"{at}{stream}_mod", 6, model)
        yield from _attention(f"{at}{stream}_attn", model)
        yield from _feed_forward(f"{at}{stream}_mlp", model)


def fsdp_groups(model: ModelConfig) -> dict[str, str]:
    """A group for every block; all else is small and stays in the root's."""
    return {f"layers.{layer}": f"layers.{layer}" for layer in range(model.n_layers)} | {"": "root"}


def _attention(at: str, model: ModelConfig) -> Iterator[ModuleSpec]:
    width = model.n_heads * model.head_width
    yield ModuleSpec(at, Split.REGION)
    for name in ("wq", "wk", "wv"):
        yield _linear(f"{at}.{name}", width, model.dim, Split.COLUMN)
    yield _linear(f"{at}.wo", model.dim, width, Split.ROW)
    for name in ("q_norm", "k_norm"):
        weight = TensorSpec(f"{at}.{name}.weight", f"{at}.{name}", (model.head_width,), Split.HEAD_NORM, ONES)
        yield ModuleSpec(f"{at}.{name}", Split.HEAD_NORM, (weight,))


def _feed_forward(at: str, model: ModelConfig, *, output_bias: bool = True) -> Iterator[ModuleSpec]:
    yield ModuleSpec(at, Split.REGION)
    yield _linear(f"{at}.w1", model.ffn_hidden_dim, model.dim, Split.COLUMN)
    yield _linear(f"{at}.w2", model.dim, model.ffn_hidden_dim, Split.ROW, bias=output_bias)


def _modulation(name: str, vectors: int, model: ModelConfig) -> ModuleSpec:
    return _linear(name, vectors * model.dim, model.dim, Split.MODULATION, zero=flux_of(model).zero_init)


def _linear(
    name: str, outputs: int, inputs: int, split: Split, *, zero: bool = False, bias: bool = True
) -> ModuleSpec:
    """A linear whose initial values are 0, or normal with Glorot's standard deviation."""
    init = ZEROS if zero else Init(math.sqrt(2 / (inputs + outputs)))
    weight = TensorSpec(f"{name}.weight", name, (outputs, inputs), split, init, is_matrix=True)
    of_bias = TensorSpec(f"{name}.bias", name, (outputs,), split, ZEROS)
    return ModuleSpec(name, split, (weight, of_bias) if bias else (weight,))


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
