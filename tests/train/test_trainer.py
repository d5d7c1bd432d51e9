"""The loop: rows, validation, policies for values that are not finite, garbage collection, determinism."""

import gc
import itertools
import json
import re
import time
from pathlib import Path

import jobs
import pytest
import torch

from harness.compose.composer import compose_points
from harness.data.batch import IGNORE_INDEX
from harness.launch.begin import begin
from harness.launch.local import launch
from harness.launch.pool import RankFailed
from harness.metrics.recorder import Recorder
from harness.model.decoder import Decoder
from harness.parallelism.loss import TokenLoss
from harness.run.folder import RunFolder
from harness.train.engine import Engine
from harness.train.objective import Objective
from harness.train.rows import Progress
from harness.train.step import LATE_STEPS
from harness.train.trainer import Trainer
from harness.util.errors import EXIT_NON_FINITE, DataError, NonFiniteError

SMALL = ("training.steps=6", "training.seq_len=32", "training.global_batch_size=4")


def run(tmp_path, *overrides):
    return jobs.train(tmp_path, *SMALL, *overrides)


def test_rows_have_their_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr(Objective, "rates", lambda _, samples: {"samples_per_second": samples})
    done = run(tmp_path, "training.steps=8")
    rows, job = done.rows, done.job
    assert done.code == 0
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert all(row["loss_max"] >= row["loss"] - 1e-9 for row in rows)
    assert [row["tokens"] for row in rows] == [4 * 32 * step for step in range(1, 9)]
    assert "mtp_loss" not in rows[0]
    assert rows[2]["tokens_per_second"] is None  # warm-up
    assert rows[7]["tokens_per_second"] == pytest.approx(32 * rows[7]["samples_per_second"])
    assert rows[7]["tokens_per_second"] > 0
    assert rows[7]["mfu"] is None  # an unknown peak gives no MFU
    assert rows[0]["lr"] == pytest.approx(job.optimizer.lr / 2)
    result = done.folder.row
    assert (result["exit_reason"], result["step"], result["tokens"]) == ("completed", 8, 8 * 128)
    assert result["loss"] == rows[-1]["loss"]
    assert result["window.window_steps"] == 5
    assert result["job.model.dim"] == job.model.dim
    assert all(not isinstance(value, dict) for value in result.values())


def test_a_clock_that_is_set_back_changes_no_duration(tmp_path, monkeypatch):
    job = jobs.tiny(*SMALL, f"runs_dir={tmp_path}")
    folder, now = RunFolder(job.run_dir), itertools.count(time.time(), -1e7)
    begin(folder, job, [])
    monkeypatch.setattr(time, "time", lambda: next(now))
    assert launch(job, folder) == 0
    durations = {name: value for name, value in folder.row.items() if "seconds" in name}
    assert durations["first_step_seconds"] > 0
    assert all(0 <= value < 600 for value in durations.values() if isinstance(value, float)), (
        durations
    )


def test_rows_have_the_loss_of_multi_token_prediction(tmp_path):
    done = run(tmp_path, "model.mtp.depth=1", "training.steps=2")
    assert all(0 < row["mtp_loss"] < 20 and row["mtp_loss"] != row["loss"] for row in done.rows)


def test_validation_is_the_weighted_mean_of_fixed_samples(tmp_path):
    """Weighted by tokens, the same samples every time, no effect on training."""
    plain = run(tmp_path / "a", "optimizer.lr=0")
    done = run(tmp_path / "b", "optimizer.lr=0", "validation.interval=2", "validation.steps=3")
    validations = {
        row["step"]: row["validation_loss"] for row in done.rows if "validation_loss" in row
    }
    assert list(validations) == [2, 4, 6]
    # Nothing is learned at rate 0, so the same samples give the same loss.
    assert len(set(validations.values())) == 1
    trained = [row["loss"] for row in done.rows if "loss" in row]
    assert trained == [row["loss"] for row in plain.rows]
    loader = jobs.batches_of(done.job, range(4), "validation")
    batches = [loader.next() for _ in range(3)]
    valid = torch.cat([batch.labels_BT for batch in batches]) != IGNORE_INDEX
    losses = torch.cat([jobs.plain_losses(done.job, batch) for batch in batches])
    assert validations[2] == pytest.approx(float(losses[valid].mean()), rel=1e-6)
    best = done.folder.row["best_validation_loss"], done.folder.row["best_validation_step"]
    assert best == (validations[2], 2)


