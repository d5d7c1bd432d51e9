"""Encoders against diffusers' FluxPipeline, which uses the same models."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from one_line import one_line
from tiny_flux import LENGTH, POOLED, WIDTH, save_encoders

from harness.config.data import DataConfig
from harness.util.errors import ConfigError
from harness_flux.pictures.config import PictureOptions
from harness_flux.pictures.encoders import (
    Patches,
    Words,
    as_bytes,
    as_floats,
    build_autoencoder,
    build_text_encoder,
    fingerprint_of,
)

diffusers = pytest.importorskip("diffusers")
CPU = torch.device("cpu")
CAPTIONS = ["a red circle", "", "a blue square above a green circle a a a a a a a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_encoders(tmp_path_factory.mktemp("flux"))


def config_of(folder, **changed):
    vae, t5, clip = (str(folder / name) for name in ("vae", "text_encoder_2", "text_encoder"))
    config = PictureOptions(
        autoencoder=vae, text="t5_clip", t5=t5, clip=clip, text_length=LENGTH, dtype="float32"
    )
    return replace(config, **changed)


def pipeline_of(folder):
    """FluxPipeline with the encoders, and without a model."""
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKL.from_pretrained(folder / "vae"),
        text_encoder=transformers.CLIPTextModel.from_pretrained(folder / "text_encoder"),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder / "tokenizer"),
        text_encoder_2=transformers.T5EncoderModel.from_pretrained(folder / "text_encoder_2"),
        tokenizer_2=transformers.AutoTokenizer.from_pretrained(folder / "tokenizer_2"),
        transformer=None,
    )


def test_encoders_are_those_of_the_pipeline(folder):
    config, pipeline = config_of(folder), pipeline_of(folder)
    autoencoder = build_autoencoder(config, CPU)
    found = build_text_encoder(config, CPU).encode(CAPTIONS)
    with torch.no_grad():
        text, pooled, _ = pipeline.encode_prompt(CAPTIONS, CAPTIONS, max_sequence_length=LENGTH)
    assert found.text_BLD.shape == (3, LENGTH, WIDTH) and found.pooled_BP.shape == (3, POOLED)
    torch.testing.assert_close(found.text_BLD, text)
    torch.testing.assert_close(found.pooled_BP, pooled)

    pictures = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
    moments, vae = autoencoder.encode(as_floats(pictures)), pipeline.vae
    with torch.no_grad():
        pixels = pipeline.image_processor.preprocess(pictures.astype(np.float32) / 255)
        posterior = vae.encode(pixels).latent_dist
        scaled = [(each - 0.12) * 0.36 for each in (posterior.mean, posterior.mean + posterior.std)]
        decoded = vae.decode(moments.mean_BCHW / 0.36 + 0.12).sample
    assert moments.std_BCHW is not None and autoencoder.pixels == 2
    torch.testing.assert_close(moments.mean_BCHW, scaled[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        moments.mean_BCHW + moments.std_BCHW, scaled[1], rtol=1e-4, atol=1e-5
    )
    shown = pipeline.image_processor.postprocess(decoded, output_type="np")
    written = as_bytes(autoencoder.decode(moments.mean_BCHW))
    assert np.abs(written - shown * 255).max() <= 0.51  # rounded


def encoded_shards(folder):
    config = config_of(Path(folder))
    encoder = build_text_encoder.__wrapped__(config, CPU)
    blocks = encoder._models["t5"].encoder.block
    weights = list(blocks.parameters())
    embeddings = encoder.encode(CAPTIONS)
    local = sum(each.to_local().numel() for each in weights)
    return list(embeddings), local, sum(each.numel() for each in weights)


def test_ranks_share_the_weights_of_text_encoders(pool, folder):
    expected = build_text_encoder(config_of(folder), CPU).encode(CAPTIONS)
    for found, local, total in pool.run(2, encoded_shards, str(folder)):
        assert local <= 0.6 * total
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_encoders_for_debugging():
    pixels = torch.rand(2, 3, 8, 8) * 2 - 1
    patches = Patches(4)
    latents = patches.encode(pixels).mean_BCHW
    assert latents.shape == (2, patches.channels, 2, 2)
    assert torch.equal(patches.decode(latents), pixels)
    text, pooled = Words(4, 32).encode(
        ["red circle above", "circle red above", "red circle above the sun"]
    )
    assert torch.equal(text[0, :3], text[2, :3]) and not torch.equal(text[0, 3], text[2, 3])
    assert not torch.equal(text[0, 0], text[1, 0])
    # A word's vector and a position's are added.
    torch.testing.assert_close(text[0, 0] + text[0, 1], text[1, 0] + text[1, 1])
    torch.testing.assert_close(pooled, text.mean(1))
    [again], _ = Words(4, 32).encode(["Red  circle above the sun"])
    assert torch.equal(again, text[2])


def test_folders_that_cannot_be_loaded(folder, tmp_path):
    with one_line(ConfigError, r"^data.options.t5=.*: there is no such folder"):
        build_text_encoder(config_of(folder, t5=str(tmp_path / "none")), CPU)
    with one_line(ConfigError, r"^data.options.autoencoder=.*: cannot be loaded"):
        build_autoencoder(config_of(folder, autoencoder=str(tmp_path)), CPU)
    shutil.copytree(folder / "vae", tmp_path / "vae")
    data = DataConfig("latents", {"autoencoder": str(tmp_path / "vae")})
    before = fingerprint_of(data)
    assert fingerprint_of(data) == before
    (tmp_path / "vae" / "config.json").write_text("{}")
    assert fingerprint_of(data) != before
