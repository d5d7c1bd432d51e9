"""QK-clip: logits afterwards by full matrices in float64, dropped updates, averages, and layouts."""

import json
from unittest.mock import patch

import pytest
import torch
from equal import assert_equal
from jobs import batches_of, tiny, train
from layouts import layout, require_parity
from plain_llama import frequencies, norm, rotated
from waits import waits

from harness.model.spec import tensors
from harness.optimizer.qk_clip import QKClip
from harness.train.engine import Engine
from harness.train.probe import Probe
from harness.train.setup import process_group

CPU = torch.device("cpu")
HEADS, ROWS, LENGTH = 8, 3, 20
# Below some of the largest logits of small models that have not been trained.
TAU = 0.05
SMALL = "model.n_layers=1 training.seq_len=16 training.global_batch_size=4 schedule.warmup_steps=0"
LATENTS = "model=deepseek_v3_debug"
KINDS = [
    "model.n_kv_heads=8",
    "model.n_kv_heads=4",
    "model.n_kv_heads=1",
    "model.n_kv_heads=8 model.attention.qkv_bias=true",
    "model.n_kv_heads=2 model.attention.qkv_bias=true",
    "model=deepseek_v2_debug",
    LATENTS,
]


def turned(x_BTHD):
    """Rotate heads; by any angles, because no rotation changes what a factor does."""
    pairs = frequencies(100.0, x_BTHD.shape[-1]).to(x_BTHD.dtype)
    angles = torch.arange(LENGTH).outer(pairs)[:, None]
    return rotated(x_BTHD, torch.polar(torch.ones_like(angles), angles), interleaved=False)


def plain_queries_and_keys(weights, config, x_BTC):
    """Rotated queries and keys, [B, T, H, D] each, with a key for every query head."""

    def linear(name, x):
        bias = weights.get(f"layers.0.attention.{name}.bias", 0)
        return x @ weights[f"layers.0.attention.{name}.weight"].T + bias

    of = config.attention
    if not of.is_latent:
        q, k = (
            turned(linear(name, x_BTC).unflatten(-1, (-1, config.head_dim)))
            for name in ("wq", "wk")
        )
        return q, k.repeat_interleave(HEADS // k.shape[2], dim=2)
    name, x = "wq", x_BTC
    if of.q_lora_rank is not None:
        scale = weights["layers.0.attention.q_norm.weight"]
        name, x = "wq_b", norm(linear("wq_a", x_BTC), scale)
    widths = [of.qk_nope_head_dim, of.qk_rope_head_dim]
    q, q_turned = linear(name, x).unflatten(-1, (HEADS, -1)).split(widths, -1)
    latents, k_turned = linear("wkv_a", x_BTC).split([of.kv_lora_rank, widths[1]], -1)
    latents = norm(latents, weights["layers.0.attention.kv_norm.weight"])
    k = linear("wkv_b", latents).unflatten(-1, (HEADS, -1))[..., : widths[0]]
    k_turned = turned(k_turned[:, :, None]).expand(-1, -1, HEADS, -1)
    return torch.cat((q, turned(q_turned)), -1), torch.cat((k, k_turned), -1)


def largest(weights, config, x_BTC):
    """The largest logit of every head, by the full matrix [H]."""
    q, k = plain_queries_and_keys(weights, config, x_BTC)
    logits = torch.einsum("bthd,bshd->bhts", q, k) * config.head_width**-0.5
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, -torch.inf).amax((0, 2, 3))


