"""Names, shapes and config.json against transformers, and against published counts."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch
from small_models import VARIANTS, close, ours, with_another
from test_accounting import PUBLISHED, on_meta, shipped

from harness.errors import ConfigError, UserError
from harness.exchange.config_json import check_hf_config, check_hf_tensors, hf_config, relevant
from harness.exchange.families.llama import hf_name
from harness.model.config import ModelConfig
from harness.model.rope import rope_table
from harness.model.rope_config import RopeConfig
from harness.model.spec import parameter_shapes

transformers = pytest.importorskip("transformers")

ALL = {**VARIANTS, "theta": dataclasses.replace(VARIANTS["plain"], rope=RopeConfig(theta=500.0))}


def variant(name: str) -> ModelConfig:
    config = ALL[name].resolve()
    config.validate()
    return config


def written(config: ModelConfig, folder: Path, dtype: str = "float32") -> transformers.PretrainedConfig:
    """transformers' configuration, read from a file with ours."""
    content = hf_config(config, dtype=dtype, bos_id=1, eos_id=None)
    (folder / "config.json").write_text(json.dumps(content))
    return transformers.AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("name", ALL)
def test_transformers_computes_the_same_from_the_file_and_the_names(name: str, tmp_path: Path) -> None:
    config = variant(name)
    model = ours(config, seq_len=48)
    theirs = transformers.AutoModelForCausalLM.from_config(
        written(config, tmp_path), attn_implementation="eager"
    )
    weights = {hf_name(own): parameter.detach() for own, parameter in model.named_parameters()}
    if config.tied_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    theirs.load_state_dict(weights, strict=True)
    assert type(theirs) is transformers.LlamaForCausalLM
    assert config.tied_embeddings == (theirs.lm_head.weight is theirs.model.embed_tokens.weight)
    tokens = torch.randint(config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        close(model(tokens), theirs.eval()(tokens).logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_file_says_everything_else(dtype: str, tmp_path: Path) -> None:
    read = written(variant("everything"), tmp_path, dtype)
    assert (read.model_type, read.architectures) == ("llama", ["LlamaForCausalLM"])
    assert (read.bos_token_id, read.eos_token_id) == (1, None)
    assert read.max_position_embeddings == 256 and read.dtype == getattr(torch, dtype)
    # What 4.x reads, which the installed transformers may not.
    content = json.loads((tmp_path / "config.json").read_text())
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
def test_either_form_of_rotation_is_enough(left_out: list[str]) -> None:
    """A reader that knows only one of the two gets the same rotation from it."""
    if "rope_theta" in left_out and not hasattr(transformers.LlamaConfig(), "rope_parameters"):
        pytest.skip("transformers 4 does not know the new form")
    config = variant("llama3_rope")
    content = hf_config(config, dtype="float32", bos_id=None, eos_id=None)
    read = transformers.LlamaConfig(
        **{name: value for name, value in content.items() if name not in left_out}
    )
    rotation = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(read)
    cos, sin = rotation(torch.zeros(1), torch.arange(48).unsqueeze(0))
    ours = rope_table(config.rope, config.head_width, seq_len=48)
    torch.testing.assert_close(torch.stack((cos[0, :, :8], sin[0, :, :8])), ours, rtol=0, atol=1e-5)


def test_heads_that_transformers_refuses() -> None:
    config = dataclasses.replace(variant("plain"), n_heads=6, n_kv_heads=3, head_dim=16)
    config.validate()
    with pytest.raises(ConfigError, match=r"model\.n_heads=6: .*model\.dim=64.*would work: 1, 2, 4, 8, 16"):
        hf_config(config, dtype="float32", bos_id=None, eos_id=None)


@pytest.mark.parametrize("name", ALL)
def test_shapes_are_the_decoders(name: str) -> None:
    config = variant(name)
    model = {name: tuple(parameter.shape) for name, parameter in on_meta(config).named_parameters()}
    assert list(parameter_shapes(config).items()) == list(model.items())


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_shapes_have_the_published_number_of_parameters(name: str) -> None:
    assert sum(math.prod(shape) for shape in parameter_shapes(shipped(name)).values()) == PUBLISHED[name]


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attention.wx.weight",
        "layers.a.ffn_norm.weight",
        "layers.0.attention.wq.bias",
        "norm",
        "rope.freqs",
        "layers.0.norm.weight",
    ],
)
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="no parameter"):
        hf_name(name)


@pytest.mark.parametrize("name", ALL)
def test_a_config_agrees_with_what_transformers_saves_of_it(name: str, tmp_path: Path) -> None:
    """The installed transformers' own form of the file, which is not ours."""
    config = variant(name)
    written(config, tmp_path).save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert saved != json.loads((tmp_path / "config.json").read_text())
    check_hf_config(config, saved)


# The config.json of released checkpoints, reduced to the fields that describe the model.
LLAMA2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
LLAMA31_8B = {
    **LLAMA2_7B,
    "attention_bias": False,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}


def test_released_files_are_read() -> None:
    check_hf_config(shipped("llama2_7b"), LLAMA2_7B)
    check_hf_config(shipped("llama3_8b"), LLAMA31_8B)


