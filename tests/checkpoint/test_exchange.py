"""Start from and export to Hugging Face's format on several ranks, checked with transformers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import quantize_fp8, quantize_mxfp4, rewrite, stored_in
from resumable_runs import SMALL, train
from tiers import rest_is_thorough
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from harness.checkpoint.catalog import open_checkpoint
from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.data.tokenizer import build_tokenizer
from harness.launch.pool import RankFailed, RankPool
from harness.train.objective import loader_of
from harness.weights.config_json import hf_config

LAYOUTS = {
    "single": "parallelism=single",
    "fsdp3": "parallelism=fsdp parallelism.dp_shard=3 training.global_batch_size=6",
    "fsdp_tp_pp": "parallelism=fsdp_tp_pp",
    "hsdp_bf16": "parallelism=hsdp precision=bf16",
    "fsdp_float8": "parallelism=fsdp precision=float8_tensorwise precision.emulate=true "
    "precision.enable_fsdp_float8_all_gather=true",
}
VOCAB = 261  # no degree divides it


def job_of(tmp_path: Path, *overrides: str) -> Job:
    shape = (f"model.vocab_size={VOCAB}", "model.rope.scaling=none")
    return compose_job([*SMALL, *shape, f"runs_dir={tmp_path}", *overrides])


def reference_of(job: Job, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model with the job's config; its weights are far from usual initial values."""
    torch.manual_seed(3)
    content = hf_config(job.model, dtype="float32", bos_id=None, eos_id=None)
    config = CONFIG_MAPPING[content["model_type"]](**content, initializer_range=0.2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if job.model.moe.enabled:  # norms and biases too; float8's tolerance is for norms of one
        with torch.no_grad():
            for tensor in (*model.parameters(), *biases_of(model).values()):
                tensor.add_(torch.randn_like(tensor) * 0.2)
    return model.to(dtype).eval()


def loss_of(model: torch.nn.Module, job: Job) -> float:
    """transformers' loss of the run's first batch."""
    loader = loader_of(job, build_tokenizer(job.tokenizer), range(job.global_batch_size))
    batch = loader.next()
    with torch.no_grad():
        logits = model(batch.inputs_BT).logits.float()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_BT.flatten()))


@pytest.mark.parametrize("layout", rest_is_thorough(LAYOUTS, "fsdp3"))
@pytest.mark.parametrize("dtype", rest_is_thorough([torch.float32, torch.bfloat16], torch.float32), ids=str)
def test_training_starts_from_safetensors(
    pool: RankPool, tmp_path: Path, layout: str, dtype: torch.dtype
) -> None:
    source = f"checkpoint.initial_load_path={tmp_path / 'hf'}"
    options = (*LAYOUTS[layout].split(), "checkpoint.initial_load_in_hf=true", source, "training.steps=2")
    job = job_of(tmp_path, *options)
    reference = reference_of(job, dtype)
    reference.save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    outcomes = pool.run(job.world_size, train, job.to_json(), str(tmp_path / "run"))
    tolerance = 2e-3 if job.precision.is_mixed else 1e-5
    expected = loss_of(reference.float(), job)
    for outcome in outcomes:
        assert outcome.losses[1] == pytest.approx(expected, rel=tolerance)


def test_non_finite_initial_values_are_reported(pool: RankPool, tmp_path: Path) -> None:
    """The rank with the non-finite values is not the one that prints."""
    layout = ("parallelism=fsdp", "parallelism.dp_shard=2", "training.global_batch_size=4")
    common = (*layout, "training.steps=2", "debug.non_finite=skip")
    path = "checkpoint.initial_load_path"
    first = job_of(tmp_path, *common, f"{path}={tmp_path / 'hf'}", "checkpoint.initial_load_in_hf=true")
    second = job_of(tmp_path, *common, f"{path}={tmp_path / 'first'}")
    reference = reference_of(first)
    with torch.no_grad():
        reference.model.embed_tokens.weight[VOCAB - 1, -1] = torch.nan
    reference.save_pretrained(tmp_path / "hf")
    for name, job in (("first", first), ("second", second)):
        outcome = pool.run(job.world_size, train, job.to_json(), str(tmp_path / name))[0]
        warning = "WARNING 1 of 39 tensors hold NaN or infinite values: tok_embeddings.weight; "
        assert f"{warning}they were loaded as they are" in outcome.messages


