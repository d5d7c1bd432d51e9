"""Flux, as in diffusers' models/transformers/transformer_flux.py (FluxTransformer2DModel)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from harness.config.model import ModelConfig
from harness.contrib.flux.config import PATCH, flux_of
from harness.model.spec import tensor_shapes
from harness.util.errors import ConfigError, UserError
from harness.weights.families.core import ConfigField, Family, Names, TensorMapping, TensorSlot
from harness.weights.hf_tensors import DTYPES, check_tensors
from harness.weights.source import TensorFacts

MLP_RATIO = 4
NORM_EPS = 1e-6
PICTURE_TOKENS = 64**2  # of 1024 x 1024 pixels
TEXT_LENGTHS = {False: 256, True: 512}
"""Tokens of a caption, by whether the model has guidance: FLUX.1-schnell and FLUX.1-dev."""

_OUTSIDE = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.w1": "time_text_embed.timestep_embedder.linear_1",
    "time_in.w2": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.w1": "time_text_embed.text_embedder.linear_1",
    "vector_in.w2": "time_text_embed.text_embedder.linear_2",
    "guidance_in.w1": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.w2": "time_text_embed.guidance_embedder.linear_2",
    "final_mod": "norm_out.linear",
    "output": "proj_out",
}
_DOUBLE: Names = {
    "img_mod": "norm1.linear",
    "img_attn.wq": "attn.to_q",
    "img_attn.wk": "attn.to_k",
    "img_attn.wv": "attn.to_v",
    "img_attn.wo": "attn.to_out.0",
    "img_attn.q_norm": "attn.norm_q",
    "img_attn.k_norm": "attn.norm_k",
    "img_mlp.w1": "ff.net.0.proj",
    "img_mlp.w2": "ff.net.2",
    "txt_mod": "norm1_context.linear",
    "txt_attn.wq": "attn.add_q_proj",
    "txt_attn.wk": "attn.add_k_proj",
    "txt_attn.wv": "attn.add_v_proj",
    "txt_attn.wo": "attn.to_add_out",
    "txt_attn.q_norm": "attn.norm_added_q",
    "txt_attn.k_norm": "attn.norm_added_k",
    "txt_mlp.w1": "ff_context.net.0.proj",
    "txt_mlp.w2": "ff_context.net.2",
}
_SINGLE: Names = {
    "mod": "norm.linear",
    "attn.wq": "attn.to_q",
    "attn.wk": "attn.to_k",
    "attn.wv": "attn.to_v",
    "attn.q_norm": "attn.norm_q",
    "attn.k_norm": "attn.norm_k",
    "mlp.w1": "proj_mlp",
}
_JOINED = "proj_out"
"""One linear of a single-stream block: our attn.wo, then our mlp.w2, along its inputs."""


@dataclass(frozen=True)
class FluxFamily(Family):
    """The format of diffusers' Flux checkpoints."""

    def pieces(self, model: ModelConfig) -> Iterator[TensorMapping]:
        for name in tensor_shapes(model):
            module, _, kind = name.rpartition(".")
            if not name.startswith("layers."):
                yield _mapping(name, f"{_OUTSIDE[module]}.{kind}")
                continue
            _, number, inner = module.split(".", 2)
            single = int(number) - flux_of(model).double_layers
            if single < 0:
                yield _mapping(name, f"transformer_blocks.{number}.{_DOUBLE[inner]}.{kind}")
                continue
            prefix = f"single_transformer_blocks.{single}."
            if inner in _SINGLE:
                yield _mapping(name, f"{prefix}{_SINGLE[inner]}.{kind}")
                continue
            theirs = f"{prefix}{_JOINED}.{kind}"
            if kind == "bias":
                yield _mapping(name, theirs)
                continue
            first = 0 if inner == "attn.wo" else model.dim
            within = first, model.dim + model.ffn_hidden_dim
            yield TensorMapping(name, theirs, TensorSlot(theirs, within=within))


def _mapping(ours: str, theirs: str) -> TensorMapping:
    return TensorMapping(ours, theirs, TensorSlot(theirs))