def test_the_best_validation_is_that_of_all_attempts():
    """A loss that is not finite is never the best."""
    before = Progress()
    for before.step, loss in ((1, float("nan")), (2, 3.0), (3, 4.0)):
        before.note_validation(loss, {})
    after = Progress()
    after.resume(json.loads(json.dumps(before.saved())))
    assert (after.best_validation_loss, after.best_validation_step) == (3.0, 2)
    after.step = 4
    after.note_validation(None, {"validation_loss.code": 1.0})
    assert (after.validation_loss, after.best_validation_loss) == (None, 3.0)
    after.note_validation(2.0, {})
    assert (after.best_validation_loss, after.best_validation_step) == (2.0, 4)


@pytest.fixture
def infinite_at(monkeypatch):
    """Make the losses of the given steps infinite; the count continues in later runs."""

    def spoil(*steps):
        original, count = TokenLoss.__call__, itertools.count(1)
        monkeypatch.setattr(
            TokenLoss,
            "__call__",
            lambda *args: original(*args) * (float("inf") if next(count) in steps else 1),
        )

    return spoil


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Values are read one step late."""
    monkeypatch.setitem(LATE_STEPS, "cpu", LATE_STEPS["cuda"])


@pytest.mark.parametrize(
    ("late", "interval", "rows"), [(0, 1, [1, 2]), (1, 1, [1, 2]), (1, 10, [1])]
)
def test_non_finite_stops_and_keeps_the_evidence(
    tmp_path, infinite_at, monkeypatch, late, interval, rows
):
    """Also where values are read when another step has started."""
    monkeypatch.setitem(LATE_STEPS, "cpu", late)
    infinite_at(3)
    done = run(tmp_path, f"metrics.log_interval={interval}", "checkpoint.interval=2")
    folder = done.folder
    assert done.code == EXIT_NON_FINITE
    found = sorted(path.name for path in (folder.path / "evidence").iterdir())
    assert found == ["step3-rank0.json", "step3-rank0.pt"]
    evidence = json.loads((folder.path / "evidence" / "step3-rank0.json").read_text())
    assert evidence["gradients"] and evidence["loss"] == "inf"
    assert torch.load(folder.path / "evidence" / "step3-rank0.pt")["inputs"].shape == (4, 32)
    result = folder.row
    assert (result["exit_code"], result["step"], result["error.kind"]) == (
        EXIT_NON_FINITE,
        2,
        "non_finite",
    )
    assert "step 3: loss inf" in result["error.message"]
    assert [row["step"] for row in done.rows] == rows
    assert [each.name for each in (folder.path / "checkpoints").glob("step-*")] == ["step-2"]


def test_non_finite_can_be_skipped(tmp_path, infinite_at):
    infinite_at(1, 3)
    done = run(tmp_path, "debug.non_finite=skip")
    rows = done.rows
    assert done.code == 0
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["skipped_steps"] for row in rows] == [1, 1, 2, 2, 2, 2]
    assert all(abs(row["loss"]) < 100 for row in rows if row["step"] not in (1, 3))
    # The schedule advanced although two updates were skipped.
    assert rows[1]["lr"] == pytest.approx(done.job.optimizer.lr)


def test_skipping_in_a_row_ends(tmp_path, infinite_at, monkeypatch):
    monkeypatch.setattr("harness.train.non_finite.MOST_SKIPPED", 2)
    infinite_at(2, 3, 4)
    code, folder, _ = run(tmp_path, "debug.non_finite=skip")
    assert code == EXIT_NON_FINITE
    assert folder.row["step"] == 3


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            "validation.interval=4",
            "launch 1 launch launch 2 launch 3 4 validation launch launch 5 6 validation",
        ),
        # The first step of a length, and the last one of the length before, are timed alone.
        (
            "schedule.seq_len=[{until_step:3,tokens:16}]",
            "launch 1 launch launch 2 3 launch 4 launch launch 5 6",
        ),
    ],
)
def test_rows_are_written_when_the_next_step_is_launched(
    tmp_path, monkeypatch, overrides, expected
):
    """Unless their step is timed alone, is followed by a validation, or is the first or last."""
    order = recorded_order(monkeypatch)
    assert run(tmp_path, overrides).code == 0
    assert " ".join(order) == expected


def recorded_order(monkeypatch):
    """What a run does from now on: it launches passes, and writes rows by their steps and validations."""
    order = []
    gradients, log = Engine.gradients, Recorder.log

    def launch(*args, **options):
        order.append("launch")
        return gradients(*args, **options)

    def write(recorder, row):
        order.append(str(row["step"]) if "loss" in row else "validation")
        log(recorder, row)

    monkeypatch.setattr(Engine, "gradients", launch)
    monkeypatch.setattr(Recorder, "log", write)
    return order


TIMES = {
    "time",
    "step_seconds",
    "data_share",
    "memory_gib",
    "tflops_per_device",
    "tokens_per_second",
}
TIMES.add("tokens_per_second_per_rank")


@pytest.mark.parametrize(
    "overrides",
    [
        "schedule.seq_len=[{until_step:3,tokens:16}] schedule.batch_size=[{until_step:2,sequences:2}]",
        "data=mixture data.sources={a:{kind:synthetic},b:{kind:synthetic}} data.weights={a:1,b:3}",
        "model=deepseek_v3_debug model.n_layers=2 validation.interval=4",
    ],
)
def test_rows_are_the_same_when_they_are_written_late(tmp_path, monkeypatch, overrides):
    """Sizes, sources and loads of experts are those of the row's step, not of the one after it."""
    found = []
    for late in (0, 1):
        monkeypatch.setitem(LATE_STEPS, "cpu", late)
        done = run(tmp_path / str(late), "training.matmul_precision=highest", *overrides.split())
        assert done.code == 0
        rows = done.rows
        assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
        found.append([{name: row[name] for name in row.keys() - TIMES} for row in rows])
        assert done.folder.row["step"] == 6
        assert ("moe.load_max" in rows[0]) == ("deepseek" in overrides)
    assert found[0] == found[1]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_row_is_not_lost_when_the_next_step_fails(tmp_path, monkeypatch):
    gradients = Engine.gradients

    def fail_in_step_4(engine, batch, **options):
        if engine.schedule.last_epoch == 3:
            raise DataError("no more data")
        return gradients(engine, batch, **options)

    monkeypatch.setattr(Engine, "gradients", fail_in_step_4)
    done = run(tmp_path)
    assert done.code == DataError.exit_code
    assert [row["step"] for row in done.rows] == [1, 2, 3]
    assert done.folder.row["step"] == 3


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_skipping_is_the_same_on_device_and_host(tmp_path, infinite_at, implementation):
    """A fused optimizer skips on the device, a step before the host notices; the others on the host."""
    infinite_at(1, 3, 7, 9)
    ends = set()
    for interval in (1, 10):
        own = ("debug.non_finite=skip", f"optimizer.implementation={implementation}")
        _, folder, _ = run(tmp_path / str(interval), f"metrics.log_interval={interval}", *own)
        assert (folder.row["step"], folder.row["skipped_steps"]) == (6, 2)
        assert len(list((folder.path / "evidence").glob("*.json"))) == 2
        ends.add(folder.row["loss"])
    assert len(ends) == 1


