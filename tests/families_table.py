"""Small models of every family, for comparison with transformers.

``CASES`` is the table: one row for each family, and more for its options. Every row has a random decoder
(``random_model``), transformers' model with the same weights (``to_transformers``), and tokens (``batch``).
"""

import functools
import re
from pathlib import Path

import torch
import yaml
from held import Held
from omegaconf import OmegaConf
from plugins import CONFS

from harness.config.fields import from_dict, with_value
from harness.config.model import (
    ACTIVATIONS,
    ARCHITECTURES,
    DECAYS,
    GROUP_SCORES,
    KINDS,
    NORM_POSITIONS,
    QK_NORMS,
    SCALINGS,
    SCORES,
    ModelConfig,
    RopeConfig,
)
from harness.config.types import with_types
from harness.model.architecture import resolve_model
from harness.model.decoder import Decoder
from harness.model.spec import tensor_shapes
from harness.parallelism.materialize import materialize
from harness.weights.huggingface import write_huggingface

MODELS = {file.stem: file for conf in CONFS for file in conf.glob("model/*.yaml")}
"""Files of the models that ship, by name."""
RELEASED_CONFIGS = yaml.safe_load((Path(__file__).parent / "released_configs.yaml").read_text())
SEQ_LEN = 48  # longer than the windows and chunks of the rows


def shipped(name):
    """A model that ships."""
    content = OmegaConf.to_container(OmegaConf.load(MODELS[name]))
    return set_fields(from_dict(ModelConfig, with_types(content, ModelConfig)))


def set_fields(model, **fields):
    """The model with other values of some fields (``moe__top_k=2``), resolved and validated."""
    for field, value in fields.items():
        model = with_value(model, field.replace("__", "."), value)
    config = resolve_model(model)
    return config


def changed(name, **fields):
    """A model that ships with other values, without the auxiliary loss, which is not compared."""
    return set_fields(shipped(name), moe__aux_loss_coeff=0.0, **fields)


# Sequences go past original_max_position, and there are wavelengths in every branch of the scaling.
STRETCHED = RopeConfig(
    theta=1000.0,
    scaling="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=32,
)
PLAIN = ModelConfig(
    name="small",
    vocab_size=96,
    dim=64,
    n_layers=3,
    n_heads=4,
    n_kv_heads=4,
    ffn_hidden_dim=112,
    max_seq_len=256,
    rope=RopeConfig(theta=10000.0),
)
LLAMAS = {
    "llama": set_fields(PLAIN),
    "llama_grouped_query": set_fields(PLAIN, n_kv_heads=2),
    "llama_multi_query": set_fields(PLAIN, n_kv_heads=1),
    "llama_tied": set_fields(PLAIN, tied_embeddings=True),
    "llama_wide_heads": set_fields(PLAIN, head_dim=32),
    "llama_narrow_heads": set_fields(PLAIN, head_dim=8, n_kv_heads=2),
    "llama_large_eps": set_fields(PLAIN, norm_eps=0.1),
    "llama_theta": set_fields(PLAIN, rope__theta=500.0),
    "llama_scaled": set_fields(PLAIN, rope=STRETCHED),
    "llama_everything": set_fields(
        PLAIN, n_kv_heads=2, head_dim=24, tied_embeddings=True, rope=STRETCHED, norm_eps=1e-3
    ),
}
CHANGED = yaml.safe_load("""
llama_biases_linear:
    [qwen2_debug, {family: llama, attention__output_bias: true, rope__scaling: linear, rope__factor: 4.0}]
qwen2: [qwen2_debug, {}]
qwen2_tied: [qwen2_debug, {tied_embeddings: true, norm_eps: 0.001}]
mistral: [mistral_debug, {}]
mistral_wide: [mistral_debug, {head_dim: 24, attention__window: 5, rope__scaling: linear}]
mixtral: [mixtral_debug, {}]
mixtral_window: [mixtral_debug, {attention__window: 7, moe__top_k: 3}]
qwen3: [qwen3_debug, {}]
qwen3_untied: [qwen3_debug, {tied_embeddings: false, norm_eps: 0.001}]
qwen3_moe: [qwen3_moe_debug, {}]
qwen3_moe_some_dense:
    [qwen3_moe_debug, {moe__first_dense_layers: 1, moe__every_nth_layer: 2, moe__normalize_scores: false}]
deepseek_v2: [deepseek_v2_debug, {}]
deepseek_v2_groups:
    [deepseek_v2_debug, {attention__q_lora_rank: 32, moe__num_groups: 4, moe__top_groups: 2,
    moe__score_scale: 16.0, rope__mscale: 1.0}]
deepseek_v3: [deepseek_v3_debug, {}]
deepseek_v3_plain:
    [deepseek_v3_debug, {attention__q_lora_rank: null, moe__num_groups: 1, moe__top_groups: 1,
    moe__normalize_scores: false, moe__shared_hidden_dim: 64, rope__scaling: none, rope__interleaved: false}]
gpt_oss: [gpt_oss_debug, {}]
gpt_oss_truncated: [gpt_oss_debug, {rope__truncate: true, attention__global_every_nth_layer: 3}]
qwen3_next: [qwen3_next_debug, {}]
qwen3_5: [qwen3_next_debug, {family: qwen3_5, moe__num_experts: 0, delta__key_heads: 2}]
qwen3_5_moe: [qwen3_next_debug, {family: qwen3_5_moe, delta__key_heads: 2}]
qwen3_next_other:
    [qwen3_next_debug, {n_layers: 3, layer_kinds: [full, delta, delta], delta__key_heads: 4, delta__kernel: 2,
    moe__normalize_scores: false, moe__first_dense_layers: 1, rope__rotated_fraction: 0.5}]
kimi_linear: [kimi_linear_debug, {}]
kimi_linear_other:
    [kimi_linear_debug, {n_layers: 3, layer_kinds: [full, delta, delta], attention__q_lora_rank: 32,
    moe__num_groups: 4, moe__top_groups: 2, moe__first_dense_layers: 0, delta__kernel: 2,
    delta__value_heads: 4, delta__key_heads: 4}]
olmo2:
    [olmo3_debug, {family: olmo2, attention__window: null, attention__global_every_nth_layer: null,
    rope__local_theta: null, rope__scaling: none}]
olmo3: [olmo3_debug, {}]
gemma2:
    [gemma3_debug, {family: gemma2, attention__qk_norm: none, attention__global_every_nth_layer: 2,
    rope__local_theta: null, attention__score_cap: 5.0, logits_cap: 3.0}]
gemma3: [gemma3_debug, {rope__scaling: linear}]
glm4:
    [qwen2_debug, {family: glm4, norm_position: around, rope__interleaved: true,
    rope__rotated_fraction: 0.5}]
glm4_moe:
    [qwen3_moe_debug, {family: glm4_moe, moe__score: sigmoid, moe__group_score: top2_sum,
    moe__balance_coeff: 0.001, moe__shared_hidden_dim: 32, moe__first_dense_layers: 1,
    rope__rotated_fraction: 0.5, attention__qkv_bias: true}]
phi3: [llama3_tiny, {family: phi3, n_kv_heads: 2, rope__scaling: none, rope__rotated_fraction: 0.75}]
granite:
    [llama3_tiny, {family: granite, embedding_multiplier: 12.0, residual_multiplier: 0.22,
    logits_scaling: 4.0, attention__scale: 0.125}]
smollm3: [llama3_tiny, {family: smollm3, attention__nope_every_nth_layer: 4, rope__scaling: none}]
llama4: [llama4_debug, {}]
llama4_maverick: [llama4_debug, {attention__qk_norm: none, rope__scaling: none}]
llama4_all_experts:
    [llama4_debug, {moe__every_nth_layer: 1, moe__top_k: 2, attention__nope_temperature: 0.0}]
""")
CASES = LLAMAS | {name: changed(model, **fields) for name, (model, fields) in CHANGED.items()}


