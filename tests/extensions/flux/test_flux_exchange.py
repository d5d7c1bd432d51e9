"""Flux against diffusers' FluxTransformer2DModel: outputs, gradients, parameter counts and files."""

import dataclasses
import json

import pytest
import torch
from cases import words
from equal import assert_equal
from held import Held
from safetensors.torch import load_file

from harness.compose.composer import compose_job
from harness.config.model import ModelConfig
from harness.model.accounting import account
from harness.model.spec import tensor_shapes
from harness.util.errors import UserError
from harness.weights.config_json import model_from_config
from harness.weights.detect import find_source, open_source
from harness.weights.huggingface import HuggingFaceSource, write_huggingface
from harness_flux.config import flux_of
from harness_flux.model import Flux, pack, unpack

diffusers = pytest.importorskip("diffusers")
SMALL = tuple(
    words("""
    model=flux_debug data=latents_synthetic training.seq_len=25 model.options.text_length=9
    model.dim=32 model.n_heads=2 model.n_kv_heads=2 model.ffn_hidden_dim=128
    model.options.axes_dims=[4,6,6] model.options.time_dim=256 model.options.latent_channels=4
""")
)
PUBLISHED = {"flux_schnell": 11_891_178_560, "flux_dev": 11_901_408_320}
"""Parameters of diffusers' model built with the config.json of each repository."""


def small(guidance):
    job = compose_job([*SMALL, f"model.options.guidance={str(guidance).lower()}"])
    return job.model


def theirs(model):
    """diffusers' model with random weights, also where it starts with zeros or ones."""
    flux = flux_of(model)
    torch.manual_seed(0)
    built = diffusers.FluxTransformer2DModel(
        in_channels=flux.token_width,
        num_layers=flux.double_layers,
        num_single_layers=model.n_layers - flux.double_layers,
        attention_head_dim=model.head_width,
        num_attention_heads=model.n_heads,
        joint_attention_dim=flux.context_dim,
        pooled_projection_dim=flux.pooled_dim,
        guidance_embeds=flux.guidance,
        axes_dims_rope=tuple(flux.axes_dims),
    )
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(std=0.2)
    return built


def ours(folder, model):
    part = Flux(model, 25)
    source = open_source(find_source(str(folder)), model)
    part.load_state_dict({name: source.read(name) for name in source.tensors})
    return part


def inputs(model, grid, seed=1):
    flux, generator = flux_of(model), torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "image": draw(2, grid[0] * grid[1], flux.token_width),
        "text": draw(2, flux.text_length, flux.context_dim),
        "pooled": draw(2, flux.pooled_dim),
        "times": torch.tensor([0.2, 0.85]),
        "guidance": torch.tensor([3.5, 1.0]),
        "target": draw(2, grid[0] * grid[1], flux.token_width),
    }


@pytest.mark.parametrize("guidance", [False, True])
def test_output_and_gradients_equal_diffusers(guidance, tmp_path):
    model, grid = small(guidance), (4, 4)
    reference = theirs(model)
    reference.save_pretrained(tmp_path)
    part = ours(tmp_path, model)
    x = inputs(model, grid)
    guided = x["guidance"] if guidance else None
    expected = reference(
        hidden_states=x["image"],
        encoder_hidden_states=x["text"],
        pooled_projections=x["pooled"],
        timestep=x["times"],
        guidance=guided,
        img_ids=diffusers.FluxPipeline._prepare_latent_image_ids(
            1, *grid, torch.device("cpu"), torch.float32
        ),
        txt_ids=torch.zeros(flux_of(model).text_length, 3),
        return_dict=False,
    )[0]
    found = part(x["image"], x["text"], x["pooled"], x["times"], guided)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for output in (expected, found):
        (output - x["target"]).square().mean().backward()

    # Gradients have the names of their weights.
    gradients = {name: parameter.grad.clone() for name, parameter in part.named_parameters()}
    write_huggingface(Held(gradients), model, None, tmp_path / "gradients")
    converted = load_file(tmp_path / "gradients" / "diffusion_pytorch_model.safetensors")
    assert converted.keys() == dict(reference.named_parameters()).keys()
    for name, parameter in reference.named_parameters():
        difference = (converted[name] - parameter.grad).norm() / parameter.grad.norm()
        assert difference < 1e-4, (name, difference)


def test_files_of_diffusers_both_ways(tmp_path):
    model = small(guidance=True)
    reference = theirs(model)
    reference.save_pretrained(tmp_path / "theirs")
    read = model_from_config(str(tmp_path / "theirs"))
    # What config.json does not have is assumed: lengths, and the width of the feed-forward.
    assumed = {"name", "path", "max_seq_len"}
    differing = {
        field.name
        for field in dataclasses.fields(ModelConfig)
        if getattr(read, field.name) != getattr(model, field.name)
    }
    assert differing - assumed <= {"options", "norm_eps"} and flux_of(read).text_length == 512
    source = HuggingFaceSource(tmp_path / "theirs", model)
    write_huggingface(source, model, None, tmp_path / "ours", max_shard_gb=1e-4)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    again = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path / "ours")
    assert_equal(again.state_dict(), reference.state_dict())
    reread = HuggingFaceSource(tmp_path / "ours", model)
    assert all(reread.read(name).equal(source.read(name)) for name in source.tensors)


def test_a_model_that_diffusers_does_not_have_is_refused(tmp_path):
    reference = theirs(small(guidance=False))
    reference.save_pretrained(tmp_path)
    wide = dataclasses.replace(small(guidance=False), ffn_hidden_dim=96)
    with pytest.raises(
        Exception, match=r"model.ffn_hidden_dim=96: diffusers' Flux has 128; .* 128"
    ):
        HuggingFaceSource(tmp_path, wide)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"num_layers": 5}))
    with pytest.raises(
        UserError, match=r"model.options.double_layers=2: config.json has num_layers 5"
    ):
        HuggingFaceSource(tmp_path, small(guidance=False))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters(name):
    """The count of the YAML is that of diffusers' model, and that of the modules."""
    seq_len = {"flux_schnell": 256, "flux_dev": 512}[name] + 1024
    job = compose_job([f"model={name}", "data=latents_synthetic", f"training.seq_len={seq_len}"])
    with torch.device("meta"):
        reference = diffusers.FluxTransformer2DModel(guidance_embeds=flux_of(job.model).guidance)
        built = Flux(job.model, job.training.seq_len)
    counts = [sum(p.numel() for p in each.parameters()) for each in (reference, built)]
    assert {account(job.model, job.training.seq_len).parameters, *counts} == {PUBLISHED[name]}
    assert {n: tuple(p.shape) for n, p in built.named_parameters()} == tensor_shapes(job.model)


def test_packing_is_the_pipelines():
    latents = torch.randn(2, 3, 4, 4)
    packed = diffusers.FluxPipeline._pack_latents(latents, 2, 3, 4, 4)
    assert pack(latents).equal(packed) and unpack(packed).equal(latents)
