"""scale: resized models keep their proportions, lengths and hyperparameters follow their formulas."""

import math
from dataclasses import replace

import pytest
from jobs import tiny

from harness.compose.composer import Composer, compose_job, compose_points
from harness.model.accounting import account
from harness.model.scale import count

FAMILIES = (
    "deepseek_v3_671b",
    "gpt_oss_20b",
    "llama4_maverick",
    "qwen3_0p6b",
    "llama3_8b",
    "mixtral_debug",
)
BIG = ("data=synthetic", "tokenizer=none", "cluster.device=cpu")


def dense_parameters(model):
    """Parameters of a Llama without its tables, by the shapes of its matrices."""
    queries, keys = model.n_heads * model.head_width, model.n_kv_heads * model.head_width
    block = 2 * model.dim * (queries + keys) + 3 * model.dim * model.ffn_hidden_dim + 2 * model.dim
    return model.n_layers * block + model.dim


def test_counts_are_those_of_the_tensors():
    families = [compose_job([*BIG, f"model={name}"]).model for name in FAMILIES]
    for model in (
        *families,
        *(replace(model, n_layers=1) for model in families if not model.moe.enabled),
    ):
        counted = account(model, 128)
        tables = (1 if model.tied_embeddings else 2) * model.vocab_size * model.dim
        assert count(model, "all") == counted.parameters
        assert count(model, "non_embedding") == counted.parameters - tables
        assert count(model, "active") == counted.active_parameters - tables


def test_a_flux_keeps_its_proportions():
    """Its blocks are of two kinds, of different sizes."""
    typed = (
        "model=flux_schnell",
        "data=latents_synthetic",
        "training.seq_len=512",
        "cluster.device=cpu",
    )
    own = compose_job([*typed]).model
    assert count(own, "all") == account(own, 512).parameters == 11_891_178_560
    made = compose_job([*typed, "scale.parameters=1B"]).model
    assert count(made, "all") == account(made, 512).parameters == pytest.approx(1e9, rel=0.1)
    assert made.options["double_layers"] / made.n_layers == pytest.approx(1 / 3, rel=0.1)
    assert made.head_width == own.head_width and made.ffn_hidden_dim == 4 * made.dim


def test_sizes_of_a_family_keep_its_proportions():
    composer = Composer()
    own = composer.job([*BIG, "model=llama3_8b"]).model
    for wanted in (3e8, 7e10):
        model = composer.job([*BIG, "model=llama3_8b", f"scale.parameters={wanted}"]).model
        assert (
            count(model, "non_embedding")
            == dense_parameters(model)
            == pytest.approx(wanted, rel=0.1)
        )
        assert model.head_width == own.head_width == 128
        assert model.n_heads / model.n_kv_heads == 4 and model.dim == 128 * model.n_heads
        assert model.ffn_hidden_dim == 3.5 * model.dim
        assert 2 / 3 < (model.dim / model.n_layers) / (own.dim / own.n_layers) < 3 / 2
    # The family's own size is found again, also in words, and that of its larger sibling nearly.
    assert composer.job([*BIG, "model=llama3_8b", "scale.parameters=6.98B"]).model == own
    sibling = composer.job([*BIG, "model=llama3_70b"]).model
    assert abs(model_of_70b(composer).dim / sibling.dim - 1) < 0.1


def model_of_70b(composer):
    """Resize the 8B model to the size of the 70B one."""
    model = composer.job([*BIG, "model=llama3_8b", "scale.parameters=68.5B"]).model
    return model


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("deepseek_v3_671b", 20e9),
        ("gpt_oss_20b", 2e9),
        ("llama4_maverick", 40e9),
        ("qwen3_0p6b", 5e7),
    ],
)
def test_other_kinds_of_blocks_are_resized_to_valid_models(model, wanted):
    own = compose_job([*BIG, f"model={model}"]).model
    made = compose_job([*BIG, f"model={model}", f"scale.parameters={wanted:.0f}"]).model
    assert count(made, "non_embedding") == pytest.approx(wanted, rel=0.1)
    wider = made.dim / own.dim
    for name in ("n_heads", "n_kv_heads", "ffn_hidden_dim"):
        assert getattr(made, name) / getattr(own, name) == pytest.approx(wider, rel=0.1), name
    assert made.moe.hidden_dim == pytest.approx(wider * own.moe.hidden_dim, rel=0.1)
    assert made.moe.num_experts == own.moe.num_experts and made.head_dim == own.head_dim
    if own.moe.enabled:
        assert count(made, "active") < count(made, "non_embedding") < count(made, "all")


