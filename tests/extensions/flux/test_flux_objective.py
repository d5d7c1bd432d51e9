"""The objective of flow matching, its randomness, and the jobs that are refused."""

import pytest
import torch
from one_line import one_line
from torch.utils.flop_counter import FlopCounterMode

from harness.compose.composer import compose_job
from harness.model.architecture import architecture_of
from harness.tools.plan.make import make_plan
from harness.train.engine import Engine
from harness.train.objective import loader_of
from harness.train.setup import process_group
from harness.util.errors import DataError
from harness_flux.config import FlowConfig, flux_of
from harness_flux.model import Flux, unpack
from harness_flux.objective import (
    FlowLoss,
    ImageBatch,
    shift_of,
    training_flow,
    validation_flow,
)

FIXED = FlowConfig(base_shift=0.0, max_shift=0.0)


def batch_of(numbers, std=None):
    mean = torch.arange(float(len(numbers) * 16)).view(-1, 1, 4, 4)
    stds = None if std is None else torch.full_like(mean, std)
    text = torch.zeros(len(numbers), 3, 5)
    return ImageBatch(mean, stds, text, torch.zeros(len(numbers), 5), torch.tensor(numbers))


def test_inputs_and_target_are_on_the_straight_line_from_data_to_noise():
    batch = batch_of([4, 9])
    flow = training_flow(batch, FIXED, seed=1)
    velocity, noisy = (unpack(each) for each in (flow.target_BIP, flow.noisy_BIP))
    share = flow.times_B[:, None, None, None]
    torch.testing.assert_close(noisy, batch.mean_BCHW + share * velocity)
    noise = batch.mean_BCHW + velocity
    assert abs(float(noise.mean())) < 1 and 0.5 < float(noise.std()) < 1.5


def test_values_depend_on_the_seed_and_the_samples_number_only():
    both = training_flow(batch_of([4, 9], std=0.5), FIXED, seed=1)
    alone = training_flow(batch_of([4, 9], std=0.5).each(lambda tensor: tensor[1:]), FIXED, seed=1)
    assert both.times_B[1:].equal(alone.times_B) and both.noisy_BIP[1:].equal(alone.noisy_BIP)
    other = training_flow(batch_of([4, 10], std=0.5), FIXED, seed=1)
    seeded = training_flow(batch_of([4, 9], std=0.5), FIXED, seed=2)
    for changed in (other, seeded):
        assert not changed.noisy_BIP[1].equal(both.noisy_BIP[1])
    assert other.noisy_BIP[0].equal(both.noisy_BIP[0]) and not seeded.times_B.equal(both.times_B)


def test_posterior_is_sampled_in_training_only():
    def noise_free(flow):
        """The latents that were mixed with noise: noisy - time * (noise - latents)."""
        return flow.noisy_BIP - flow.times_B[:, None, None] * flow.target_BIP

    exact = noise_free(training_flow(batch_of([7]), FIXED, seed=0))
    sampled = noise_free(training_flow(batch_of([7], std=0.5), FIXED, seed=0))
    assert 0.2 < float((sampled - exact).std()) < 1
    validated = noise_free(validation_flow(batch_of([7], std=0.5), seed=0))
    torch.testing.assert_close(validated, exact)


def test_times_are_logit_normal_and_shifted():
    numbers = list(range(4000))
    batch = ImageBatch(
        torch.zeros(4000, 1, 2, 2), None, *torch.zeros(2, 4000, 1, 1), torch.tensor(numbers)
    )
    config = FlowConfig(time_mean=0.3, time_std=0.8, base_shift=0.0, max_shift=0.0)
    logits = training_flow(batch, config, seed=0).times_B.logit()
    assert float(logits.mean()) == pytest.approx(0.3, abs=0.05)
    assert float(logits.std()) == pytest.approx(0.8, abs=0.05)
    # t' / (1 - t') = e^s t / (1 - t)
    shifted = training_flow(
        batch, FlowConfig(0.3, 0.8, base_shift=0.7, max_shift=0.7), seed=0
    ).times_B
    torch.testing.assert_close(shifted.logit(), logits + 0.7, rtol=1e-3, atol=1e-3)


