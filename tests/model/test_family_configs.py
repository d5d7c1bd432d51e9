"""What config.json of every family says, against released files and transformers' own models."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from small_models import with_another
from test_accounting import RELEASED, shipped
from test_families import CASES, as_stored

from harness.errors import UserError
from harness.exchange.config_json import (
    check_hf_config,
    check_hf_tensors,
    hf_config,
    hf_shapes,
    relevant,
)

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("case", CASES)
def test_every_field_is_compared(case: str) -> None:
    """A field that was left out would let another model's weights in."""
    config = CASES[case]
    found = hf_config(config, dtype="float32", bos_id=None, eos_id=None)
    check_hf_config(config, found)
    for field, _ in relevant(config):
        if field == "moe.balance_coeff" and config.family == "deepseek_v3":
            continue  # a speed of training
        other = with_another(config, field)
        with pytest.raises(UserError) as caught:
            check_hf_config(other, found)
        # Llama 4 lists the layers that have experts.
        listed = config.family == "llama4" and field == "moe.first_dense_layers"
        named = "moe.every_nth_layer" if listed else field
        assert re.search(rf"(^|; )model\.{re.escape(named)}=", str(caught.value)), (field, str(caught.value))
        assert "\n" not in str(caught.value)


# config.json of released checkpoints, reduced to the fields that describe the model.
DEEPSEEK_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
FILES: dict[str, dict[str, Any]] = {
    "qwen2_7b": {
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "mistral_7b": {
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "mixtral_8x7b": {
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "deepseek_v3_671b": {
        "attention_bias": False,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": DEEPSEEK_YARN,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "deepseek_v2_lite_16b": {
        "attention_bias": False,
        "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "qwen3_8b": {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3_30b_a3b": {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "gpt_oss_20b": {
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    "llama4_scout": {
        "model_type": "llama4",
        "text_config": {
            "attention_bias": False,
            "attention_chunk_size": 8192,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "interleave_moe_layer_step": 1,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "max_position_embeddings": 10485760,
            "model_type": "llama4_text",
            "no_rope_layers": [],
            "num_attention_heads": 40,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 48,
            "num_key_value_heads": 8,
            "num_local_experts": 16,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 1.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "use_qk_norm": True,
            "vocab_size": 202048,
        },
    },
}


@pytest.mark.parametrize("name", FILES)
def test_released_files_are_read(name: str) -> None:
    check_hf_config(shipped(name), FILES[name])


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("gpt_oss_20b", {"swiglu_limit": 5.0}, "config.json has swiglu_limit 5.0: the decoder only knows"),
        (
            "gpt_oss_20b",
            {"layer_types": ["full_attention"] * 24},
            'model.attention.global_every_nth_layer=2: config.json has layer_types ["full_attention", ',
        ),
        (
            "deepseek_v2_lite_16b",
            {"norm_topk_prob": True},
            "config.json has norm_topk_prob true: the decoder",
        ),
        (
            "deepseek_v2_lite_16b",
            {"q_lora_rank": 7},
            "model.attention.q_lora_rank=null: config.json has q_lora_",
        ),
        (
            "deepseek_v3_671b",
            {"n_shared_experts": 2},
            "model.moe.shared_hidden_dim=2048: config.json has n_sha",
        ),
        (
            "deepseek_v3_671b",
            {"vocab_size": None},
            "model.vocab_size=129280: config.json has vocab_size null",
        ),
        (
            "qwen3_8b",
            {"use_sliding_window": True},
            "config.json has use_sliding_window true: the decoder only",
        ),
        (
            "qwen3_8b",
            {"model_type": "gemma3"},
            "config.json has model_type gemma3: only checkpoints with model_t",
        ),
        (
            "qwen3_30b_a3b",
            {"mlp_only_layers": [3]},
            "model.moe.first_dense_layers=0: config.json has mlp_only_",
        ),
        (
            "qwen3_8b",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "model.rope.scaling=none: config.json has rope_type yarn",
        ),
        (
            "gpt_oss_20b",
            {"rope_scaling": {**FILES["gpt_oss_20b"]["rope_scaling"], "attention_factor": 1.5}},
            "model.rope.mscale=null: config.json has attention_factor 1.5",
        ),
    ],
)
def test_a_file_that_differs_is_refused(name: str, change: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        check_hf_config(shipped(name), {**FILES[name], **change})
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("deepseek_v3_671b", {"n_shared_experts": 2}, "which is model.moe.shared_hidden_dim=4096"),
        ("qwen3_30b_a3b", {"mlp_only_layers": [0, 1]}, "which is model.moe.first_dense_layers=2"),
        ("mistral_7b", {"sliding_window": 7}, "would work: model=from_config"),
        ("qwen3_8b", {"rope_scaling": "linear"}, 'rope_scaling "linear": must be an object or null'),
        (
            "qwen3_8b",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type dynamic: at inference it stretches",
        ),
    ],
)
def test_a_refusal_says_what_would_work(name: str, change: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        check_hf_config(shipped(name), {**FILES[name], **change})
    assert says in str(caught.value)


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_have_their_families_tensors(name: str) -> None:
    """transformers' own model of our config.json has these tensors, of these shapes."""
    config = shipped(name)
    layers = max(config.moe.first_dense_layers, config.moe.every_nth_layer) + 1
    config = dataclasses.replace(config, n_layers=layers)
    content = hf_config(config, dtype="bfloat16", bos_id=None, eos_id=None)
    config_class = transformers.CONFIG_MAPPING[content["model_type"]]
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config_class(**content))
    shapes = {key: tuple(value.shape) for key, value in as_stored(theirs.state_dict(), config.family).items()}
    check_hf_tensors(config, shapes)
    assert len([key for key in hf_shapes(config) if f"layers.{layers - 1}.input" in key]) == 1
