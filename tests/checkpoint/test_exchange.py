"""Start from and export to Hugging Face's format on several ranks, checked with transformers."""

import json
import re
import shutil

import pytest
import torch
from jobs import batches_of
from quantized_files import quantize_fp8, rewrite, stored_in
from resumable_runs import SMALL, train
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from harness.checkpoint.catalog import open_checkpoint
from harness.compose.composer import compose_job
from harness.data.tokenizer import build_tokenizer
from harness.launch.pool import RankFailed
from harness.weights.config_json import hf_config

VOCAB = 261  # no degree divides it
ENDS = ("checkpoint.last_save_model_only=true", "checkpoint.last_save_in_hf=true")
FSDP2 = ("parallelism=fsdp", "parallelism.dp_shard=2", "training.global_batch_size=4")


def job_of(tmp_path, *overrides, source=""):
    shape = (f"model.vocab_size={VOCAB}", "model.rope.scaling=none", "training.steps=2")
    path = [f"checkpoint.initial_load_path={tmp_path / source}"] * bool(source)
    is_hf = [f"checkpoint.initial_load_in_hf={str(source == 'hf').lower()}"] * bool(source)
    return compose_job([*SMALL, *shape, f"runs_dir={tmp_path}", *path, *is_hf, *overrides])


def run(pool, job, run_dir):
    return pool.run(job.world_size, train, job.to_json(), str(run_dir))


def reference_of(job):
    """transformers' model with the job's config; its weights are far from usual initial values."""
    torch.manual_seed(3)
    content = hf_config(job.model, "float32")
    config = CONFIG_MAPPING[content["model_type"]](**content, initializer_range=0.2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if job.model.moe.enabled:  # norms and biases too; float8's tolerance is for norms of one
        with torch.no_grad():
            for tensor in (*model.parameters(), *biases_of(model).values()):
                tensor.add_(torch.randn_like(tensor) * 0.2)
    return model.eval()


def biases_of(model):
    return {
        name: bias
        for name, bias in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    }


def loss_of(model, job):
    """transformers' loss of the run's first batch."""
    loader = batches_of(job, range(job.global_batch_size))
    batch = loader.next()
    with torch.no_grad():
        logits = model(batch.inputs_BT).logits.float()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_BT.flatten()))


STILL = ("optimizer.lr=0.0",)
STARTED = {
    "dense": ("parallelism=fsdp", "parallelism.dp_shard=3", "training.global_batch_size=6", *STILL),
    # Ranks read their experts or shards of them, from one stacked tensor.
    "gpt_oss": (
        *(
            "model=gpt_oss_debug",
            "parallelism=fsdp_tp",
            "parallelism.dp_shard=2",
            "parallelism.ep=2",
        ),
        *("parallelism.expert_tensor_parallel=true", *STILL),
    ),
    # From one tensor per expert; balancing biases too, on several stages.
    "deepseek_v3": (
        *("model=deepseek_v3_debug", "parallelism=tp_pp", "parallelism.ep=2", *STILL),
        "model.moe.balance_coeff=0.0001",
    ),
}


@pytest.mark.parametrize("name", STARTED)
def test_training_starts_and_ends_in_safetensors(pool, tmp_path, name):
    job = job_of(tmp_path, *STARTED[name], *ENDS, source="hf")
    reference = reference_of(job)
    reference.save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    for outcome in run(pool, job, tmp_path / "run"):
        assert outcome.losses[1] == pytest.approx(loss_of(reference, job), rel=1e-5)
    require_same(
        AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step-2"), reference, job
    )


def require_same(ended, reference, job):
    for key, tensor in reference.named_parameters():
        assert torch.equal(ended.get_parameter(key), tensor), key
    # Balancing biases change without a learning rate, by at most two coefficients a step.
    for key, bias in biases_of(reference).items():
        moved = (biases_of(ended)[key] - bias).abs().max()
        assert moved <= 8.1 * job.model.moe.balance_coeff < 0.1 < bias.abs().max(), key


