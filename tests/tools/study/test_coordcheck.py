"""The coordinate check: power laws are found, muP passes, the standard parametrization and mistakes fail."""

import json
import math

import pytest
import torch
from cases import rows

from harness.compose.composer import compose_job
from harness.optimizer import settings
from harness.tools.study.activations import Activation, recorded
from harness.tools.study.coordcheck import (
    EXIT_DRIFTS,
    GROWS,
    STEADY,
    CoordCheckJob,
    coordcheck,
    judge,
)
from harness.util.errors import EXIT_OK

SMALL = (
    "model=llama3_tiny",
    "model.n_layers=2",
    "data=synthetic",
    "tokenizer=bytes",
    "cluster.device=cpu",
    "training.seq_len=32",
    "training.global_batch_size=1",
    "training.steps=4",
    "coordcheck.widths=[64,128,256]",
)


def composed(*overrides):
    return compose_job([*SMALL, *overrides], config_name="coordcheck", schema=CoordCheckJob)


def checked(out, *overrides):
    """The check of a small model."""
    return coordcheck(composed(*overrides, f"coordcheck.out={out}"), [])


def words(result):
    return {each["module"]: each["word"] for each in result.data["modules"]}


def test_mup_passes_and_the_standard_parametrization_fails(tmp_path):
    found = checked(tmp_path / "mup", "model.mup.base_dim=64")
    assert found.code == EXIT_OK, found.text
    assert set(words(found).values()) == {STEADY} and len(words(found)) == 2 + 4 * 2
    assert "10 of 10 modules are steady (muP, base width 64; bound 0.25)" in found.text
    standard = checked(tmp_path / "standard")
    assert standard.code == EXIT_DRIFTS
    growing = {module for module, word in words(standard).items() if word == GROWS}
    assert growing == words(standard).keys() - {"tok_embeddings"}
    for folder in ("mup", "standard"):
        assert (tmp_path / folder / "coordcheck.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "mup" / "coordcheck.json").read_text())
    assert written["steady"] == 10 and len(written["activations"]) == 10 * 3 * 5


def test_a_wrong_learning_rate_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "_mup_factor", lambda *_: 1.0)
    found = checked(tmp_path, "model.mup.base_dim=64", "coordcheck.widths=[64,256]")
    assert found.code == EXIT_DRIFTS and words(found)["layers.1"] == GROWS


def made(kind, exponent, change, steps=2):
    """Activations of a module that follow powers of the width; at step 0 there is no change."""
    return [
        Activation("layers.0", kind, width, step, width**exponent, width**change * step)
        for width in (64, 128, 256)
        for step in range(steps + 1)
    ]


@pytest.mark.parametrize(
    ("kind", "exponent", "change", "word"),
    # Initial logits may vanish, and so may changes of logits, as the root of the width.
    rows("""
        residual stream   0.0    0.0  steady
        residual stream   0.2   -0.2  steady
        residual stream  -0.5    0.0  steady
        residual stream   0.5    0.0  grows
        residual stream   0.0    1.0  grows
        residual stream   0.0   -0.5  vanishes
        residual stream  .nan    0.0  undefined
        logits            0.0   -0.7  steady
        logits            0.0   -0.8  vanishes
        logits            0.0    0.3  grows
    """),
)
def test_power_laws_are_found(kind, exponent, change, word):
    [verdict] = judge(made(kind, exponent, change), 0.25)
    assert verdict.word == word
    if not math.isnan(exponent):
        assert (verdict.slope, verdict.change_slope) == pytest.approx((exponent, change))


def test_growth_at_one_step_is_found():
    activations = [
        Activation("output", "logits", width, step, width if step == 1 else 1.0, 1.0)
        for width in (64, 256)
        for step in range(4)
    ]
    [verdict] = judge(activations, 0.25)
    assert (verdict.word, verdict.step) == (GROWS, 1) and verdict.slope == pytest.approx(1)


def test_recorded_values_are_those_of_the_modules():
    """Attention scores and router logits, which no module returns, against their definitions."""
    from families_table import batch, changed, random_model

    decoder = random_model(changed("qwen3_moe_debug", mup__base_dim=16))
    tokens, _ = batch(decoder.config)
    inputs = {}
    attention, router = decoder.blocks[0].attention, decoder.mixtures[0].router
    attention.inner.register_forward_hook(lambda _, given, __: inputs.update(scores=given))
    router.register_forward_hook(lambda _, given, __: inputs.update(router=given))
    with torch.no_grad(), recorded(decoder) as recordings:
        logits = decoder(tokens)
    values = {name: found[0] for (name, _), found in recordings.items()}
    q, k = inputs["scores"][:2]
    head = (
        q[:, :, 5] @ k[:, :, 2].transpose(1, 2) * 16**-0.5
    )  # query head 5 of 8 reads key head 2 of 4
    torch.testing.assert_close(values["layers.0.attention.scores"][:, 5], head)
    expected = inputs["router"][0].flatten(0, 1) @ router.weight.T / 4
    torch.testing.assert_close(values["layers.0.moe.router"], expected)
    torch.testing.assert_close(values["output"], logits)
    assert len(values) == 2 + 5 * decoder.config.n_layers
