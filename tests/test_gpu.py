"""What only a GPU can show: from the same initial values it computes what a CPU computes."""

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jobs import random_batch

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments" / "first_gpu"))

from checks import (
    SMALL,
    STEPS,
    TOLERANCES,
    captured_differences,
    drawn_on_the_cpu,
    kernels,
    train_steps,
)

from harness.compose.composer import compose_job
from harness.config.metrics import ProfilingConfig
from harness.data.loader import Loader
from harness.data.prefetch import Prefetcher
from harness.train.graphed import build_engine
from harness.train.observers.profiler import Profiling
from harness.train.setup import process_group, set_up_process


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "more",
    [[], ["parallelism.cpu_offload=true"], ["training.attention=flex"]],
    ids=["plain", "offload", "flex"],
)
def test_gpu_computes_what_a_cpu_computes(precision, more):
    loss_tolerance, gradient_tolerance = TOLERANCES[precision]
    with drawn_on_the_cpu():
        expected_losses, expected = train_steps("cpu", f"precision={precision}")
        losses, gradients = train_steps("cuda", f"precision={precision}", *more)
    assert losses == pytest.approx(expected_losses, rel=loss_tolerance)
    for name, gradient in expected[0].items():
        difference = (gradients[0][name] - gradient).norm() / gradient.norm()
        assert difference < gradient_tolerance, name


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_captured_steps_compute_what_others_compute(name):
    """Over two that are not captured, the one that is, and its repetitions; the learning rate rises."""
    of_losses, of_gradients = captured_differences("cuda", STEPS[name])
    loss_tolerance, tolerance = TOLERANCES["fp32" if name == "fp32" else "bf16"]
    assert of_losses <= loss_tolerance and of_gradients <= tolerance


@pytest.mark.gpu
def test_kernels_compute_what_float64_computes():
    for name, error, allowed in kernels("cuda"):
        assert error <= allowed, name


@pytest.mark.gpu(values=False)
def test_gpu_is_deterministic_when_asked():
    assert (
        train_steps("cuda", "debug=deterministic")[0]
        == train_steps("cuda", "debug=deterministic")[0]
    )


@pytest.mark.gpu(values=False)
@pytest.mark.parametrize(
    "overrides",
    [
        "precision=fp32",
        "precision=bf16",
        "precision=bf16_full",
        "precision=bf16 training.loss_chunks=4",
        "precision=bf16 optimizer.state_dtype=bfloat16",
        "precision=bf16 optimizer.implementation=foreach",
        "precision=bf16 model.moe.num_experts=8 model.moe.hidden_dim=64 model.moe.top_k=2",
        "precision=bf16 training.attention=flex",
        "precision=bf16 compile.cuda_graphs=true",
        "data=mixture data.sources.a.kind=synthetic data.sources.b.kind=synthetic data.weights={a:1,b:1}",
    ],
)
def test_a_step_makes_the_host_wait_for_nothing(overrides, request):
    """But for the first ones, which allocate and compile."""
    # After eight shapes, those of other tests among them, the compiler leaves FlexAttention to eager.
    torch._dynamo.reset()
    request.addfinalizer(lambda: torch.cuda.set_sync_debug_mode("default"))
    job = compose_job([*SMALL, *overrides.split(), "cluster.device=cuda"])
    device = torch.device("cuda", 0)
    set_up_process(job)
    with process_group(job, device):
        engine = build_engine(job, device)
        loader = Prefetcher(Tokens(has_sources="mixture" in overrides), 2, device)
        outcomes = []
        for step in range(6):
            batch = loader.next()
            torch.cuda.set_sync_debug_mode("error" if step >= 3 else "default")
            outcomes.append(engine.gradients(batch))
            engine.update(outcomes[-1].norm)
            torch.cuda.set_sync_debug_mode("default")
        loader.close()
        assert all(outcome.is_finite for outcome in outcomes)


class Tokens(Loader):
    """Random ones."""

    samples_per_epoch = None

    def __init__(self, *, has_sources=False):
        self.sources = torch.tensor([0, 1, 1, 0]) if has_sources else None

    def next(self):
        return random_batch(4, 64)._replace(sources_B=self.sources)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def reset(self):
        pass


@pytest.mark.gpu(values=False)
def test_memory_snapshots_are_written(tmp_path):
    """With a trace, and when memory is out."""
    config = ProfilingConfig(enable=True, interval=1, warmup=0, active=1, memory_snapshot=True)
    run = SimpleNamespace(
        job=SimpleNamespace(profiling=config),
        folder=tmp_path,
        engine=SimpleNamespace(device=torch.device("cuda"), world_max=list),
        progress=SimpleNamespace(step=0),
        ranks=SimpleNamespace(rank=0),
        message=print,
    )
    profiler = Profiling(run)
    profiler.start()
    profiler.begin_step(1)
    torch.ones(1024, device="cuda").sum().item()
    profiler.end_step(1, ())
    run.progress.step = 1
    profiler.close(torch.OutOfMemoryError())
    for name in ("step-1/memory/rank0.pickle", "step-2/memory/rank0-out-of-memory.pickle"):
        snapshot = pickle.loads((tmp_path / "profile" / name).read_bytes())
        assert any(trace for trace in snapshot["device_traces"])
    assert (tmp_path / "profile" / "step-1" / "rank0.json.gz").exists()