def test_a_scaled_job_is_the_job_with_its_fields_typed():
    """Identity, and so the run folder, do not know how a size was chosen."""
    typed = ("model=llama3_debug", *BIG, "scale.parameters=1M", "scale.warmup_ratio=0.1")
    scaled = compose_job([*typed, "scale.tokens_per_parameter=2"])
    model = scaled.model
    tokens = 2 * count(model, "non_embedding")
    assert scaled.steps == math.ceil(tokens / (8 * 256))
    assert scaled.schedule.warmup_steps == round(0.1 * scaled.steps)
    by_hand = compose_job(
        [
            *(
                "model=llama3_debug",
                *BIG,
                f"model.dim={model.dim}",
                f"model.n_layers={model.n_layers}",
            ),
            *(f"model.n_heads={model.n_heads}", f"model.n_kv_heads={model.n_kv_heads}"),
            *(f"model.ffn_hidden_dim={model.ffn_hidden_dim}", f"training.tokens={tokens}"),
            f"schedule.warmup_steps={scaled.schedule.warmup_steps}",
        ]
    )
    assert by_hand == scaled and by_hand.id == scaled.id


def compute(job):
    return account(job.model, job.training.seq_len).flops_per_token_full * job.sizes.tokens(
        job.steps
    )


def test_isoflop_points_have_the_compute_and_straddle_the_tokens_per_parameter():
    points = compose_points(["sweep=isoflop", "model=llama3_8b", *BIG, "scale.flops=1e19"])
    jobs = [point.job for point in points]
    for job, wanted in zip(jobs, (5, 10, 20, 40, 80), strict=True):
        assert compute(job) == pytest.approx(1e19, rel=1e-4)
        assert job.sizes.tokens(job.steps) / count(job.model, "non_embedding") == pytest.approx(
            wanted, rel=0.2
        )
    sizes = [count(job.model, "non_embedding") for job in jobs]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 4 * sizes[-1]


def test_tokens_follow_from_compute_and_size():
    job = tiny("scale.flops=1e12", "scale.parameters=40k", "training.seq_len=64")
    assert compute(job) == pytest.approx(1e12, rel=0.01)
    assert count(job.model, "non_embedding") == pytest.approx(40_000, rel=0.1)


def test_step_law_has_the_published_values():
    """lr = 1.79 N^-0.713 D^0.307 and B = 0.58 D^0.571 tokens (arXiv:2503.04715, equation 1)."""
    job = compose_job(
        [
            "model=llama3_8b",
            *BIG,
            "scale.parameters=1B",
            "training.tokens=100B",
            "scale.hyperparameters=step_law",
        ]
    )
    size = count(job.model, "non_embedding")
    assert math.log(job.optimizer.lr) == pytest.approx(
        math.log(1.79) - 0.713 * math.log(size) + 0.307 * math.log(1e11), abs=1e-3
    )
    # 0.58 x 1e11^0.571 = 1.1 M tokens are 4,340 sequences of 256: the nearest power of two.
    assert job.global_batch_size == 4096


def test_the_typed_length_wins_over_a_file():
    """An experiment sets steps; a sweep sets tokens per parameter."""
    quick = compose_job(["experiment=quickstart", "scale.tokens_per_parameter=1"])
    assert quick.steps == math.ceil(count(quick.model, "non_embedding") / (4 * 256))
    [point] = compose_points(["sweep=ladder", "training.steps=7", "scale.parameters=1M"])
    assert point.job is not None and point.job.steps == 7
