"""The moving average of the weights: torch's own, on layouts, in checkpoints, and where it is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jobs import TINY, train
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.data.tokenizer import build_tokenizer
from harness.launch.pool import RankPool
from harness.optimizer.build import keep_average
from harness.optimizer.elementwise import Lion
from harness.run.folder import RunFolder
from harness.tools.convert import ConvertConfig, ConvertJob, convert
from harness.train.engine import Engine
from harness.train.objective import loader_of
from harness.util.errors import ConfigError
from harness.weights.detect import find_source, open_source

SMALL = (*TINY, "model.n_layers=1", "training.seq_len=16", "training.global_batch_size=4")
DECAY = 0.7
STEPS = 3
RUN = (
    "optimizer.lr=0.01",
    f"optimizer.ema_decay={DECAY}",
    f"training.steps={STEPS}",
    "schedule.warmup_steps=0",
)


def averages(job_json: str) -> dict[str, torch.Tensor]:
    """Train; return the full averages of this rank's parameters."""
    job = Job.from_json(job_json)
    engine = Engine(job, torch.device("cpu"))
    loader = loader_of(job, build_tokenizer(job.tokenizer), engine.rows)
    for _ in range(job.steps):
        engine.update(engine.gradients(loader.next()).norm)
    found = {name: engine.optimizer.state[parameter]["ema"] for name, parameter in engine.named_parameters()}
    return {
        name: getattr(each, "full_tensor", lambda each=each: each)().clone() for name, each in found.items()
    }


def judged(job_json: str) -> dict[str, torch.Tensor]:
    """Train; return torch's own average of the weights, which starts with those after the first step."""
    job = Job.from_json(job_json)
    engine = Engine(job, torch.device("cpu"))
    loader = loader_of(job, build_tokenizer(job.tokenizer), engine.rows)
    judge = AveragedModel(engine.parts[0], multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for _ in range(job.steps):
        engine.update(engine.gradients(loader.next()).norm)
        judge.update_parameters(engine.parts[0])
    return {name: p.detach().clone() for name, p in judge.module.named_parameters()}


@pytest.fixture(scope="module")
def expected(pool: RankPool) -> dict[str, torch.Tensor]:
    job = compose_job([*SMALL, *RUN, "optimizer.ema_decay=0"])
    [found] = pool.run(1, judged, job.to_json())
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, Job]:
    run = train(tmp_path_factory.mktemp("ema"), *SMALL[len(TINY) :], *RUN)
    assert run.code == 0
    return run.folder, run.job


def test_average_is_torchs(pool: RankPool, expected: dict[str, torch.Tensor]) -> None:
    [found] = pool.run(1, averages, compose_job([*SMALL, *RUN]).to_json())
    assert found.keys() == expected.keys()
    for name, average in found.items():
        torch.testing.assert_close(average, expected[name], rtol=1e-6, atol=1e-7)


def test_average_on_a_layout(pool: RankPool, expected: dict[str, torch.Tensor]) -> None:
    job = compose_job([*SMALL, *RUN, "parallelism=fsdp_tp"])
    for found in pool.run(job.world_size, averages, job.to_json()):
        for name, average in found.items():
            torch.testing.assert_close(average, expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options", [["optimizer.kind=lion"], ["optimizer.in_backward=true", "training.max_norm=0"]]
)
def test_average_of_every_kind_of_update(pool: RankPool, options: list[str]) -> None:
    """Every parameter has one, also if several optimizers, or hooks in backward, update them."""
    jobs = [compose_job([*SMALL, *RUN, *options, *decay]) for decay in ([], ["optimizer.ema_decay=0.0001"])]
    [[found], [alone]] = (pool.run(1, averages, job.to_json()) for job in jobs)
    # With a decay of nearly 0 the average is the weights: the sum of both differs only if both were updated.
    assert found.keys() == alone.keys() and all(not found[name].equal(alone[name]) for name in found)


def test_a_dropped_update_leaves_the_average() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = Lion([{"params": [parameter], "betas": (0.9, 0.99), "weight_decay": 0.0}], 1.0, torch.float32)
    keep_average(optimizer, DECAY)
    optimizer.step()
    average = optimizer.state[parameter]["ema"].clone()
    parameter.data += 5
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert optimizer.state[parameter]["ema"].equal(average)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert not optimizer.state[parameter]["ema"].equal(average)


def test_the_average_of_bfloat16_weights_is_float32() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD([parameter])
    keep_average(optimizer, 0.999)
    optimizer.step()
    parameter.data += 1
    optimizer.step()
    torch.testing.assert_close(optimizer.state[parameter]["ema"], torch.full((3,), 0.001))


def test_average_is_saved_and_converted(
    tmp_path: Path, expected: dict[str, torch.Tensor], trained: tuple[RunFolder, Job]
) -> None:
    folder, job = trained
    weights = find_source(str(folder.path))
    source = open_source(weights.averaged("ema"), job.model)
    for name, average in expected.items():
        torch.testing.assert_close(source.read(name), average, rtol=1e-6, atol=1e-7)
    target = tmp_path / "converted"
    config = ConvertConfig(source=str(folder.path), target=str(target), ema=True)
    assert convert(ConvertJob(**vars(job.plain), convert=config), []) == 0
    converted = open_source(find_source(str(target)), job.model)
    assert all(converted.read(name).equal(source.read(name)) for name in expected)
    with pytest.raises(ConfigError, match=r"convert.ema=true: .* has no moving average of the weights"):
        find_source(str(target)).averaged("convert.ema")
