"""Every family against transformers: logits, gradients, config.json, tensors; through the files we write."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from held import Held
from small_models import close, ours
from test_accounting import shipped
from torch import Tensor

from harness.config import with_value
from harness.exchange.config_json import our_tensors
from harness.exchange.families import ALL
from harness.exchange.huggingface import HuggingFaceSource, write_huggingface
from harness.exchange.pieces import fill, full_ranges
from harness.model.config import ModelConfig
from harness.model.decoder import Decoder
from harness.model.spec import is_buffer, tensor_shapes

transformers = pytest.importorskip("transformers")

SEQ_LEN = 48  # longer than the windows and chunks of the debug models


def changed(name: str, **fields: Any) -> ModelConfig:
    """A debug model with other numbers and without the auxiliary loss, which transformers does not have."""
    return set_fields(shipped(name), moe__aux_loss_coeff=0.0, **fields)


def set_fields(model: ModelConfig, **fields: Any) -> ModelConfig:
    """The same model with other numbers, ``moe__top_k=2`` say."""
    for field, value in fields.items():
        model = with_value(model, field.replace("__", "."), value)
    config = model.resolve()
    config.validate()
    return config


CASES = {
    "llama_biases_linear": changed(
        "qwen2_debug",
        family="llama",
        attention__output_bias=True,
        rope__scaling="linear",
        rope__factor=4.0,
    ),
    "qwen2": changed("qwen2_debug"),
    "qwen2_tied": changed("qwen2_debug", tied_embeddings=True, norm_eps=1e-3),
    "mistral": changed("mistral_debug"),
    "mistral_wide": changed("mistral_debug", head_dim=24, attention__window=5, rope__scaling="linear"),
    "mixtral": changed("mixtral_debug"),
    "mixtral_window": changed("mixtral_debug", attention__window=7, moe__top_k=3),
    "qwen3": changed("qwen3_debug"),
    "qwen3_untied": changed("qwen3_debug", tied_embeddings=False, norm_eps=1e-3),
    "qwen3_moe": changed("qwen3_moe_debug"),
    "qwen3_moe_some_dense": changed(
        "qwen3_moe_debug", moe__first_dense_layers=1, moe__every_nth_layer=2, moe__normalize_scores=False
    ),
    "deepseek_v2": changed("deepseek_v2_debug"),
    "deepseek_v2_groups": changed(
        "deepseek_v2_debug",
        attention__q_lora_rank=32,
        moe__num_groups=4,
        moe__top_groups=2,
        moe__score_scale=16.0,
        rope__mscale=1.0,
    ),
    "deepseek_v3": changed("deepseek_v3_debug"),
    "deepseek_v3_plain": changed(
        "deepseek_v3_debug",
        attention__q_lora_rank=None,
        moe__num_groups=1,
        moe__top_groups=1,
        moe__normalize_scores=False,
        moe__shared_hidden_dim=64,
        rope__scaling="none",
        rope__interleaved=False,
    ),
    "gpt_oss": changed("gpt_oss_debug"),
    "gpt_oss_truncated": changed("gpt_oss_debug", rope__truncate=True, attention__global_every_nth_layer=3),
    "llama4": changed("llama4_debug"),
    "llama4_maverick": changed("llama4_debug", attention__qk_norm="none", rope__scaling="none"),
    "llama4_all_experts": changed(
        "llama4_debug", moe__every_nth_layer=1, moe__top_k=2, attention__nope_temperature=0.0
    ),
}


def random_model(config: ModelConfig) -> Decoder:
    """Weights far from their initial values, biases and sinks too."""
    model = ours(config, SEQ_LEN)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if re.search(r"\.(bias|b[123]|sinks|balance_bias)$", name):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
            elif name.startswith("layers.") and "norm" not in name:
                tensor.mul_(2.0)
    return model


def tensors_of(model: Decoder) -> dict[str, Tensor]:
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return {name: state[name] for name in tensor_shapes(model.config)}


def theirs_of(config: ModelConfig, model: Decoder, folder: Path) -> Any:
    """What transformers loads from the files we write."""
    write_huggingface(Held(tensors_of(model)), config, None, folder, None, 1e-4)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    return loaded.eval()


def as_stored(theirs: dict[str, Tensor], family: str = "") -> dict[str, Tensor]:
    """Tensors of transformers' modules, which stack and fuse experts that its files keep one by one."""
    if family == "mixtral":
        return {_of_mixtral(name): tensor for name, tensor in as_stored(theirs).items()}
    stored = {}
    for name, tensor in theirs.items():
        prefix, _, last = name.rpartition("mlp.experts.")
        if not prefix or tensor.ndim != 3 or f"{prefix}mlp.router.weight" in theirs:
            stored[name] = tensor
            continue
        for expert, own in enumerate(tensor):
            parts = own.chunk(2) if last == "gate_up_proj" else [own]
            names = ["gate_proj", "up_proj"] if last == "gate_up_proj" else ["down_proj"]
            for each, part in zip(names, parts, strict=True):
                stored[f"{prefix}mlp.experts.{expert}.{each}.weight"] = part
    return stored