def test_rows_and_collections_are_at_fixed_steps(tmp_path, monkeypatch):
    generations = []
    enabled = []
    original = Engine.gradients

    def gradients(self, batch, **options):
        enabled.append(gc.isenabled())
        return original(self, batch, **options)

    monkeypatch.setattr(Engine, "gradients", gradients)
    monkeypatch.setattr(gc, "collect", lambda generation=2: generations.append(generation))
    done = run(tmp_path, "training.gc_interval=2", "metrics.log_interval=4")
    assert [row["step"] for row in done.rows] == [1, 4, 6]  # the first and the last, too
    assert generations == [2, 1, 1, 1]  # once before the first step, then at steps 2, 4 and 6
    assert enabled == [False] * 6
    assert gc.isenabled()


def test_deterministic_runs_are_bitwise_equal(tmp_path):
    values = []
    try:
        for name in ("a", "b"):
            done = run(tmp_path / name, "debug=deterministic")
            values.append([(row["loss"], row["grad_norm"]) for row in done.rows])
        assert torch.are_deterministic_algorithms_enabled()
        run(tmp_path / "c", "debug=default")
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert values[0] == values[1]


def test_training_learns(tmp_path):
    """A repetitive text is learned: the loss falls far below the entropy of its letters."""
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh " * 4000)
    data = (
        "data=local_text",
        f"data.paths=[{text}]",
        f"data.cache_dir={tmp_path}",
        "model.vocab_size=258",
    )
    rows = run(tmp_path, *data, "training.steps=30", "optimizer.lr=5e-3").rows
    assert rows[0]["loss"] > 4 and rows[-1]["loss"] < 0.5