def test_what_was_trained_in_float8_is_exported(pool, tmp_path):
    """transformers and a run that starts from the files compute the same loss."""
    layout = ("parallelism=fsdp", "parallelism.dp_shard=2", "precision=float8_tensorwise")
    gathers = ("precision.emulate=true", "precision.enable_fsdp_float8_all_gather=true")
    job = job_of(tmp_path, *layout, *gathers, *ENDS)
    run(pool, job, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step-2"
    assert open_checkpoint(str(folder)).holds == "hf"
    assert [p.name for p in folder.parent.iterdir() if p.is_dir()] == ["step-2"]
    shutil.copytree(folder, tmp_path / "hf")
    again = job_of(tmp_path, source="hf")
    [outcome] = run(pool, again, tmp_path / "again")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert outcome.losses[1] == pytest.approx(loss_of(model, again), rel=1e-5)
    ids = AutoTokenizer.from_pretrained(folder)("a Llama", add_special_tokens=False).input_ids
    assert ids == build_tokenizer(job.tokenizer).encode("a Llama")


def test_training_starts_from_quantized_weights(pool, tmp_path):
    """Ranks read parts of blocks: shards by FSDP and expert parallelism."""
    layout = (
        "model=deepseek_v3_debug",
        "parallelism=fsdp",
        "parallelism.dp_shard=4",
        "parallelism.ep=2",
    )
    job = job_of(tmp_path, *layout, source="hf")
    reference = reference_of(job)
    reference.save_pretrained(tmp_path / "hf")
    shutil.copytree(tmp_path / "hf", tmp_path / "dequantized")
    rewrite(tmp_path / "dequantized", quantize_fp8(tmp_path / "hf", (12, 20)), None)
    wanted = loss_of(AutoModelForCausalLM.from_pretrained(tmp_path / "dequantized"), job)
    assert abs(wanted - loss_of(reference, job)) > 1e-4
    for outcome in run(pool, job, tmp_path / "run"):
        assert outcome.losses[1] == pytest.approx(wanted, rel=1e-5)
    # Rank 0 does not read these scales.
    stored = stored_in(tmp_path / "hf")
    last = max(name for name in stored if ".mlp.experts." in name and "_scale" in name)
    stored[last][-1] = torch.nan
    quantization = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    rewrite(tmp_path / "hf", stored, quantization)
    says = rf"{re.escape(last)} has a scale that is NaN or infinite \(rank [1-3]\)"
    with pytest.raises(RankFailed, match=says) as caught:
        run(pool, job, tmp_path / "again")
    assert caught.value.failure is not None and caught.value.failure.kind == "user"


def test_export_dtype_and_tied_embeddings(pool, tmp_path):
    job = job_of(
        tmp_path, *FSDP2, "model.tied_embeddings=true", *ENDS, "checkpoint.export_dtype=bfloat16"
    )
    run(pool, job, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step-2"
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_head_that_differs_from_the_table_is_not_dropped(pool, tmp_path):
    """transformers keeps both tables; only the rank whose rows differ can see it."""
    job = job_of(tmp_path, *FSDP2, "model.tied_embeddings=true", source="hf")
    reference_of(job).save_pretrained(tmp_path / "hf")
    tensors = load_file(file := tmp_path / "hf" / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, file, metadata={"format": "pt"})
    run(pool, job, tmp_path / "same")
    head[VOCAB - 1] += 1
    save_file({**tensors, "lm_head.weight": head}, file, metadata={"format": "pt"})
    with pytest.raises(
        RankFailed,
        match=r"lm_head\.weight differs from model\.embed_tokens\.weight.*would work: tie_",
    ):
        run(pool, job, tmp_path / "other")
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": False}))
    untied = job_of(tmp_path, *FSDP2, source="hf")
    expected = loss_of(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), untied)
    for outcome in run(pool, untied, tmp_path / "untied"):
        assert outcome.losses[1] == pytest.approx(expected, rel=1e-5)