def test_the_new_form_of_a_released_file_is_read() -> None:
    parameters = {**LLAMA31_8B["rope_scaling"], "rope_theta": 500000.0}
    new = {k: v for k, v in LLAMA31_8B.items() if k not in ("rope_scaling", "rope_theta")}
    check_hf_config(shipped("llama3_8b"), {**new, "rope_parameters": parameters})
    with pytest.raises(
        UserError, match=r"^model\.rope\.theta=500000\.0: config\.json has rope_theta 10000\.0; would work: "
    ):
        check_hf_config(shipped("llama3_8b"), {**new, "rope_parameters": LLAMA31_8B["rope_scaling"]})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": 2048}, "model.dim=4096: config.json has hidden_size 2048; model.head_dim=128: "),
        ({"head_dim": 64}, "model.head_dim=128: config.json has head_dim 64"),
        ({"num_key_value_heads": None}, "model.n_kv_heads=8: config.json has num_key_value_heads 32"),
        ({"intermediate_size": 1}, "model.ffn_hidden_dim=14336: config.json has intermediate_size 1"),
        ({"num_hidden_layers": 2}, "model.n_layers=32: config.json has num_hidden_layers 2"),
        ({"rms_norm_eps": 1e-6}, "model.norm_eps=1e-05: config.json has rms_norm_eps 1e-06"),
        ({"vocab_size": 128000}, "model.vocab_size=128256: config.json has vocab_size 128000"),
        (
            {"tie_word_embeddings": True},
            "model.tied_embeddings=false: config.json has tie_word_embeddings true",
        ),
        (
            {"max_position_embeddings": 8192},
            "model.max_seq_len=131072: config.json has max_position_embeddings 8192",
        ),
        ({"rope_theta": 1e4}, "model.rope.theta=500000.0: config.json has rope_theta 10000.0"),
        ({"rope_scaling": None}, "model.rope.scaling=llama3: config.json has rope_type none"),
        (
            {"rope_scaling": {"type": "linear", "factor": 8.0}},
            "model.rope.scaling=llama3: config.json has rope_type linear",
        ),
        (
            {"rope_scaling": {**LLAMA31_8B["rope_scaling"], "factor": 32.0, "low_freq_factor": 2.0}},
            "model.rope.factor=8.0: config.json has factor 32.0; "
            "model.rope.low_freq_factor=1.0: config.json has low_freq_factor 2.0",
        ),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 2.0,
                }
            },
            "model.rope.high_freq_factor=4.0: config.json has high_freq_factor 2.0; "
            "model.rope.original_max_position=8192: config.json has original_max_position_embeddings 131072",
        ),
        ({"hidden_act": "gelu"}, "config.json has hidden_act gelu: the decoder only knows hidden_act silu"),
        (
            {"attention_bias": True},
            "model.attention.qkv_bias=false: config.json has attention_bias true; model.attention.output_bi",
        ),
        ({"mlp_bias": True}, "config.json has mlp_bias true: "),
        (
            {"model_type": "mistral"},
            "config.json has model_type mistral: only checkpoints with model_type llama",
        ),
        ({"model_type": None}, "config.json has no model_type: only checkpoints with model_type llama"),
    ],
)
def test_a_config_that_differs_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(UserError) as caught:
        check_hf_config(shipped("llama3_8b"), {**LLAMA31_8B, **change})
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", [name for name, _ in relevant(variant("everything"))])
def test_every_field_is_compared(field: str) -> None:
    """One that was left out of the comparison would let another model's weights in."""
    config = variant("everything")
    found = hf_config(config, dtype="float32", bos_id=None, eos_id=None)
    check_hf_config(config, found)
    with pytest.raises(UserError, match=rf"^model\.{re.escape(field)}=\S+: "):
        check_hf_config(with_another(config, field), found)


@pytest.mark.parametrize("name", ALL)
def test_tensors_of_transformers_fit(name: str, tmp_path: Path) -> None:
    config = variant(name)
    theirs = transformers.AutoModelForCausalLM.from_config(written(config, tmp_path))
    check_hf_tensors(config, {key: tuple(value.shape) for key, value in theirs.state_dict().items()})
    check_hf_tensors(config, {key: tuple(value.shape) for key, value in theirs.named_parameters()})


def tensors_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {hf_name(name): shape for name, shape in parameter_shapes(config).items()}


def test_what_says_nothing_new_is_tolerated() -> None:
    found = tensors_of(variant("tied"))
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,), "lm_head.weight": (96, 64)}
    check_hf_tensors(variant("tied"), {**found, **extra})
    with pytest.raises(
        UserError, match=r"1 of another shape \(lm_head.weight is \[95, 64\] and not \[96, 64\]\)"
    ):
        check_hf_tensors(variant("tied"), {**found, "lm_head.weight": (95, 64)})


def test_tensors_that_do_not_fit_are_named() -> None:
    config = variant("plain")
    found = tensors_of(config)
    del found["lm_head.weight"]
    found["model.norm.weight"] = (63,)
    found |= {f"model.layers.{layer}.self_attn.q_proj.bias": (64,) for layer in range(5)}
    with pytest.raises(UserError) as caught:
        check_hf_tensors(config, found)
    bias = ", ".join(f"model.layers.{layer}.self_attn.q_proj.bias" for layer in range(3))
    assert str(caught.value) == (
        "the checkpoint's tensors are not those of model=small: 1 missing (lm_head.weight), "
        f"5 unexpected ({bias}, ...), 1 of another shape (model.norm.weight is [63] and not [64])"
    )


def test_weights_of_another_depth_are_refused() -> None:
    config = variant("plain")
    deeper = dataclasses.replace(config, n_layers=4)
    with pytest.raises(UserError, match="9 unexpected"):
        check_hf_tensors(config, tensors_of(deeper))
    with pytest.raises(UserError, match="9 missing"):
        check_hf_tensors(deeper, tensors_of(config))