def _of_mixtral(name: str) -> str:
    """What Mixtral's files call a tensor that other mixtures have too."""
    for theirs, own in {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.items():
        name = re.sub(rf"mlp\.experts\.(\d+)\.{theirs}", rf"mlp.experts.\1.{own}", name)
    return re.sub(r"\.mlp\.(experts|gate)\.", r".block_sparse_moe.\1.", name)


def batch(config: ModelConfig) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(config.vocab_size, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def test_every_family_is_tried() -> None:
    assert {case.family for case in CASES.values()} == set(ALL)


def from_theirs(model: ModelConfig, theirs: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """All tensors of ours out of theirs in memory."""
    shapes = tensor_shapes(model)
    for name, pieces in our_tensors(model).items():
        out = torch.empty(shapes[name], dtype=theirs[pieces[0].theirs].dtype)
        fill(out, pieces, shapes[name], full_ranges(shapes[name]), lambda key, part: theirs[key][part])
        yield name, out


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients(case: str, tmp_path: Path) -> None:
    config = CASES[case]
    model = random_model(config)
    theirs = theirs_of(config, model, tmp_path)
    assert type(theirs).__name__ == ALL[config.family].architecture
    inputs, labels = batch(config)
    logits, their_logits = model(inputs), theirs(inputs).logits
    assert their_logits.std() > 0.5
    close(logits, their_logits, tolerance=1e-4)

    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    F.cross_entropy(their_logits.flatten(0, 1), labels.flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    buffers = dict(theirs.named_buffers())
    stored = as_stored({**buffers, **gradients}, config.family)
    own = dict(model.named_parameters())
    compared = 0
    for name, gradient in from_theirs(config, stored):
        if is_buffer(name):
            continue
        grad = own[name].grad
        assert grad is not None and gradient.abs().max() > 0, name
        close(grad, gradient, tolerance=1e-4, name=name)
        compared += 1
    assert compared == len(own) == len({id(p) for p in model.parameters()})


@pytest.mark.parametrize("case", CASES)
def test_what_transformers_saves_is_read(case: str, tmp_path: Path) -> None:
    """Its config.json and tensors, which are not arranged as ours are."""
    config = CASES[case]
    model = random_model(config)
    theirs_of(config, model, tmp_path / "ours").save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    source = HuggingFaceSource(tmp_path / "theirs", config)
    expected = tensors_of(model)
    assert list(source.tensors) == list(expected)
    for name, tensor in expected.items():
        read = source.read(name)
        assert read.is_contiguous() and read.untyped_storage().nbytes() == read.nbytes
        assert torch.equal(read, tensor), name


@pytest.mark.parametrize("case", CASES)
def test_parts_of_tensors(case: str, tmp_path: Path) -> None:
    """What a rank holds: some rows, some columns, some experts; or nothing."""
    config = CASES[case]
    tensors = tensors_of(random_model(config))
    write_huggingface(Held(tensors), config, None, tmp_path, None, 5.0)
    source = HuggingFaceSource(tmp_path, config)
    for name, tensor in tensors.items():
        for cut in (range(1), range(1, 3), range(2, 2)):
            ranges = [range(size)[cut.start * size // 4 : cut.stop * size // 4] for size in tensor.shape]
            part = tensor[tuple(slice(each.start, each.stop) for each in ranges)]
            out = torch.full(part.shape, torch.nan)
            source.fill(name, out, ranges)
            assert torch.equal(out, part), name


# What makes a family what it is, and a value with which it is not there, or another.
PECULIARITIES = [
    ("llama_biases_linear", {"attention__output_bias": False}),
    ("llama_biases_linear", {"rope__scaling": "none"}),
    ("qwen2", {"attention__qkv_bias": False}),
    ("mistral", {"attention__window": None}),
    ("mixtral", {"moe__normalize_scores": False}),
    ("qwen3", {"attention__qk_norm": "none"}),
    ("qwen3_moe", {"moe__normalize_scores": False}),
    ("deepseek_v2", {"rope__scaling": "none"}),
    ("deepseek_v2", {"rope__interleaved": False}),
    ("deepseek_v2", {"rope__mscale": 1.0}),
    ("deepseek_v2_groups", {"moe__num_groups": 1, "moe__top_groups": 1}),
    ("deepseek_v3", {"moe__group_score": "max"}),
    ("deepseek_v3", {"moe__score_scale": 1.0}),
    ("deepseek_v3", {"moe__balance_coeff": 0.0}),
    ("gpt_oss", {"attention__window": None, "attention__global_every_nth_layer": None}),
    ("gpt_oss", {"attention__global_every_nth_layer": 3}),
    ("gpt_oss", {"attention__sinks": False}),
    ("gpt_oss", {"moe__expert_bias": False}),
    ("gpt_oss", {"activation": "swiglu"}),
    ("gpt_oss", {"rope__truncate": True}),
    ("llama4", {"attention__chunk": None, "attention__global_every_nth_layer": None}),
    ("llama4", {"attention__nope_every_nth_layer": None}),
    ("llama4", {"attention__nope_temperature": 0.0}),
    ("llama4", {"attention__qk_norm": "none"}),
    ("llama4", {"moe__score_before_experts": False}),
]


@pytest.mark.parametrize(("case", "fields"), PECULIARITIES)
def test_peculiarities_change_what_is_computed(case: str, fields: dict[str, Any]) -> None:
    """One that changed nothing on these weights and tokens would not have been compared above."""
    model = random_model(CASES[case])
    other = Decoder(set_fields(CASES[case], **fields), SEQ_LEN)
    other.load_state_dict(model.state_dict(), strict=False)
    inputs, _ = batch(CASES[case])
    with torch.no_grad():
        before, after = model(inputs), other(inputs)
    assert (before - after).abs().max() > 1e-2 * before.abs().max()
