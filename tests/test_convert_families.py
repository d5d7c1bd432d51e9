"""Conversions keep the weights of every family; unsupported ones fail with a one-line error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from held import Held
from peak_memory import bytes_of_converting
from tiers import rest_is_thorough
from torch import Tensor

from harness.checkpoint.catalog import open_checkpoint
from harness.compose import compose_job
from harness.convert import ConvertJob, convert, model_manifest
from harness.errors import EXIT_OK, ConfigError, UserError
from harness.exchange.dcp import DistributedSource, write_distributed
from harness.exchange.found import WeightFolder
from harness.exchange.huggingface import HuggingFaceSource, write_huggingface
from harness.exchange.pieces import HuggingFaceNames
from harness.exchange.source import Cast, Source
from harness.model.config import ModelConfig
from harness.model.decoder import Decoder
from harness.model.spec import is_buffer, tensor_shapes

ROOT = Path(__file__).parents[1]
MTP = ["model=deepseek_v3_debug", "model.mtp.depth=1"]
FAMILIES = ["qwen2", "mixtral", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "llama4"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher around this process."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def model_of(*overrides: str) -> ModelConfig:
    return compose_job(list(overrides), config_name="convert", schema=ConvertJob).model


def random_tensors(model: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(shape, generator=generator).to(torch.float32 if is_buffer(name) else dtype)
        for name, shape in tensor_shapes(model).items()
    }


def run(source: Path, target: Path, *overrides: str) -> None:
    typed = [*overrides, f"convert.source={source}", f"convert.target={target}"]
    assert convert(compose_job(typed, config_name="convert", schema=ConvertJob), typed) == EXIT_OK


def require_same(source: Source, expected: dict[str, Tensor]) -> None:
    assert list(source.tensors) == list(expected)
    for name, tensor in expected.items():
        read = source.read(name)
        assert read.dtype == tensor.dtype and torch.equal(read, tensor), name


@pytest.mark.parametrize("model_overrides", [*([f"model={family}_debug"] for family in FAMILIES), MTP])
def test_there_and_back(model_overrides: list[str], tmp_path: Path) -> None:
    model = model_of(*model_overrides)
    tensors = random_tensors(model)
    write_huggingface(Held(tensors), model, None, tmp_path / "hf", None, 1e-4)
    run(tmp_path / "hf", tmp_path / "step-0", *model_overrides)
    manifest = open_checkpoint(str(tmp_path / "step-0")).manifest
    require_same(DistributedSource(str(tmp_path / "step-0"), manifest, model), tensors)
    run(tmp_path / "step-0", tmp_path / "back", "convert.format=hf", "convert.max_shard_gb=0.0001")
    require_same(HuggingFaceSource(tmp_path / "back", model), tensors)
    files = sorted(file.name for file in (tmp_path / "hf").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "back").iterdir()) and len(files) > 3
    for name in files:
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "back" / name).read_bytes(), name
    run(tmp_path / "step-0", tmp_path / "model.pt", "convert.format=torch", "convert.dtype=float32")
    Decoder(model, 16).load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))


def test_balancing_biases_are_never_cast(tmp_path: Path) -> None:
    model = model_of("model=deepseek_v3_debug")
    tensors = random_tensors(model, torch.float32)
    write_huggingface(Held(tensors), model, None, tmp_path / "hf", torch.bfloat16, 5.0)
    found = HuggingFaceSource(tmp_path / "hf", model)
    for name, tensor in tensors.items():
        expected = tensor if is_buffer(name) else tensor.bfloat16()
        assert torch.equal(found.read(name), expected) and found.read(name).dtype == expected.dtype
    assert any(is_buffer(name) for name in tensors)
    # A file with them in another dtype.
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    write_huggingface(Held(rounded), model, None, tmp_path / "rounded", None, 5.0)
    bias = HuggingFaceSource(tmp_path / "rounded", model).read("layers.1.moe.balance_bias")
    assert bias.dtype == torch.float32
    assert torch.equal(bias, rounded["layers.1.moe.balance_bias"].float())


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_is_read_once(family: str) -> None:
    """Stacked experts are not read again for every expert, and at most two stacks are cached."""
    model = model_of(f"model={family}_debug")
    source = Held(random_tensors(model))
    renamed = HuggingFaceNames(Cast(source, torch.float32), model)
    for name in renamed.tensors:
        tensor = renamed.read(name)
        assert tensor.is_contiguous() and tuple(tensor.shape) == renamed.tensors[name].shape
        assert len(renamed._cache) <= 2
    assert sorted(source.reads) == sorted(source.tensors)


# -- files with more than the text model, e.g. Llama 4's ----


def rewrite(folder: Path, change: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change(content)))


def test_the_text_model_of_a_multimodal_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = model_of("model=llama4_debug")
    tensors = random_tensors(model)
    write_huggingface(Held(tensors), model, None, tmp_path, None, 5.0)
    stored = load_file(tmp_path / "model.safetensors")
    nested = {f"language_model.{name}": tensor for name, tensor in stored.items()}
    nested["vision_model.class_embedding"] = torch.zeros(3)
    nested["multi_modal_projector.linear_1.weight"] = torch.zeros(2, 2)
    save_file(nested, tmp_path / "model.safetensors")
    rewrite(tmp_path, lambda own: {"model_type": "llama4", "text_config": own, "vision_config": {}})
    require_same(HuggingFaceSource(tmp_path, model), tensors)
    # As in the released files.
    released = {"no_rope_layers": [], "attn_temperature_tuning": 4}
    rewrite(tmp_path, lambda whole: {**whole, "text_config": {**whole["text_config"], **released}})
    require_same(HuggingFaceSource(tmp_path, model), tensors)


def test_blocks_that_predict_another_token_are_skipped(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = model_of("model=deepseek_v3_debug")
    tensors = random_tensors(model)
    write_huggingface(Held(tensors), model, None, tmp_path, None, 5.0)
    stored = load_file(tmp_path / "model.safetensors")
    save_file({**stored, "model.layers.4.eh_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    rewrite(tmp_path, lambda own: {**own, "num_nextn_predict_layers": 1})
    require_same(HuggingFaceSource(tmp_path, model), tensors)
    save_file({**stored, "model.layers.5.eh_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"1 unexpected \(model\.layers\.5\.eh_proj\.weight\)"):
        HuggingFaceSource(tmp_path, model)


def test_the_block_of_multi_token_prediction_has_the_released_models_names(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = model_of(*MTP)
    tensors = random_tensors(model)
    write_huggingface(Held(tensors), model, None, tmp_path, None, 5.0)
    stored = load_file(tmp_path / "model.safetensors")
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    for ours, theirs in {
        "mtp.embedding_norm.weight": "enorm.weight",
        "mtp.hidden_norm.weight": "hnorm.weight",
        "mtp.proj.weight": "eh_proj.weight",
        "mtp.norm.weight": "shared_head.norm.weight",
        "mtp.block.attention_norm.weight": "input_layernorm.weight",
        "mtp.block.moe.balance_bias": "mlp.gate.e_score_correction_bias",
        "tok_embeddings.weight": "embed_tokens.weight",
        "output.weight": "shared_head.head.weight",
    }.items():
        assert torch.equal(stored[f"model.layers.4.{theirs}"], tensors[ours]), ours
    # A model without the block can read the same files; the model with it needs files that have it.
    plain = model_of("model=deepseek_v3_debug")
    require_same(HuggingFaceSource(tmp_path, plain), {name: tensors[name] for name in tensor_shapes(plain)})
    write_huggingface(Held(tensors), plain, None, tmp_path / "plain", None, 5.0)
    with pytest.raises(UserError, match=r"model\.mtp\.depth=1: config\.json has num_nextn_predict_layers 0"):
        HuggingFaceSource(tmp_path / "plain", model)
    # Copies may be missing, but must not differ.
    copies = ("model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight")
    save_file(
        {name: tensor for name, tensor in stored.items() if name not in copies},
        tmp_path / "model.safetensors",
    )
    require_same(HuggingFaceSource(tmp_path, model), tensors)
    save_file({**stored, copies[1]: stored[copies[1]] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError, match=r"shared_head\.head\.weight differs from lm_head\.weight.*model\.mtp\.depth=0"
    ):
        HuggingFaceSource(tmp_path, model).read("output.weight")
    with pytest.raises(UserError, match=r"missing \(model\.layers\.4\.eh_proj\.weight\)"):
        save_file(
            {name: tensor for name, tensor in stored.items() if "eh_proj" not in name},
            tmp_path / "model.safetensors",
        )
        HuggingFaceSource(tmp_path, model)


def test_other_families_have_no_place_for_multi_token_prediction(tmp_path: Path) -> None:
    model = model_of("model=deepseek_v2_debug", "model.mtp.depth=1")
    with pytest.raises(ConfigError, match=r"^model\.mtp\.depth=1: .*deepseek_v2 cannot.* 0, .*deepseek_v3"):
        write_huggingface(Held(random_tensors(model)), model, None, tmp_path, None, 5.0)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    model = model_of("model=gpt_oss_debug")
    write_huggingface(Held(random_tensors(model)), model, None, tmp_path, None, 5.0)
    rewrite(tmp_path, lambda own: {**own, "quantization_config": {"quant_method": "mxfp4"}})
    with pytest.raises(
        UserError, match=r"^config\.json has quantization_config: .*mxfp4 .*would work: .*bfloat16"
    ):
        HuggingFaceSource(tmp_path, model)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["model=llama4_debug", "model.moe.balance_coeff=0.001"],
            "model.moe.balance_coeff=0.001: checkpoints of model.family=llama4 have no place for "
            "layers.1.moe.balance_bias; would work: 0.0, model.family=deepseek_v3",
        ),
        (
            ["model=llama3_tiny", "model.attention.sinks=true"],
            "model.attention.sinks=true: checkpoints of model.family=llama cannot store it; "
            "would work: false, model.family=gpt_oss",
        ),
        (
            ["model=deepseek_v3_debug", "model.moe.balance_coeff=0"],
            "model.moe.balance_coeff=0.0: checkpoints of model.family=deepseek_v3 have balancing biases",
        ),
        (
            ["model=deepseek_v2_debug", "model.moe.shared_hidden_dim=48"],
            "model.moe.shared_hidden_dim=48: checkpoints of this family count shared experts of "
            "model.moe.hidden_dim=32",
        ),
        (
            ["model=llama3_tiny", "model.family=qwen3_moe"],
            "model.moe.num_experts=0: checkpoints of model.family=qwen3_moe have experts",
        ),
        (
            ["model=qwen3_moe_debug", "model.family=gpt_oss"],
            "model.activation=swiglu: checkpoints of model.family=gpt_oss cannot store it; "
            "would work: swiglu_clamped, model.family=llama",
        ),
        (
            ["model=llama4_debug", "model.moe.score_before_experts=false"],
            "model.moe.score_before_experts=false: checkpoints of model.family=llama4 cannot store it",
        ),
    ],
)
def test_what_a_familys_files_cannot_say(overrides: list[str], says: str, tmp_path: Path) -> None:
    model = model_of(*overrides)
    with pytest.raises(ConfigError) as caught:
        write_huggingface(Held(random_tensors(model)), model, None, tmp_path, None, 5.0)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_metas_files_are_llamas(tmp_path: Path) -> None:
    (tmp_path / "meta").mkdir()
    torch.save({}, tmp_path / "meta" / "consolidated.00.pth")
    with pytest.raises(UserError, match=r"Meta's files are read for model\.family=llama, not qwen3"):
        run(tmp_path / "meta", tmp_path / "out", "model=qwen3_debug")


# -- memory ----

WIDE = ["model.dim=256", "model.ffn_hidden_dim=512", "model.moe.hidden_dim=192", "model.n_layers=16"]


CASES = [(family, way) for family in ("qwen3_moe", "gpt_oss") for way in ("hf-dcp", "dcp-hf")]


@pytest.mark.parametrize("case", rest_is_thorough(CASES, CASES[3]), ids="-".join)
def test_memory_is_that_of_a_few_tensors(case: tuple[str, str], tmp_path: Path) -> None:
    family, way = case
    source, target = way.split("-")
    overrides = [f"model={family}_debug", "model.moe.num_experts=16", *WIDE]
    for name, layers in (("small", 2), ("large", 16)):
        model = model_of(*overrides, f"model.n_layers={layers}")
        held = Held(random_tensors(model, torch.float32))
        if source == "hf":
            write_huggingface(held, model, None, tmp_path / name, None, 5.0)
        else:
            write_distributed(held, tmp_path / name, model_manifest(WeightFolder("hf", "", {}), model, None))
    size = sum(file.stat().st_size for file in (tmp_path / "large").iterdir())
    assert size > 150e6
    typed = overrides if source == "hf" else []
    small, large, out = (tmp_path / name for name in ("small", "large", "out"))
    # A stack of experts has 3 MB.
    assert bytes_of_converting(small, large, out, target, 2, typed) < size / 5