# -- debug=nan and debug=anomaly: the error names where the first number that is not finite was computed --

NAN = (
    "training.steps=4",
    "training.seq_len=16",
    "training.global_batch_size=4",
    "checkpoint=disabled",
)


@pytest.fixture(autouse=True)
def no_anomaly_mode_is_left():
    yield
    torch.autograd.set_detect_anomaly(False)


def poisoned(job, run_dir, name):
    """Train with one element of one weight set to NaN on the ranks that hold its first row."""
    engine = Engine(job, torch.device("cpu"))
    with torch.no_grad():
        for own, parameter in engine.named_parameters():
            if own == name:
                getattr(parameter, "_local_tensor", parameter).view(-1)[0] = float("nan")
    Trainer(job, RunFolder(Path(run_dir)), engine, None, time.monotonic()).train()


def error_of(job, run_dir, name):
    try:
        poisoned(job, run_dir, name)
    except NonFiniteError as error:
        return str(error)
    return "nothing"


WEIGHT = "layers.1.feed_forward.w2.weight"
MESSAGE = "step 1: the output of layers.1.feed_forward.w2 is not finite"


@pytest.mark.parametrize("layout", ["single", "fsdp", "tp"])
def test_a_poisoned_weight_is_named(pool, tmp_path, layout):
    job = jobs.tiny(*NAN, f"parallelism={layout}", "debug=nan")
    errors = pool.run(job.world_size, error_of, job, str(tmp_path), WEIGHT)
    assert all(each.startswith(MESSAGE) for each in errors), errors
    if layout == "single":
        assert errors[0].endswith(f"; neither are the parameters {WEIGHT}")


def test_a_poisoned_weight_is_named_inside_of_a_pipeline(pool, tmp_path):
    """The rank that holds the weight reports it; the launcher ends the other one, which waits for it."""
    job = jobs.tiny(*NAN, "parallelism=pp", "parallelism.pp_schedule=ZBVZeroBubble", "debug=nan")
    with pytest.raises(RankFailed) as failed:
        pool.run(2, poisoned, job, str(tmp_path), WEIGHT)
    assert f"\nharness.util.errors.NonFiniteError: {MESSAGE}" in str(failed.value)


class SpoilsGradient(torch.autograd.Function):
    """Identity forward, NaN backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


@pytest.fixture
def gradient_spoilt_in_step_three(monkeypatch):
    """The gradient is NaN between the head and the last block."""
    original, calls = Decoder.__init__, [0]

    def spoil(module, inputs):
        calls[0] += 1
        return (SpoilsGradient.apply(inputs[0]),) if calls[0] == 3 else None

    def init(self, *args, **options):
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
def test_the_error_names_the_function_or_the_last_finite_gradient(tmp_path, mode, message):
    code, folder, _ = jobs.train(tmp_path, *NAN, f"debug={mode}", "model.n_layers=2")
    error = folder.errors.first()
    assert code == EXIT_NON_FINITE and error is not None and error["step"] == 2
    assert re.match(f"step 3: {message}", error["message"])


def test_a_sound_run_is_the_same_with_and_without(tmp_path):
    losses = set()
    for mode in ("nan", "anomaly", "default"):
        code, folder, _ = jobs.train(tmp_path / mode, *NAN, f"debug={mode}")
        assert (code, torch.is_anomaly_enabled()) == (0, mode == "anomaly")
        losses.add(folder.row["loss"])
    assert len(losses) == 1


def test_nan_is_a_name_also_as_one_of_several():
    """Hydra by itself would read a number."""
    points = compose_points([*jobs.TINY, *NAN, "debug=nan,default"])
    assert [point.job.debug.nan for point in points] == [True, False]
