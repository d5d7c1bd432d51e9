"""config.json against released files and transformers' own; names and shapes of tensors."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch
import yaml
from families_table import CASES, MODELS, RELEASED_CONFIGS, shipped
from one_line import one_line
from test_families import as_stored

from harness.config.model import FAMILIES
from harness.model.rope import rope_table
from harness.util.errors import UserError
from harness.weights.config_json import check_hf_config, hf_config, model_from_config
from harness.weights.hf_tensors import check_hf_tensors, hf_shapes

transformers = pytest.importorskip("transformers")

RELEASED = sorted(
    name
    for name in MODELS
    if name != "llama3_tiny" and not FAMILIES[shipped(name).family].is_diffusers
)
LLAMA = RELEASED_CONFIGS["llama3_8b"]
SCALING = LLAMA["rope_scaling"]


def content_of(config, dtype="float32"):
    return hf_config(config, dtype) | {"bos_token_id": 1}


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


def scaled(name, changed):
    return {"rope_scaling": {**RELEASED_CONFIGS[name]["rope_scaling"], **changed}}


REFUSED = yaml.safe_load((Path(__file__).parent / "refused_configs.yaml").read_text())


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [(name, change, says) for name, rows in REFUSED.items() for change, says in rows],
)
def test_a_file_that_differs_is_refused(name, change, says):
    change = scaled(name, change["scaled"]) if "scaled" in change else change
    start = "" if says.startswith("...") else "^"
    with one_line(UserError, start + re.escape(says.removeprefix("..."))):
        check_hf_config(shipped(name), {**RELEASED_CONFIGS[name], **change})


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
    implied = scaled("gpt_oss_20b", {"attention_factor": 0.1 * math.log(32) + 1})
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
    layers = max(layers, len(config.layer_kinds or []))
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
    last = f"layers.{layers - 1}.post_attention_layernorm"
    assert len([key for key in hf_shapes(config) if last in key]) == 1


def test_redundant_tensors_are_allowed():
    tied = CASES["llama_tied"]
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,), "lm_head.weight": (96, 64)}
    check_hf_tensors(tied, {**hf_shapes(tied), **extra})
    says = r"1 of another shape \(lm_head.weight is \[95, 64\] and not \[96, 64\]\)"
    with one_line(UserError, says):
        check_hf_tensors(tied, {**hf_shapes(tied), "lm_head.weight": (95, 64)})