def _fields(model: ModelConfig) -> list[ConfigField]:
    flux = flux_of(model)
    return [
        ConfigField("patch_size", 1, default=1),
        ConfigField(
            "in_channels",
            flux.token_width,
            "options.latent_channels",
            shown=flux.latent_channels,
            default=64,
            to_ours=lambda value, _: _whole(value, PATCH**2),
        ),
        ConfigField("num_layers", flux.double_layers, "options.double_layers", default=19),
        ConfigField(
            "num_single_layers",
            model.n_layers - flux.double_layers,
            "n_layers",
            shown=model.n_layers,
            default=38,
            to_ours=lambda value, found: value + found.get("num_layers", 19),
        ),
        ConfigField("attention_head_dim", model.head_width, "head_dim", default=128),
        ConfigField("num_attention_heads", model.n_heads, "n_heads", default=24),
        ConfigField(
            "num_attention_heads",
            model.n_heads,
            "dim",
            shown=model.dim,
            default=24,
            to_ours=lambda value, found: value * found.get("attention_head_dim", 128),
        ),
        ConfigField("joint_attention_dim", flux.context_dim, "options.context_dim", default=4096),
        ConfigField("pooled_projection_dim", flux.pooled_dim, "options.pooled_dim", default=768),
        ConfigField("guidance_embeds", flux.guidance, "options.guidance", default=False),
        ConfigField("axes_dims_rope", flux.axes_dims, "options.axes_dims", default=[16, 56, 56]),
    ]


def _whole(value: Any, divisor: int) -> int:
    if value % divisor:
        raise ValueError(f"{value} is no multiple of {divisor}")
    return int(value) // divisor


def _refuse(model: ModelConfig) -> None:
    if model.ffn_hidden_dim != MLP_RATIO * model.dim:
        rule = f"diffusers' Flux has {MLP_RATIO} x model.dim"
        raise ConfigError(
            "model.ffn_hidden_dim", model.ffn_hidden_dim, rule, [MLP_RATIO * model.dim]
        )
    if model.norm_eps != NORM_EPS:
        raise ConfigError(
            "model.norm_eps", model.norm_eps, f"diffusers' Flux has {NORM_EPS}", [NORM_EPS]
        )
    if model.rope.theta != FLUX.theta:
        raise ConfigError(
            "model.rope.theta", model.rope.theta, "diffusers' Flux has 10000", [10000]
        )


def _assumed(model: ModelConfig) -> dict[str, object]:
    text = TEXT_LENGTHS[flux_of(model).guidance]
    return {
        "norm_eps": NORM_EPS,
        "n_kv_heads": model.n_heads,
        "ffn_hidden_dim": MLP_RATIO * model.dim,
        "options.text_length": text,
        "max_seq_len": text + PICTURE_TOKENS,
    }


_REQUIRED: Mapping[str, object] = {"architecture": "flux", "options.time_dim": 256}

FLUX = FluxFamily(
    name="flux",
    model_type="FluxTransformer2DModel",
    architecture="FluxTransformer2DModel",
    names=_DOUBLE,
    config_fields=_fields,
    requires=_REQUIRED,
    # The first is not used by Flux; a picture's size and the length of captions are not the
    # model's.
    kept=(
        "vocab_size",
        "norm_eps",
        "n_kv_heads",
        "ffn_hidden_dim",
        "max_seq_len",
        "options.text_length",
        "options.zero_init",
    ),
    refuse=_refuse,
    assumed=_assumed,
    library="diffusers",
    original="harness.contrib.flux.family:find_original",
)


# Reads Black Forest Labs' own files of Flux, such as flux1-dev.safetensors.
#
# Names and order as in github.com/black-forest-labs/flux, src/flux/model.py and modules/layers.py.