def test_shift_is_that_of_diffusers():
    pipeline = pytest.importorskip("diffusers.pipelines.flux.pipeline_flux")
    for tokens in (64, 256, 1024, 4096, 9216):
        expected = pipeline.calculate_shift(tokens, 256, 4096, 0.5, 1.15)
        assert shift_of(FlowConfig(), tokens) == pytest.approx(expected)


def test_loss_is_a_mean_over_values_and_the_denominators_tokens():
    predicted, target = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    loss = FlowLoss()
    loss.denominator = 6.0
    expected = torch.nn.functional.mse_loss(predicted, target)
    torch.testing.assert_close(loss(predicted, target), expected)


SMALL = (
    "model=flux_debug",
    "data=latents_synthetic",
    "training.seq_len=32",
    "training.global_batch_size=4",
)


def test_captions_are_dropped_by_the_samples_number():
    job = compose_job([*SMALL, "training.objective_options.caption_dropout=0.5"])
    loader = loader_of(job, None, range(4))
    texts = torch.cat([loader.next().text_BLD for _ in range(16)])
    [empty] = {
        tuple(text.flatten().tolist())
        for text in texts
        if (texts == text).all(-1).all(-1).sum() > 1
    }
    dropped = [tuple(text.flatten().tolist()) == empty for text in texts]
    assert 16 < sum(dropped) < 48
    part = loader_of(job, None, range(2, 4))
    assert torch.cat([part.next().text_BLD for _ in range(2)]).equal(texts[[2, 3, 6, 7]])
    validation = loader_of(job, None, range(4), "validation")
    assert not any(tuple(t.flatten().tolist()) == empty for t in validation.next().text_BLD)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"pooled_BP": (4, 64)},
            "pooled_dim is 32, and the data has 64; would work: model.options.poo",
        ),
        (
            {"text_BLD": (4, 8, 64), "mean_BCHW": (4, 16, 12, 8)},
            "text_length is 16, and the data has 8; would work: model.options.text_length=8",
        ),
    ],
)
def test_data_of_another_shape_is_one_line(changed, message):
    job, device = compose_job([*SMALL, "cluster.device=cpu"]), torch.device("cpu")
    with process_group(job, device):
        engine = Engine(job, device)
        batch = loader_of(job, None, engine.rows).next()
        other = batch._replace(
            **{name: torch.zeros(shape) for name, shape in changed.items()}, std_BCHW=None
        )
        with one_line(DataError, rf"^model\.options\.{message}"):
            engine.evaluate(other)


def test_flops_are_those_that_torch_counts():
    job = compose_job(list(SMALL))
    model, tokens = job.model, job.training.seq_len
    with torch.device("meta"):
        part = Flux(model, tokens)
        image = torch.zeros(1, 16, flux_of(model).token_width)
        text = torch.zeros(1, 16, flux_of(model).context_dim)
        with FlopCounterMode(display=False) as counter:
            part(
                image, text, torch.zeros(1, flux_of(model).pooled_dim), torch.zeros(1)
            ).sum().backward()
    counted = architecture_of(model).account(model, tokens).flops_per_token_full * tokens
    # The inputs' gradients of the first linears are not computed; attention's backward recomputes scores.
    assert counter.get_total_flops() == pytest.approx(counted, rel=0.02)


def test_the_planned_time_of_a_picture_grows_with_its_tokens():
    """The published model on 16 GPUs: more pixels take more time, and MFU stays possible."""
    gpus = ("parallelism=fsdp", "parallelism.dp_shard=16", "cluster=slurm_h100", "cluster.nodes=2")
    costs = ("precision=bf16", "compile=on", "activation_checkpoint=full", "data=latents_synthetic")
    batch = ("training.local_batch_size=4", "training.global_batch_size=64")
    times = []
    for tokens in (256, 1024, 4096):
        typed = ["model=flux_dev", f"training.seq_len={512 + tokens}", *gpus, *costs, *batch]
        speed = make_plan(compose_job(typed)).speed
        assert speed is not None and speed.mfu is not None and 0.1 < speed.mfu < 0.6
        times.append(speed.step_seconds)
    assert times == sorted(set(times))
