"""Sampling against diffusers' FluxPipeline: the same latents from the same noise and embeddings."""

from types import SimpleNamespace

import pytest
import torch
from cases import words
from test_flux_exchange import inputs, ours, small, theirs
from tiny_flux import SMALL

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.train.engine import Engine
from harness_flux.config import FlowConfig, SamplingConfig, flow_of
from harness_flux.objective import normals
from harness_flux.pictures.encoders import Embeddings
from harness_flux.sampling import NOISE as PURPOSE
from harness_flux.sampling import sample_latents

diffusers = pytest.importorskip("diffusers")
NOISE = (2, 4, 8, 8)
STEPS = 5


def scheduler(shifted):
    """The scheduler of FLUX.1-dev, or of FLUX.1-schnell (scheduler_config.json of the repositories)."""
    return diffusers.FlowMatchEulerDiscreteScheduler(
        shift=3.0 if shifted else 1.0,
        use_dynamic_shifting=shifted,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )


@pytest.mark.parametrize(("guidance", "shifted", "cfg"), [(True, True, 1.0), (False, False, 2.5)])
def test_latents_are_those_of_the_pipeline(guidance, shifted, cfg, tmp_path):
    model = small(guidance)
    reference = theirs(model).eval()
    reference.save_pretrained(tmp_path)
    noise, drawn, other = torch.randn(NOISE), inputs(model, (2, 2)), inputs(model, (2, 2), seed=2)
    captions = Embeddings(drawn["text"], drawn["pooled"])
    empty = Embeddings(other["text"][:1], other["pooled"][:1])
    absent = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    pipeline = diffusers.FluxPipeline(scheduler=scheduler(shifted), transformer=reference, **absent)
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        prompt_embeds=captions.text_BLD,
        pooled_prompt_embeds=captions.pooled_BP,
        negative_prompt_embeds=empty.text_BLD.expand(2, -1, -1),
        negative_pooled_prompt_embeds=empty.pooled_BP.expand(2, -1),
        true_cfg_scale=cfg,
        latents=pipeline._pack_latents(noise, *noise.shape),
        height=NOISE[2] * 8,
        width=NOISE[3] * 8,
        num_inference_steps=STEPS,
        guidance_scale=3.5,
        output_type="latent",
    ).images
    expected = pipeline._unpack_latents(expected, NOISE[2] * 8, NOISE[3] * 8, 8)
    one_rank = SimpleNamespace(size=lambda axis: 1)
    settings = SamplingConfig(steps=STEPS, guidance=3.5, cfg=cfg, shift=shifted)
    part = ours(tmp_path, model)
    found = sample_latents(part, one_rank, FlowConfig(), settings, noise, captions, empty)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def sampled(job_json):
    """Sample on this rank with initial weights."""
    job = Job.from_json(job_json)
    engine = Engine(job, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    noise = normals(PURPOSE, 7, [4, 9], (16, 8, 8), torch.device("cpu"))
    captions = Embeddings(
        torch.randn(2, 8, 16, generator=generator), torch.randn(2, 16, generator=generator)
    )
    settings = SamplingConfig(steps=3)
    latents = sample_latents(engine.parts[0], engine.mesh, flow_of(job), settings, noise, captions)
    assert not any(p.isnan().any() for p in engine.parameters)
    return latents.flatten(1).tolist()


LAYOUTS = {
    "fsdp": ("parallelism=fsdp", "parallelism.dp_shard=2"),
    "tp_cp": tuple(
        words("""
        parallelism=tp parallelism.tp=2 parallelism.cp=2 parallelism.cp_method=ulysses
        parallelism.sequence_parallel=true
    """)
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_sample_the_same(pool, name):
    job = compose_job([*SMALL, *LAYOUTS[name]])
    [alone] = pool.run(1, sampled, compose_job([*SMALL]).to_json())
    for found in pool.run(job.world_size, sampled, job.to_json()):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(alone), rtol=1e-4, atol=1e-4)


def test_noise_depends_on_seed_and_number():
    device = torch.device("cpu")
    first, second = normals(PURPOSE, 1, [3, 5], (2, 4), device)
    assert torch.equal(normals(PURPOSE, 1, [5], (2, 4), device)[0], second)
    assert not torch.equal(first, second) and not torch.equal(
        first, normals(PURPOSE, 2, [3], (2, 4), device)[0]
    )