def random_model(config, seq_len=SEQ_LEN):
    """A decoder in float32; its weights, also biases and sinks, are far from their initial values.

    Norms of one and logits near zero would hide mistakes.
    """
    with torch.device("meta"):
        model = Decoder(config, seq_len)
    cpu = torch.device("cpu")
    materialize(model, seed=7, device=cpu, parameter_device=cpu)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if re.search(r"\.(bias|b[123]|sinks|balance_bias)$", name):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
            elif re.search(r"\.(conv_[qkv]|a_log|dt_bias)$", name):
                pass
            elif "norm" in name:
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.2)
            elif tensor.requires_grad and name != "tok_embeddings.weight":
                tensor.mul_(6.0 if name.startswith("layers.") else 3.0)
    return model


def tensors_of(model):
    """The decoder's tensors in the order of checkpoints, without a tied output projection."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return {name: state[name] for name in tensor_shapes(model.config)}


def to_transformers(model, folder):
    """transformers' model with the decoder's weights, in float32, loaded from the files that we write."""
    import transformers

    write_huggingface(Held(tensors_of(model)), model.config, None, folder, 1e-4)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    return loaded.eval()


def batch(config):
    """Random tokens and labels, [2, SEQ_LEN]."""
    tokens = torch.randint(
        config.vocab_size, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1)
    )
    return tokens[:, :-1], tokens[:, 1:]


def close(a, b, tolerance=1e-5, name="tensor"):
    """Fail if the largest difference, relative to the largest value of ``b``, is above a tolerance."""
    assert a.shape == b.shape, f"{name}: {tuple(a.shape)} against {tuple(b.shape)}"
    difference, largest = (a - b).abs().max().item(), b.abs().max().item()
    assert difference <= tolerance * largest, (
        f"{name}: differs by {difference:.1e}; its largest value is {largest:.1e}"
    )


CHOICES = {
    "block": ("pre_norm", "of_a_package"),
    "architecture": ARCHITECTURES,
    "activation": ACTIVATIONS,
    "scaling": SCALINGS,
    "kind": KINDS,
    "qk_norm": QK_NORMS,
    "norm_position": NORM_POSITIONS,
    "score": SCORES,
    "decay": DECAYS,
    "group_score": GROUP_SCORES,
}


def with_another(config, field):
    """The model with another value of one field, such as ``attention.sinks``; it may be invalid."""
    before = functools.reduce(getattr, field.split("."), config)
    value: object
    if isinstance(before, bool):
        value = not before
    elif isinstance(before, str):
        value = next(choice for choice in CHOICES[field.split(".")[-1]] if choice != before)
    elif field == "layer_kinds":
        value = ["full", "delta"]
    elif isinstance(before, dict):
        value = {"an_option": 1}
    else:
        value = 7 if before != 7 else 8
    return with_value(config, field, value)
