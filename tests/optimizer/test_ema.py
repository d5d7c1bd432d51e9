"""The moving average of the weights: torch's own, on layouts, in checkpoints, and where it is read."""

import pytest
import torch
from jobs import batches_of, tiny, train, train_engine
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from harness.optimizer.build import keep_average
from harness.optimizer.elementwise import Lion
from harness.tools.convert import ConvertConfig, ConvertJob, convert
from harness.train.engine import Engine
from harness.util.errors import ConfigError
from harness.weights.detect import find_source, open_source

DECAY, STEPS = 0.7, 3
RUN = (
    *(
        "model.n_layers=1",
        "training.seq_len=16",
        "training.global_batch_size=4",
        f"training.steps={STEPS}",
    ),
    *("optimizer.lr=0.01", f"optimizer.ema_decay={DECAY}", "schedule.warmup_steps=0"),
)


def averages(pool, *overrides):
    """Train; return the full averages of each rank's parameters."""
    job = tiny(*RUN, *overrides)
    ranks = pool.run(job.world_size, train_engine, job, STEPS)
    return [{name: state["ema"] for name, state in rank.state.items()} for rank in ranks]


def judged(job):
    """Train; return torch's own average of the weights, which starts with those after the first step."""
    engine = Engine(job, torch.device("cpu"))
    loader = batches_of(job, engine.rows)
    judge = AveragedModel(engine.parts[0], multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for _ in range(job.steps):
        engine.update(engine.gradients(loader.next()).norm)
        judge.update_parameters(engine.parts[0])
    return {name: p.detach().clone() for name, p in judge.module.named_parameters()}


@pytest.fixture(scope="module")
def expected(pool):
    [found] = pool.run(1, judged, tiny(*RUN, "optimizer.ema_decay=0"))
    return found


@pytest.mark.parametrize(
    ("layout", "rtol", "atol"), [("single", 1e-6, 1e-7), ("fsdp_tp", 1e-4, 1e-4)]
)
def test_average_is_torchs(pool, expected, layout, rtol, atol):
    for found in averages(pool, f"parallelism={layout}"):
        assert found.keys() == expected.keys()
        for name, average in found.items():
            torch.testing.assert_close(average, expected[name], rtol=rtol, atol=atol)


def test_average_of_every_parameter(pool):
    """Every parameter has one, also if several optimizers update them."""
    [found] = averages(pool, "optimizer.kind=muon")
    [alone] = averages(pool, "optimizer.kind=muon", "optimizer.ema_decay=0.0001")
    # With a decay of nearly 0 the average is the weights: the sum of both differs only if both were updated.
    assert found.keys() == alone.keys() and all(
        not found[name].equal(alone[name]) for name in found
    )


def test_a_dropped_update_leaves_the_average():
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = Lion(
        [{"params": [parameter], "betas": (0.9, 0.99), "weight_decay": 0.0}], 1.0, torch.float32
    )
    keep_average(optimizer, DECAY)
    optimizer.step()
    average = optimizer.state[parameter]["ema"].clone()
    parameter.data += 5
    for dropped in (True, False):
        optimizer.found_inf = torch.tensor(float(dropped))
        optimizer.step()
        assert optimizer.state[parameter]["ema"].equal(average) == dropped


def test_the_average_of_bfloat16_weights_is_float32():
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD([parameter])
    keep_average(optimizer, 0.999)
    optimizer.step()
    parameter.data += 1
    optimizer.step()
    torch.testing.assert_close(optimizer.state[parameter]["ema"], torch.full((3,), 0.001))


def test_average_is_saved_and_converted(tmp_path, expected):
    code, folder, job = train(tmp_path, *RUN)
    assert code == 0
    source = open_source(find_source(str(folder.path)).averaged("ema"), job.model)
    for name, average in expected.items():
        torch.testing.assert_close(source.read(name), average, rtol=1e-6, atol=1e-7)
    target = tmp_path / "converted"
    config = ConvertConfig(source=str(folder.path), target=str(target), ema=True)
    assert convert(ConvertJob(**vars(job.plain), convert=config), []) == 0
    converted = open_source(find_source(str(target)), job.model)
    assert all(converted.read(name).equal(source.read(name)) for name in expected)
    with pytest.raises(
        ConfigError, match=r"convert.ema=true: .* has no moving average of the weights"
    ):
        find_source(str(target)).averaged("convert.ema")