def random_weights(config, dtype):
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, tensor in tensors(config).items()
        if name.startswith("layers.0.attention.")
    }


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("typed", KINDS)
def test_the_largest_logit_becomes_tau(typed, dtype, tolerance):
    """Heads below it keep their weights to the bit, and so do values."""
    config = tiny(*typed.split()).model
    weights = random_weights(config, dtype)
    before = {name: weight.clone() for name, weight in weights.items()}
    generator = torch.Generator().manual_seed(4)
    x_BTC = torch.randn(ROWS, LENGTH, config.dim, generator=generator, dtype=torch.float64)
    x_BTC = x_BTC.to(dtype)
    logits_H = largest(weights, config, x_BTC)
    tau = logits_H.sort().values[HEADS // 2].item()
    clip = QKClip(tau, config, weights.items())
    clip.largest_LH = logits_H.expand(config.num_blocks, -1)
    clip.clip()
    found_H = largest(weights, config, x_BTC)
    torch.testing.assert_close(found_H, logits_H.clamp(max=tau), rtol=tolerance, atol=0)
    changed = {}
    for name, weight in weights.items():
        if not weight.equal(before[name]):
            same = weight.eq(before[name]).view(len(weight), -1)
            changed.setdefault(name.split(".")[3], []).append(~same.all(1))
    of = config.attention
    query = "wq_b" if of.q_lora_rank is not None else "wq"
    for rows in changed[query]:
        assert_equal(rows.unflatten(0, (HEADS, -1)).all(1), logits_H > tau)
    keys = {"wkv_b"} if of.is_latent else {"wk"}
    assert changed.keys() == {query} | (set() if config.n_kv_heads < HEADS else keys)
    if of.is_latent:
        [rows] = changed["wkv_b"]
        assert not rows.unflatten(0, (HEADS, -1))[:, of.qk_nope_head_dim :].any()


def test_negative_logits_change_nothing():
    config = tiny().model
    weights = random_weights(config, torch.float32)
    before = {name: weight.clone() for name, weight in weights.items()}
    clip = QKClip(0.5, config, weights.items())
    clip.largest_LH = torch.linspace(-2.0, 0.5, HEADS)[None].expand(config.num_blocks, -1)
    clip.clip()
    assert_equal(weights, before)


def weights_after(engine, batch, norm=None):
    outcome = engine.gradients(batch)
    engine.update(outcome.norm if norm is None else torch.tensor(norm))
    return {name: parameter.detach().clone() for name, parameter in engine.named_parameters()}


@pytest.fixture
def engine_of():
    """Build engines of small jobs in a process group of one rank, each with its first batch."""

    def build(*overrides):
        job = tiny(*SMALL.split(), *overrides)
        engine = Engine(job, CPU)
        return engine, batches_of(job, engine.rows).next()

    with process_group(tiny(), CPU):
        yield build


@pytest.mark.parametrize(
    "typed", ["model.n_kv_heads=8", "", f"{LATENTS} model.moe.first_dense_layers=0"]
)
def test_the_same_batch_has_tau_after_an_update(engine_of, typed):
    """If the update changes nothing; there is one layer, whose inputs stay."""
    engine, batch = engine_of(*typed.split(), "optimizer.lr=0", f"optimizer.qk_clip={TAU}")
    before_LH = Probe(engine)(batch).max_logits
    assert (before_LH > TAU).sum() >= 3
    weights_after(engine, batch)
    found_LH = Probe(engine)(batch).max_logits
    torch.testing.assert_close(found_LH, before_LH.clamp(max=TAU), rtol=1e-5, atol=0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adamw optimizer.state_dtype=8bit"])
def test_a_clip_follows_the_update(engine_of, optimizer):
    """By the logits of the weights before it; what the optimizer remembers stays."""
    typed = f"optimizer={optimizer} model.n_kv_heads=8".split()
    engine, batch = engine_of(*typed)
    logits_H = Probe(engine)(batch).max_logits[0]
    expected = weights_after(engine, batch)
    state = {name: engine.optimizer.state[p] for name, p in engine.named_parameters()}
    clipped, batch = engine_of(*typed, f"optimizer.qk_clip={TAU}")
    found = weights_after(clipped, batch)
    assert_equal(
        {name: clipped.optimizer.state[p] for name, p in clipped.named_parameters()}, state
    )
    root_H = (TAU / logits_H).clamp(max=1).sqrt()
    assert root_H.min() < 0.9
    for name in ("wq", "wk"):
        own = f"layers.0.attention.{name}.weight"
        heads = expected.pop(own).unflatten(0, (HEADS, -1))
        scaled = (heads * root_H[:, None, None]).flatten(0, 1)
        torch.testing.assert_close(found.pop(own), scaled, rtol=1e-6, atol=0)
    assert_equal(found, expected)


# An update that torch's fused kernel drops, and one that the host leaves out.
@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_a_dropped_update_has_no_clip(engine_of, implementation):
    engine, batch = engine_of(
        f"optimizer.implementation={implementation}", f"optimizer.qk_clip={TAU}"
    )
    assert engine.skips_on_device == (implementation == "fused")
    before = {name: parameter.detach().clone() for name, parameter in engine.named_parameters()}
    assert_equal(weights_after(engine, batch, norm=float("nan")), before)
    found = weights_after(engine, batch)
    assert not found["layers.0.attention.wq.weight"].equal(before["layers.0.attention.wq.weight"])


def test_the_average_is_of_clipped_weights(engine_of):
    engine, batch = engine_of("optimizer.ema_decay=0.9", f"optimizer.qk_clip={TAU}")
    found = weights_after(engine, batch)
    averages = {name: engine.optimizer.state[p]["ema"] for name, p in engine.named_parameters()}
    assert_equal(averages, found)


def test_the_interval_counts_steps_of_the_run(engine_of):
    """Also after a resume: an engine that begins with the second of two steps clips in it."""
    engine, batch = engine_of(f"optimizer.qk_clip={TAU}", "optimizer.qk_clip_interval=2")
    counts = []
    with patch.object(Probe, "__call__", autospec=True, side_effect=Probe.__call__) as measured:
        for steps in (None, None, None, 1, 3):
            if steps is not None:
                engine.set_schedule(steps)
            weights_after(engine, batch)
            counts.append(measured.call_count)
    assert counts == [0, 1, 1, 2, 3]


def test_a_compiled_run_compiles_the_pass_once(tmp_path):
    """The graphs of the pass that measures logits are expected, in whatever step it is."""
    run = train(
        tmp_path,
        *SMALL.split(),
        *("training.steps=5", "compile=on", "compile.backend=aot_eager"),
        *(f"optimizer.qk_clip={TAU}", "optimizer.qk_clip_interval=3"),
    )
    assert run.code == 0
    assert json.loads((run.folder.path / "result.json").read_text())["recompiles"] == 0


def test_a_record_of_activations_shares_the_pass(tmp_path):
    """A step that has both repeats its forward passes once."""
    with patch.object(Probe, "__call__", autospec=True, side_effect=Probe.__call__) as measured:
        run = train(
            tmp_path,
            *SMALL.split(),
            *("training.steps=4", "metrics.activations=true", "metrics.tensors_interval=1"),
            *(f"optimizer.qk_clip={TAU}", "optimizer.qk_clip_interval=2"),
        )
    assert run.code == 0
    assert measured.call_count == 4


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("fsdp", ""),
        ("tp", "model.n_kv_heads=8"),
        ("fsdp_tp", "model.attention.qkv_bias=true"),
        ("fsdp_uneven", "model.dim=48 model.n_heads=6 model.n_kv_heads=6 model.head_dim=10"),
        ("pp_1f1b", ""),
        ("cp", ""),
        ("fsdp_tp_pp_ep", LATENTS),
    ],
)
def test_layouts_agree_with_one_process(pool, name, typed):
    """Weights after five steps with Muon, a clip in each."""
    job = layout(name, *typed.split(), "optimizer=muon", "optimizer.qk_clip=0.02")
    require_parity(pool, name, job, steps=5, resume=False)


@pytest.mark.parametrize("typed", ["", LATENTS])
def test_the_host_does_not_wait(typed):
    config = tiny(*typed.split()).model
    weights = {
        name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors(config).items()
    }
    clip = QKClip(TAU, config, weights.items())
    clip.largest_LH = torch.empty(config.num_blocks, HEADS, device="meta")
    with waits() as found:
        clip.clip(dropped=torch.empty((), device="meta"))
    assert found == []