MARK = "double_blocks.0.img_attn.qkv.weight"
_ORIGINAL_OUTSIDE = {
    "img_in": "img_in",
    "txt_in": "txt_in",
    "time_in.w1": "time_in.in_layer",
    "time_in.w2": "time_in.out_layer",
    "vector_in.w1": "vector_in.in_layer",
    "vector_in.w2": "vector_in.out_layer",
    "guidance_in.w1": "guidance_in.in_layer",
    "guidance_in.w2": "guidance_in.out_layer",
    "final_mod": "final_layer.adaLN_modulation.1",
    "output": "final_layer.linear",
}
# In a block's stream, and in a block with one stream. Ours of one name are joined in our order: by
# rows, in linear2 by columns.
_ORIGINAL_DOUBLE = {
    "mod": "mod.lin",
    **dict.fromkeys(("attn.wq", "attn.wk", "attn.wv"), "attn.qkv"),
    "attn.wo": "attn.proj",
    "attn.q_norm": "attn.norm.query_norm",
    "attn.k_norm": "attn.norm.key_norm",
    "mlp.w1": "mlp.0",
    "mlp.w2": "mlp.2",
}
_ORIGINAL_SINGLE = {
    "mod": "modulation.lin",
    **dict.fromkeys(("attn.wq", "attn.wk", "attn.wv", "mlp.w1"), "linear1"),
    **dict.fromkeys(("attn.wo", "mlp.w2"), "linear2"),
    "attn.q_norm": "norm.query_norm",
    "attn.k_norm": "norm.key_norm",
}


class Place(NamedTuple):
    """Where our values are in one of their tensors: their first index along a dimension."""

    name: str
    dim: int
    first: int


def find_original(folder: Path, model: ModelConfig) -> OriginalSource | None:
    """Return the weights of the one file in a folder; None if it has none in this format."""
    for file in sorted(folder.glob("*.safetensors")):
        with _opened(file) as opened:
            if MARK in opened.keys():  # noqa: SIM118 - not a mapping
                return OriginalSource(file, model)
    return None


class OriginalSource:
    """The ``Source`` of one file.

    Raises:
        UserError: the file is damaged, or has other tensors than the model.
    """

    def __init__(self, file: Path, model: ModelConfig) -> None:
        self._file = file
        shapes = tensor_shapes(model)
        self._places: dict[str, Place] = {}
        expected: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            theirs = original_name(name, model)
            dim = 1 if theirs.endswith("linear2.weight") else 0
            first = expected[theirs][dim] if theirs in expected else 0
            self._places[name] = Place(theirs, dim, first)
            expected[theirs] = (*shape[:dim], first + shape[dim], *shape[dim + 1 :])
        with _opened(file) as opened:
            facts = {}
            for stored in opened.keys():  # noqa: SIM118 - not a mapping
                part = opened.get_slice(stored)
                facts[stored] = (tuple(part.get_shape()), part.get_dtype())
        check_tensors(
            str(file), model, {name: shape for name, (shape, _) in facts.items()}, expected
        )
        wrong = sorted({dtype for _, dtype in facts.values()} - DTYPES.keys())
        if wrong:
            raise UserError(f"{file}: has {wrong[0]} values; would work: {', '.join(DTYPES)}")
        self.tensors: Mapping[str, TensorFacts] = {
            name: TensorFacts(shape, DTYPES[facts[self._places[name].name][1]])
            for name, shape in shapes.items()
        }

    def read(self, name: str) -> Tensor:
        """Return one tensor, contiguous."""
        place = self._places[name]
        length = self.tensors[name].shape[place.dim]
        with _opened(self._file) as opened:
            part = opened.get_slice(place.name)
            own = slice(place.first, place.first + length)
            values: Tensor = part[:, own] if place.dim else part[own]
        # Their last modulation has the shift first, and ours, as diffusers', the scale.
        parts = reversed(values.chunk(2)) if name.startswith("final_mod.") else [values]
        return torch.cat(list(parts))


def original_name(name: str, model: ModelConfig) -> str:
    """Their name of the tensor that holds one of ours."""
    module, _, kind = name.rpartition(".")
    if not name.startswith("layers."):
        return f"{_ORIGINAL_OUTSIDE[module]}.{kind}"
    _, number, inner = module.split(".", 2)
    single = int(number) - flux_of(model).double_layers
    kind = "scale" if inner.endswith("_norm") else kind
    if single >= 0:
        return f"single_blocks.{single}.{_ORIGINAL_SINGLE[inner]}.{kind}"
    stream, _, inner = inner.partition("_")
    return f"double_blocks.{number}.{stream}_{_ORIGINAL_DOUBLE[inner]}.{kind}"


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