@pytest.mark.parametrize("layout", rest_is_thorough(LAYOUTS, "fsdp_float8"))
def test_training_ends_in_safetensors(pool: RankPool, tmp_path: Path, layout: str) -> None:
    """Every layout exports the same model, and transformers computes the same loss."""
    options = ("checkpoint.last_save_model_only=true", "checkpoint.last_save_in_hf=true", "training.steps=3")
    job = job_of(tmp_path, *LAYOUTS[layout].split(), *options)
    pool.run(job.world_size, train, job.to_json(), str(tmp_path / "run"))
    folder = tmp_path / "run" / "checkpoints" / "step-3"
    assert open_checkpoint(str(folder)).holds == "hf"
    assert [p.name for p in folder.parent.iterdir() if p.is_dir()] == ["step-3"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    # The first loss of a run that starts from it is the one that transformers computes.
    again = job_of(
        tmp_path,
        *("checkpoint.initial_load_in_hf=true", f"checkpoint.initial_load_path={folder}", "training.steps=2"),
    )
    [outcome] = pool.run(1, train, again.to_json(), str(tmp_path / "again"))
    assert outcome.losses[1] == pytest.approx(loss_of(model, again), rel=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("a Llama", add_special_tokens=False).input_ids == build_tokenizer(job.tokenizer).encode(
        "a Llama"
    )


MIXTURES = {
    "deepseek_v3_debug": "parallelism=fsdp parallelism.dp_shard=4 parallelism.ep=2",
    "deepseek_v2_debug": "parallelism=fsdp_tp parallelism.dp_shard=2 parallelism.ep=4",
    "qwen3_moe_debug": "parallelism=fsdp_pp parallelism.dp_shard=2 parallelism.ep=2",
    "gpt_oss_debug": "parallelism=fsdp_tp parallelism.dp_shard=2 parallelism.ep=2 "
    "parallelism.expert_tensor_parallel=true",
    "llama4_debug": "parallelism=fsdp_tp_pp parallelism.ep=2",
}


@pytest.mark.parametrize("name", rest_is_thorough(MIXTURES, "gpt_oss_debug"))
def test_mixtures_start_and_end_in_safetensors(pool: RankPool, tmp_path: Path, name: str) -> None:
    """Ranks read their experts or shards of them, from one tensor per expert or one stacked tensor."""
    model = (f"model={name}", "model.rope.scaling=none", *MIXTURES[name].split())
    source = ("checkpoint.initial_load_in_hf=true", f"checkpoint.initial_load_path={tmp_path / 'hf'}")
    ends = ("checkpoint.last_save_model_only=true", "checkpoint.last_save_in_hf=true")
    job = job_of(tmp_path, *model, *source, *ends, "optimizer.lr=0.0", "training.steps=2")
    reference = reference_of(job)
    reference.save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    outcomes = pool.run(job.world_size, train, job.to_json(), str(tmp_path / "run"))
    for outcome in outcomes:
        assert outcome.losses[1] == pytest.approx(loss_of(reference, job), rel=1e-5)
    require_same(
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step-2"), reference, job
    )


@pytest.mark.parametrize(
    "name", rest_is_thorough(["deepseek_v3_debug", "gpt_oss_debug"], "deepseek_v3_debug")
)
def test_training_starts_from_quantized_weights(pool: RankPool, tmp_path: Path, name: str) -> None:
    """Ranks read parts of blocks: shards by FSDP, tensor and expert parallelism."""
    model = (f"model={name}", "model.rope.scaling=none", *MIXTURES[name].split())
    source = ("checkpoint.initial_load_in_hf=true", f"checkpoint.initial_load_path={tmp_path / 'hf'}")
    job = job_of(tmp_path, *model, *source, "training.steps=2")
    reference = reference_of(job)
    reference.save_pretrained(tmp_path / "hf")
    shutil.copytree(tmp_path / "hf", tmp_path / "dequantized")
    if name == "gpt_oss_debug":
        expected = quantize_mxfp4(tmp_path / "hf")
    else:
        expected = quantize_fp8(tmp_path / "hf", (12, 20))
    rewrite(tmp_path / "dequantized", expected, None)
    dequantized = AutoModelForCausalLM.from_pretrained(tmp_path / "dequantized")
    wanted = loss_of(dequantized, job)
    assert abs(wanted - loss_of(reference, job)) > 1e-4
    for outcome in pool.run(job.world_size, train, job.to_json(), str(tmp_path / "run")):
        assert outcome.losses[1] == pytest.approx(wanted, rel=1e-5)
    # Rank 0 does not read these scales.
    stored = stored_in(tmp_path / "hf")
    last = max(name for name in stored if ".mlp.experts." in name and "_scale" in name)
    stored[last][-1] = 255 if stored[last].dtype == torch.uint8 else torch.nan
    quantization = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    rewrite(tmp_path / "hf", stored, quantization)
    says = rf"{re.escape(last)} has a scale that is NaN or infinite \(rank [1-3]\)"
    with pytest.raises(RankFailed, match=says) as caught:
        pool.run(job.world_size, train, job.to_json(), str(tmp_path / "again"))
    assert caught.value.failure is not None and caught.value.failure.kind == "user"


def test_balancing_biases_are_resharded(pool: RankPool, tmp_path: Path) -> None:
    """Buffers outside of the optimizer are saved, loaded on another layout, and exported."""
    model = ("model=deepseek_v3_debug", "optimizer.lr=0.0", "model.moe.balance_coeff=0.0001")
    start = ("checkpoint.initial_load_in_hf=true", f"checkpoint.initial_load_path={tmp_path / 'hf'}")
    layout = ("parallelism=fsdp", "parallelism.dp_shard=4", "parallelism.ep=2")
    first = job_of(tmp_path, *model, *start, *layout, "model.rope.scaling=none", "training.steps=2")
    reference = reference_of(first)
    reference.save_pretrained(tmp_path / "hf")
    pool.run(first.world_size, train, first.to_json(), str(tmp_path / "first"))
    saved = tmp_path / "first" / "checkpoints" / "step-2"
    assert open_checkpoint(str(saved)).holds == "full"
    start = (f"checkpoint.initial_load_path={saved}", "parallelism=tp_pp", "parallelism.ep=2")
    ends = ("checkpoint.last_save_model_only=true", "checkpoint.last_save_in_hf=true")
    second = job_of(tmp_path, *model, *start, *ends, "model.rope.scaling=none", "training.steps=2")
    pool.run(second.world_size, train, second.to_json(), str(tmp_path / "second"))
    ended = AutoModelForCausalLM.from_pretrained(tmp_path / "second" / "checkpoints" / "step-2")
    require_same(ended, reference, second)


def require_same(ended: torch.nn.Module, reference: torch.nn.Module, job: Job) -> None:
    for key, tensor in reference.named_parameters():
        assert torch.equal(ended.get_parameter(key), tensor), key
    # Balancing biases change without a learning rate, by at most two coefficients a step.
    for key, bias in biases_of(reference).items():
        moved = (biases_of(ended)[key] - bias).abs().max()
        assert moved <= 8.1 * job.model.moe.balance_coeff < 0.1 < bias.abs().max(), key


def biases_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: bias for name, bias in model.named_buffers() if name.endswith("e_score_correction_bias")}


def test_export_dtype_and_tied_embeddings(pool: RankPool, tmp_path: Path) -> None:
    job = job_of(
        tmp_path,
        *("parallelism=fsdp", "parallelism.dp_shard=2", "model.tied_embeddings=true", "training.steps=2"),
        *("checkpoint.last_save_model_only=true", "checkpoint.last_save_in_hf=true"),
        "checkpoint.export_dtype=bfloat16",
    )
    pool.run(2, train, job.to_json(), str(tmp_path / "run"))
    folder = tmp_path / "run" / "checkpoints" / "step-2"
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.dim=128"], "model.dim=128: config.json has hidden_size 64"),
        (["model.n_layers=3"], "model.n_layers=3: config.json has num_hidden_layers 4"),
    ],
)
def test_another_model_is_refused_on_all_ranks(
    pool: RankPool, tmp_path: Path, overrides: list[str], says: str
) -> None:
    reference_of(job_of(tmp_path)).save_pretrained(tmp_path / "hf")
    source = f"checkpoint.initial_load_path={tmp_path / 'hf'}"
    options = ("parallelism=fsdp", "parallelism.dp_shard=2", "checkpoint.initial_load_in_hf=true", source)
    job = job_of(tmp_path, *options, *overrides)
    with pytest.raises(RankFailed, match=says):
        pool.run(2, train, job.to_json(), str(tmp_path / "run"))
