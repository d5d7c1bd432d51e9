"""config.json against released files and transformers' own; names and shapes of tensors."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from families_table import CASES, MODELS, RELEASED_CONFIGS, shipped
from one_line import one_line
from test_families import as_stored

from harness.config.model import FAMILIES, ModelConfig
from harness.model.rope import rope_table
from harness.util.errors import UserError
from harness.weights.config_json import check_hf_config, hf_config, model_from_config
from harness.weights.hf_tensors import check_hf_tensors, hf_shapes

transformers = pytest.importorskip("transformers")

RELEASED = sorted(
    file.stem
    for file in MODELS.glob("*.yaml")
    if file.stem != "llama3_tiny" and not FAMILIES[shipped(file.stem).family].is_diffusers
)
LLAMA = RELEASED_CONFIGS["llama3_8b"]
SCALING = LLAMA["rope_scaling"]


def content_of(config: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    return hf_config(config, dtype=dtype, bos_id=1, eos_id=None)


# -- written ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fields_that_are_not_the_models(dtype, tmp_path):
    content = content_of(CASES["llama_everything"], dtype)
    (tmp_path / "config.json").write_text(json.dumps(content))
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (read.model_type, read.architectures) == ("llama", ["LlamaForCausalLM"])
    assert (read.bos_token_id, read.eos_token_id) == (1, None)
    assert read.max_position_embeddings == 256 and read.dtype == getattr(torch, dtype)
    # Fields of transformers 4, which the installed version may not read.
    assert content["torch_dtype"] == dtype and content["rope_theta"] == 1000.0
    assert content["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    assert content["rope_parameters"] == {**content["rope_scaling"], "rope_theta": 1000.0}


@pytest.mark.parametrize("left_out", [["rope_parameters"], ["rope_theta", "rope_scaling"]])
def test_either_form_of_rotation_is_enough(left_out):
    """A reader that knows only one of the two gets the same rotation from it."""
    if "rope_theta" in left_out and not hasattr(transformers.LlamaConfig(), "rope_parameters"):
        pytest.skip("transformers 4 does not know the new form")
    config = CASES["llama_scaled"]
    content = {name: value for name, value in content_of(config).items() if name not in left_out}
    rotation = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        transformers.LlamaConfig(**content)
    )
    cos, sin = rotation(torch.zeros(1), torch.arange(48).unsqueeze(0))
    ours = rope_table(config.rope, config.head_width, seq_len=48)
    torch.testing.assert_close(torch.stack((cos[0, :, :8], sin[0, :, :8])), ours, rtol=0, atol=1e-5)


# -- read ----


def test_the_new_form_of_a_released_file_is_read():
    new = {k: v for k, v in LLAMA.items() if k not in ("rope_scaling", "rope_theta")}
    check_hf_config(
        shipped("llama3_8b"), {**new, "rope_parameters": {**SCALING, "rope_theta": 500000.0}}
    )
    says = r"^model\.rope\.theta=500000\.0: config\.json has rope_theta 10000\.0; would work: "
    with one_line(UserError, says):
        check_hf_config(shipped("llama3_8b"), {**new, "rope_parameters": SCALING})


def scaled(name: str, **changed: Any) -> dict[str, Any]:
    return {"rope_scaling": {**RELEASED_CONFIGS[name]["rope_scaling"], **changed}}


# Changes of released files, and the beginning of the error, or after "..." a part of it. That all fields are
# compared is a test of families.
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "llama3_8b": [
        (
            {"hidden_size": 2048},
            "model.dim=4096: config.json has hidden_size 2048; model.head_dim=128: ",
        ),
        (
            {"num_key_value_heads": None},
            "model.n_kv_heads=8: config.json has num_key_value_heads 32",
        ),
        ({"rope_scaling": None}, "model.rope.scaling=llama3: config.json has rope_type none"),
        (
            {"rope_scaling": {"type": "linear", "factor": 8.0}},
            "model.rope.scaling=llama3: config.json has rope_type linear",
        ),
        (
            scaled("llama3_8b", factor=32.0, low_freq_factor=2.0),
            "model.rope.factor=8.0: config.json has factor 32.0; "
            "model.rope.low_freq_factor=1.0: config.json has low_freq_factor 2.0",
        ),
        (
            {"hidden_act": "gelu"},
            "config.json has hidden_act gelu: the decoder only knows hidden_act silu",
        ),
        (
            {"attention_bias": True},
            "model.attention.qkv_bias=false: config.json has attention_bias true; model.attention.output_bi",
        ),
        (
            {"attn_logit_softcapping": 30.0, "clip_qkv": 8},
            "config.json has attn_logit_softcapping 30.0, clip_qkv 8, which model.family=llama does not read",
        ),
        ({"partial_rotary_factor": 0.5}, "config.json has partial_rotary_factor 0.5, which"),
        (
            {"layer_types": ["sliding_attention"] * 32},
            'config.json has layer_types ["sliding_attention", "',
        ),
        (
            scaled("llama3_8b", mrope_section=[8, 12, 12]),
            "config.json has mrope_section [8, 12, 12] in rope_scaling, which is not read; would work: ",
        ),
        (
            {"original_max_position_embeddings": 4096},
            "model.rope.original_max_position=8192: config.json has original_max_position_embeddings 4096",
        ),
        (
            {"model_type": "mistral"},
            "config.json has model_type mistral: only checkpoints with model_t",
        ),
        (
            {"model_type": None},
            "config.json has no model_type: only checkpoints with model_type llama",
        ),
    ],
    "gpt_oss_20b": [
        ({"swiglu_limit": 5.0}, "config.json has swiglu_limit 5.0: the decoder only knows"),
        (
            {"layer_types": ["full_attention"] * 24},
            'model.attention.global_every_nth_layer=2: config.json has layer_types ["full_attention", ',
        ),
        (
            scaled("gpt_oss_20b", attention_factor=1.5),
            "config.json has attention_factor 1.5: the rotation is scaled by 1.34657, which follows",
        ),
        (scaled("gpt_oss_20b", attention_factor=1.5), "...in its place mscale 2.94"),
    ],
    "deepseek_v2_lite_16b": [
        ({"norm_topk_prob": True}, "config.json has norm_topk_prob true: the decoder"),
    ],
    "deepseek_v3_671b": [
        ({"n_shared_experts": 2}, "...which is model.moe.shared_hidden_dim=4096"),
        ({"vocab_size": None}, "model.vocab_size=129280: config.json has vocab_size null"),
    ],
    "mistral_7b": [
        ({"sliding_window": 7}, "...would work: model=from_config"),
        (
            {"layer_types": ["full_attention"] + ["sliding_attention"] * 31},
            'config.json has layer_types ["full_attention", "sliding_attention", ',
        ),
    ],
    "qwen3_8b": [
        ({"use_sliding_window": True}, "config.json has use_sliding_window true: the decoder only"),
        ({"rope_scaling": "linear"}, '...rope_scaling "linear": must be an object or null'),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "...rope_type dynamic: at inference it stretches",
        ),
    ],
    "qwen3_30b_a3b": [({"mlp_only_layers": [0, 1]}, "...which is model.moe.first_dense_layers=2")],
}


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [(name, change, says) for name, rows in REFUSED.items() for change, says in rows],
)
def test_a_file_that_differs_is_refused(name, change, says):
    with pytest.raises(UserError) as caught:
        check_hf_config(shipped(name), {**RELEASED_CONFIGS[name], **change})
    message = str(caught.value)
    assert says[3:] in message if says.startswith("...") else message.startswith(says)
    assert "\n" not in message


def test_fields_that_change_nothing_are_taken():
    harmless = {
        "unsloth_fixed": True,
        "_attn_implementation": "sdpa",
        "partial_rotary_factor": 1.0,
        "is_causal": True,
        "attn_logit_softcapping": None,
        "use_mrope": False,
        "pruned_heads": {},
        "layer_types": ["full_attention"] * 32,
        "vision_token_id": 7,
        "top_p": 0.9,
    }
    check_hf_config(shipped("llama3_8b"), {**LLAMA, **harmless})
    sliding = {"layer_types": ["sliding_attention"] * 32}
    check_hf_config(shipped("mistral_7b"), {**RELEASED_CONFIGS["mistral_7b"], **sliding})
    implied = scaled("gpt_oss_20b", attention_factor=0.1 * math.log(32) + 1)
    check_hf_config(shipped("gpt_oss_20b"), {**RELEASED_CONFIGS["gpt_oss_20b"], **implied})


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_the_original_length_outside_of_the_rotation_wins(kind, tmp_path):
    """transformers rotates by the field at the top level, even if the object has another one."""
    inside = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 128}
    inside |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    content = content_of(CASES["llama"]) | {
        "rope_scaling": inside,
        "original_max_position_embeddings": 32,
    }
    del content["rope_parameters"]
    read = transformers.LlamaConfig(**content)
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind]
    frequencies, scale = compute(read, "cpu")
    (tmp_path / "config.json").write_text(json.dumps(content))
    rope = model_from_config(str(tmp_path)).rope
    table = rope_table(rope, 2 * len(frequencies), 9)
    torch.testing.assert_close(table[0, 8], (8 * frequencies).cos() * scale)


# -- tensors ----


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_have_their_families_tensors(name):
    """transformers' own model of our config.json has these tensors, of these shapes."""
    config = shipped(name)
    layers = max(config.moe.first_dense_layers, config.moe.every_nth_layer) + 1
    config = dataclasses.replace(config, n_layers=layers)
    content = content_of(config, "bfloat16")
    config_class = transformers.CONFIG_MAPPING[content["model_type"]]
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config_class(**content))
    shapes = {
        key: tuple(value.shape)
        for key, value in as_stored(theirs.state_dict(), config.family).items()
    }
    check_hf_tensors(config, shapes)
    assert len([key for key in hf_shapes(config) if f"layers.{layers - 1}.input" in key]) == 1


def test_redundant_tensors_are_allowed():
    tied = CASES["llama_tied"]
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,), "lm_head.weight": (96, 64)}
    check_hf_tensors(tied, {**hf_shapes(tied), **extra})
    says = r"1 of another shape \(lm_head.weight is \[95, 64\] and not \[96, 64\]\)"
    with one_line(UserError, says):
        check_hf_tensors(tied, {**hf_shapes(tied), "lm_head.weight": (95, 64)})
