"""debug=nan and debug=anomaly: the error names where the first number that is not finite was computed."""

from __future__ import annotations

import re
import time
from pathlib import Path

import jobs
import pytest
import torch

from harness.compose.composer import compose_points
from harness.config.job import Job
from harness.launch.pool import RankFailed, RankPool
from harness.model.decoder import Decoder
from harness.run.folder import RunFolder
from harness.train.engine import Engine
from harness.train.trainer import Trainer
from harness.util.errors import EXIT_NON_FINITE, NonFiniteError

SMALL = ("training.steps=4", "training.seq_len=16", "training.global_batch_size=4", "checkpoint=disabled")


@pytest.fixture(autouse=True)
def no_anomaly_mode_is_left():  # type: ignore[no-untyped-def]
    yield
    torch.autograd.set_detect_anomaly(False)


def poisoned(job_json: str, run_dir: str, name: str) -> None:
    """Train with one element of one weight set to NaN on the ranks that hold its first row."""
    job = Job.from_json(job_json)
    engine = Engine(job, torch.device("cpu"))
    with torch.no_grad():
        for own, parameter in engine.named_parameters():
            if own == name:
                getattr(parameter, "_local_tensor", parameter).view(-1)[0] = float("nan")
    Trainer(job, RunFolder(Path(run_dir)), engine, None, time.monotonic()).train()


def error_of(job_json: str, run_dir: str, name: str) -> str:
    try:
        poisoned(job_json, run_dir, name)
    except NonFiniteError as error:
        return str(error)
    return "nothing"


WEIGHT = "layers.1.feed_forward.w2.weight"
MESSAGE = "step 1: the output of layers.1.feed_forward.w2 is not finite"


@pytest.mark.parametrize("layout", ["single", "fsdp", "tp"])
def test_a_poisoned_weight_is_named(pool: RankPool, tmp_path: Path, layout: str) -> None:
    job = jobs.tiny(*SMALL, f"parallelism={layout}", "debug=nan")
    errors = pool.run(job.world_size, error_of, job.to_json(), str(tmp_path), WEIGHT)
    assert all(each.startswith(MESSAGE) for each in errors), errors
    if layout == "single":
        assert errors[0].endswith(f"; neither are the parameters {WEIGHT}")


def test_a_poisoned_weight_is_named_inside_of_a_pipeline(pool: RankPool, tmp_path: Path) -> None:
    """The rank that holds the weight reports it; the launcher ends the other one, which waits for it."""
    job = jobs.tiny(*SMALL, "parallelism=pp", "parallelism.pp_schedule=ZBVZeroBubble", "debug=nan")
    with pytest.raises(RankFailed) as failed:
        pool.run(2, poisoned, job.to_json(), str(tmp_path), WEIGHT)
    assert f"\nharness.util.errors.NonFiniteError: {MESSAGE}" in str(failed.value)


class SpoilsGradient(torch.autograd.Function):
    """Identity forward, NaN backward."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient * float("nan")


@pytest.fixture
def gradient_spoilt_in_step_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is NaN between the head and the last block."""
    original, calls = Decoder.__init__, [0]

    def spoil(module, inputs):  # type: ignore[no-untyped-def]
        calls[0] += 1
        return (SpoilsGradient.apply(inputs[0]),) if calls[0] == 3 else None

    def init(self, *args, **options):  # type: ignore[no-untyped-def]
        original(self, *args, **options)
        self.norm.register_forward_pre_hook(spoil)

    monkeypatch.setattr(Decoder, "__init__", init)


@pytest.mark.usefixtures("gradient_spoilt_in_step_three")
@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (
            "nan",
            r"the gradient of the output of layers\.1 is not finite \(.*"
            r"; it was computed from the gradient of the output of norm, which is finite$",
        ),
        ("anomaly", "Function 'SpoilsGradientBackward' returned nan values in its"),
    ],
)
def test_the_error_names_the_function_or_the_last_finite_gradient(
    tmp_path: Path, mode: str, message: str
) -> None:
    code, folder, _ = jobs.train(tmp_path, *SMALL, f"debug={mode}", "model.n_layers=2")
    error = folder.first_error()
    assert code == EXIT_NON_FINITE and error is not None and error["step"] == 2
    assert re.match(f"step 3: {message}", error["message"])


def test_a_sound_run_is_the_same_with_and_without(tmp_path: Path) -> None:
    losses = set()
    for mode in ("nan", "anomaly", "default"):
        code, folder, _ = jobs.train(tmp_path / mode, *SMALL, f"debug={mode}")
        assert (code, torch.is_anomaly_enabled()) == (0, mode == "anomaly")
        losses.add(folder.row["loss"])
    assert len(losses) == 1


def test_nan_is_a_name_also_as_one_of_several() -> None:
    """Hydra by itself would read a number."""
    points = compose_points([*jobs.TINY, *SMALL, "debug=nan,default"])
    assert [point.job.debug.nan for point in points] == [True, False]
