"""muP against an independent implementation of its published tables, over widths and architectures."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
import yaml
from families_table import PLAIN, changed, set_fields
from jobs import batches_of, tiny
from plain_llama import frequencies, logits

from harness.compose.resolve import resolve
from harness.config.fields import with_value
from harness.config.job import Job
from harness.config.optimizer import KINDS, LR_SCALES, OptimizerConfig
from harness.model.spec import Split, tensors
from harness.optimizer import settings
from harness.optimizer.settings import check_mup, tensor_settings
from harness.parallelism.materialize import draw
from harness.train.engine import Engine
from harness.train.setup import process_group, set_up_process
from harness.train.step import HOST
from harness.util.errors import ConfigError

BASE = set_fields(PLAIN, dim=32, n_heads=4, n_kv_heads=2, head_dim=8, ffn_hidden_dim=64, n_layers=2)


def wider(factor, head_dim=8, **fields):
    """The base model with ``factor`` times its width, in muP."""
    model = set_fields(BASE, **fields).at_width(32 * factor)
    model = with_value(with_value(model, "mup.base_dim", 32), "head_dim", head_dim)
    return set_fields(
        with_value(model, "mup.base_widths", {"head_dim": 8} if head_dim != 8 else {})
    )


def published(parameters, tokens, config, factor):
    """Logits of a Llama in muP, by the tables of arXiv:2203.03466: scores / d, logits / fan_in.

    d and fan_in are relative to those of the base model, whose scores have the factor 1 / sqrt(8).
    """
    width = config.head_width
    of_pairs, scale = frequencies(10000.0, width), math.sqrt(8) / width
    return logits(parameters, tokens, config.n_layers, of_pairs, scale=scale) / factor


LR, DECAY, EPS, BETAS = 0.01, 0.3, 1e-6, (0.9, 0.95)
STEP = (f"optimizer.lr={LR}", f"optimizer.weight_decay={DECAY}", f"optimizer.eps={EPS}")


@pytest.mark.parametrize(
    ("factor", "head_dim", "tied"), [(2, 8, False), (8, 8, True), (4, 16, False)]
)
def test_two_steps_are_those_of_the_published_tables(factor, head_dim, tied):
    """Loss, gradients and updates, with AdamW written from the tables: hidden matrices at lr / fan_in."""
    model = wider(factor, head_dim, tied_embeddings=tied)
    sizes = ("training.seq_len=16", "training.global_batch_size=2", "training.max_norm=0")
    job = tiny(
        *STEP, *sizes, "schedule=constant", "schedule.warmup_steps=0", "model.vocab_size=320"
    )
    job = resolve(
        dataclasses.replace(job, model=dataclasses.replace(model, vocab_size=320)), gpus=0
    )
    set_up_process(job)
    with process_group(job, HOST):
        engine = Engine(job, HOST)
        loader = batches_of(job, engine.rows)
        ours = dict(engine.named_parameters())
        theirs = {name: value.detach().clone().requires_grad_() for name, value in ours.items()}
        groups = []
        for name, value in theirs.items():
            # Fan-in relative to the base model's: w2 has ffn_hidden_dim inputs, wo n_heads * head_dim.
            fan_in = factor * head_dim // 8 if name.endswith("wo.weight") else factor
            hidden = name.startswith("layers.") and "norm" not in name
            decays = DECAY * (fan_in if hidden else 1) if "norm" not in name else 0.0
            groups.append(
                {"params": [value], "lr": LR / (fan_in if hidden else 1), "weight_decay": decays}
            )
        adam = torch.optim.AdamW(groups, betas=BETAS, eps=EPS / factor)
        for _ in range(2):
            batch = loader.next()
            outcome = engine.gradients(batch)
            found = published(theirs, batch.inputs_BT, model, factor)
            loss = F.cross_entropy(found.flatten(0, 1), batch.labels_BT.flatten())
            adam.zero_grad()
            loss.backward()
            assert outcome.loss == pytest.approx(loss.item(), rel=1e-5)
            for name, value in theirs.items():
                torch.testing.assert_close(
                    ours[name].grad, value.grad, rtol=1e-3, atol=1e-7, msg=name
                )
            engine.update(outcome.norm)
            adam.step()
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("factor", [1, 4])
@pytest.mark.parametrize(
    ("name", "std"),
    [
        # std of the base model, exponent of the width (table 8: hidden 1 / sqrt(fan_in), others constant)
        ("tok_embeddings.weight", 1.0),
        ("output.weight", 32**-0.5),
        ("layers.1.attention.wq.weight", 0.02),
        ("layers.1.feed_forward.w2.weight", 0.01),
    ],
)
def test_initial_values_have_the_published_spread(name, std, factor):
    model = wider(factor)
    spec = tensors(model)[name]
    values = draw(name, spec.shape, spec.init, 1, torch.device("cpu"))
    expected = std / math.sqrt(factor) if name.startswith("layers.") else std
    # Truncation at three standard deviations shrinks the output projection's by 1.3 %.
    assert values.std().item() == pytest.approx(expected, rel=0.05)


def test_at_the_base_width_both_parametrizations_are_the_same():
    standard, mup = set_fields(BASE), wider(1)
    assert tensors(mup) == tensors(standard)
    assert mup.output_multiplier == 1 and mup.score_scale == standard.score_scale
    config = OptimizerConfig(kind="muon")
    for name, tensor in tensors(mup).items():
        assert tensor_settings(config, tensor) == tensor_settings(config, tensors(standard)[name])


SETTINGS = {
    # Model, and expected factor of the learning rate: names.
    "latent attention and experts": (
        changed("deepseek_v3_debug", mup__base_dim=16),
        """
        1:     tok_embeddings.weight output.weight layers.1.attention.q_norm.weight layers.1.moe.router.weight
        0.25:  layers.1.attention.wq_a.weight layers.1.attention.wq_b.weight layers.1.attention.wkv_b.weight
            layers.1.attention.wo.weight layers.0.feed_forward.w2.weight layers.1.moe.experts.w1
            layers.1.moe.experts.w2 layers.1.moe.shared_experts.w3.weight
        """,
    ),
    "widths that are not proportional": (
        changed(
            "qwen3_moe_debug",
            tied_embeddings=True,
            mup__base_dim=16,
            # Experts of the same width, half of the heads; 8 x 16 inputs of wo against 4 x 8.
            mup__base_widths={"moe.hidden_dim": 32, "n_heads": 4, "n_kv_heads": 4, "head_dim": 8},
        ),
        """
        1:     tok_embeddings.weight layers.1.moe.experts.w2
        0.25:  layers.1.attention.wk.weight layers.1.attention.wo.weight layers.1.moe.experts.w3
        """,
    ),
    "biases and sinks": (
        changed("gpt_oss_debug", mup__base_dim=32),
        """
        1:     layers.0.attention.wq.bias layers.0.attention.sinks
            layers.0.moe.experts.b1 layers.0.moe.router.bias
        """,
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_learning_rates_by_role(case):
    model, expected = SETTINGS[case]
    config = OptimizerConfig(weight_decay=0.1)
    for factor, names in yaml.safe_load(expected).items():
        for name in names.split():
            found = tensor_settings(config, tensors(model)[name])
            assert found.lr_factor == pytest.approx(factor), name
            # The fraction by which values shrink per step does not depend on the width.
            decay = 0.0 if tensors(model)[name].is_vector else 0.1
            assert found.lr_factor * found.weight_decay == pytest.approx(decay), name


@pytest.mark.parametrize("scale", LR_SCALES)
def test_updates_of_muon_meet_the_spectral_condition(scale):
    """The norm of an update, lr * lr_factor * scale, is proportional to sqrt(outputs / inputs)."""
    config = OptimizerConfig(kind="muon", lr_scale=scale)
    norms = {}
    for factor in (1, 2, 8):
        for name, tensor in tensors(wider(factor)).items():
            if tensor.is_hidden_matrix:
                norm = tensor_settings(config, tensor).lr_factor * LR_SCALES[scale](*tensor.shape)
                norms.setdefault(name, []).append(norm / math.sqrt(tensor.outputs / tensor.inputs))
    assert len(norms) == 2 * 7
    for name, found in norms.items():
        assert found == pytest.approx([found[0]] * 3), name


def test_a_group_changes_the_rate_and_decay_of_its_tensors_at_every_width():
    group = {"match": r"w1\.weight", "lr_factor": 0.5, "weight_decay": 0.4}
    config = OptimizerConfig(groups=[group])
    tensor = tensors(wider(4))["layers.0.feed_forward.w1.weight"]
    found = tensor_settings(config, tensor)
    assert (found.lr_factor, found.weight_decay) == (0.5 / 4, 0.4 * 4)


def test_every_output_is_found():
    """Logits and router logits have the multiplier; no other matrix has a constant initial spread."""
    model = changed("deepseek_v3_debug", mup__base_dim=16)
    base = tensors(model.base)
    same = {
        name
        for name, each in tensors(model).items()
        if each.is_matrix and each.init == base[name].init
    }
    routers = {name for name, each in tensors(model).items() if each.split is Split.ROUTER}
    assert same == {"output.weight"} | routers and len(routers) == 3


def test_an_optimizer_without_a_rule_is_refused(monkeypatch):
    monkeypatch.setattr(settings, "KINDS", {"adamw": dataclasses.replace(KINDS["adamw"], mup=None)})
    with pytest.raises(ConfigError, match="no rule of muP is known for"):
        check_mup(OptimizerConfig(), 32, tensors(wider(2)).values())


def test_jobs_without_mup_keep_their_ids():
    """The published ids of jobs do not cover fields at their defaults; with muP the numerics differ."""
    standard, mup = tiny(), tiny("model.mup.base_dim=32")
    plain = standard.to_dict()
    del plain["model"]["mup"]
    assert Job.from_stored(plain).id == standard.id
    assert mup.numerics_id != standard.numerics_id
