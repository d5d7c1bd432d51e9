"""Flux, as in diffusers' models/transformers/transformer_flux.py (FluxTransformer2DModel)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness.config.model import ModelConfig
from harness.model.spec import tensor_shapes
from harness.util.errors import ConfigError
from harness.weights.families.core import ConfigField, Family, Names, TensorMapping, TensorSlot
from harness_flux.config import PATCH, flux_of

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
            within = None
            if not name.startswith("layers."):
                theirs = _OUTSIDE[module]
            else:
                _, number, inner = module.split(".", 2)
                single = int(number) - flux_of(model).double_layers
                if single < 0:
                    theirs = f"transformer_blocks.{number}.{_DOUBLE[inner]}"
                else:
                    theirs = f"single_transformer_blocks.{single}.{_SINGLE.get(inner, _JOINED)}"
                    if inner not in _SINGLE and kind == "weight":
                        first = 0 if inner == "attn.wo" else model.dim
                        within = first, model.dim + model.ffn_hidden_dim
            theirs += f".{kind}"
            yield TensorMapping(name, theirs, TensorSlot(theirs, within=within))


def _fields(model: ModelConfig) -> list[ConfigField]:
    flux = flux_of(model)
    return [
        ConfigField("patch_size", 1, default=1),
        ConfigField(
            "in_channels",
            flux.token_width,
            "options.latent_channels",
            default=64,
            to_ours=lambda value, _: _whole(value, PATCH**2),
        ),
        ConfigField("num_layers", flux.double_layers, "options.double_layers", default=19),
        ConfigField(
            "num_single_layers",
            model.n_layers - flux.double_layers,
            "n_layers",
            default=38,
            to_ours=lambda value, found: value + found.get("num_layers", 19),
        ),
        ConfigField("attention_head_dim", model.head_width, "head_dim", default=128),
        ConfigField("num_attention_heads", model.n_heads, "n_heads", default=24),
        ConfigField(
            "num_attention_heads",
            model.n_heads,
            "dim",
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
    for name, value, needed in (
        ("ffn_hidden_dim", model.ffn_hidden_dim, MLP_RATIO * model.dim),
        ("norm_eps", model.norm_eps, NORM_EPS),
        ("rope.theta", model.rope.theta, FLUX.theta),
    ):
        if value != needed:
            raise ConfigError(f"model.{name}", value, f"diffusers' Flux has {needed}", [needed])


def _assumed(model: ModelConfig) -> dict[str, object]:
    text = TEXT_LENGTHS[flux_of(model).guidance]
    return {
        "norm_eps": NORM_EPS,
        "n_kv_heads": model.n_heads,
        "ffn_hidden_dim": MLP_RATIO * model.dim,
        "options.text_length": text,
        "max_seq_len": text + PICTURE_TOKENS,
    }


FLUX = FluxFamily(
    name="flux",
    model_type="FluxTransformer2DModel",
    architecture="FluxTransformer2DModel",
    names=_DOUBLE,
    config_fields=_fields,
    requires={"architecture": "flux", "options.time_dim": 256},
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
)
