"""Observers: they change no number of a run, a package can add one, and all are closed."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import jobs
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import words
from one_line import one_line
from processes import until

from harness.config.training import OBSERVERS
from harness.metrics.jsonl import read_metrics
from harness.metrics.tensor_file import ACTIVATIONS, read_tensors
from harness.run.folder import RunFolder
from harness.train.engine import Engine
from harness.train.observer import Observer
from harness.train.observers import flight_recorder
from harness.train.setup import process_group
from harness.train.trainer import Trainer
from harness.util.errors import UserError

SMALL = (
    "model.n_layers=1",
    "training.steps=7",
    "training.seq_len=32",
    "training.global_batch_size=4",
)
ALL = tuple(
    words("""
    profiling=on profiling.interval=3 profiling.warmup=1 profiling.active=1
    profiling.phases=true debug.nan=true metrics.all_ranks=true metrics.tensors=norms
    metrics.tensors_interval=3 metrics.activations=true validation.interval=3 validation.steps=2
    evaluation.interval=2
""")
)


@pytest.fixture
def documents(tmp_path):
    """Overrides with documents, because evaluation needs some."""
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(
            f"document {number} has words, words and words\n" * 20
        )
    return [
        *("model.vocab_size=258", "data=local_text", f"data.paths=[{tmp_path}/*.txt]"),
        *("data.validation_fraction=0", f"data.validation_paths=[{tmp_path}/1.txt]"),
        f"data.cache_dir={tmp_path}/cache",
    ]


def numbers(job, folder, watched):
    """Loss and gradient norm of each step, and the number of observers."""
    engine = Engine(job, torch.device("cpu"))
    passes, found = engine.gradients, []

    def gradients(batch, **others):
        found.append(passes(batch, **others))
        return found[-1]

    engine.gradients = gradients
    observers = None if watched else []
    trainer = Trainer(job, RunFolder(Path(folder)), engine, None, time.monotonic(), observers)
    assert trainer.train() == "completed"
    return [(each.loss, each.grad_norm) for each in found], len(trainer.observers)


@pytest.mark.parametrize(
    "layout", [(), ("parallelism=fsdp", "parallelism.dp_shard=2")], ids=["one", "fsdp"]
)
def test_a_run_has_the_same_numbers_without_observers(layout, documents, tmp_path, pool):
    job = jobs.tiny(*SMALL, *documents, *ALL, *layout, f"runs_dir={tmp_path}/runs")
    watched = pool.run(job.world_size, numbers, job, str(tmp_path / "with"), True)
    alone = pool.run(job.world_size, numbers, job, str(tmp_path / "without"), False)
    assert [count for _, count in watched] == [9 + bool(layout)] * job.world_size
    assert [count for _, count in alone] == [0] * job.world_size
    assert [each for each, _ in watched] == [each for each, _ in alone]
    assert len(watched[0][0]) == 7
    assert (tmp_path / "with" / "phases" / "rank0.jsonl").exists()
    assert list((tmp_path / "with" / "profile").glob("step-*/rank0.json.gz"))


class Sums(Observer):
    """Counts ranks and steps, and notes its calls."""

    maxima = ("sums.largest",)
    calls: ClassVar[list[tuple[str, int | str]]] = []

    def start(self):
        self.calls.append(("start", self.run.progress.step))

    def begin_step(self, step):
        self.calls.append(("begin_step", step))
        return [1.0, float(step)]

    def end_step(self, step, sums):
        self.calls.append(("end_step", step))
        return {"sums.ranks": sums[0], "sums.largest": sums[1]}

    def log(self, row, own):
        self.calls.append(("log", row["step"]))
        own["sums.own"] = row["sums.ranks"]

    def close(self, error):
        self.calls.append(("close", str(error)))


def test_an_observer_is_called_and_adds_columns(tmp_path, monkeypatch):
    for table in (OBSERVERS._builtins, OBSERVERS._loaded):
        monkeypatch.setitem(table, "sums", Sums)
    overrides = ("training.steps=2", "metrics.all_ranks=true", "checkpoint=disabled")
    code, folder, job = run = jobs.train(tmp_path, *overrides, "training.observers=[sums]")
    assert code == 0
    assert [(row["sums.ranks"], row["sums.largest"]) for row in run.rows] == [
        (1.0, 1.0),
        (1.0, 2.0),
    ]
    own = read_metrics(folder.path / "metrics" / "rank0.jsonl")
    assert [(row["sums.own"], row["sums.largest"]) for row in own] == [(1.0, 1.0), (1.0, 2.0)]
    steps = [(call, step) for step in (1, 2) for call in ("begin_step", "end_step", "log")]
    assert Sums.calls == [("start", 0), *steps, ("close", "None")]
    # Who watches is no part of what is computed.
    assert job.id == jobs.tiny("model.n_layers=1", *overrides, f"runs_dir={tmp_path}").id
    assert json.loads((folder.path / "job.json").read_text())["training"]["observers"] == ["sums"]


def test_all_are_closed_in_reverse_after_an_error(tmp_path):
    closed = []

    class Recording(Observer):
        def close(self, error):
            closed.append((type(self).__name__, str(error)))

    class FailsInAStep(Recording):
        def end_step(self, step, sums):
            raise LookupError("a bug of an observer")

    class FailsToClose(Recording):
        def close(self, error):
            super().close(error)
            raise OSError("cannot close")

    job, cpu = jobs.tiny(*SMALL, "checkpoint=disabled"), torch.device("cpu")
    observers = [Recording, FailsInAStep, FailsToClose]
    with process_group(job, cpu), pytest.raises(OSError, match="cannot close") as raised:
        Trainer(
            job, RunFolder(tmp_path), Engine(job, cpu), None, time.monotonic(), observers
        ).train()
    assert isinstance(raised.value.__context__, LookupError)
    errors = {
        "FailsToClose": "a bug of an observer",
        "FailsInAStep": "cannot close",
        "Recording": "cannot close",
    }
    assert closed == list(errors.items())


def test_rows_of_a_rank_are_its_own_and_continue(tmp_path):
    overrides = ("training.steps=4", "checkpoint.interval=2")
    bare = jobs.train(tmp_path / "bare", *overrides)
    assert not {"metrics", "phases", "profile"} & {path.name for path in bare.folder.path.iterdir()}
    jobs.train(tmp_path, *overrides, "metrics.all_ranks=true")
    run = jobs.train(tmp_path, *overrides, "metrics.all_ranks=true", "checkpoint.load_step=2")
    own = read_metrics(run.folder.path / "metrics" / "rank0.jsonl")
    assert [row["step"] for row in own] == [1, 2, 3, 4]
    for row, of_all in zip(own, run.rows, strict=True):
        assert row["loss"] == of_all["loss"]  # there is no other rank
        assert row["memory_gib"] > 0 and row["step_seconds"] == of_all["step_seconds"]
        assert (row["rank"], row["stage"]) == (0, 0)


def test_norms_of_tensors_are_those_of_the_steps_and_continue(tmp_path):
    """Squares of gradients add up to the norm's; an update is the way from one checkpoint to the next."""
    overrides = ("training.steps=6", "checkpoint.interval=1", "checkpoint.keep_latest_k=0")
    norms = ("metrics.tensors=norms", "metrics.tensors_interval=4")
    jobs.train(tmp_path, *overrides, *norms)
    # A record that was being written when the process died.
    with next(tmp_path.glob("*/*/tensors.bin")).open("ab") as file:
        file.write(b"half")
    run = jobs.train(tmp_path, *overrides, *norms, "checkpoint.load_step=2")
    # What an attempt that goes back cuts off is kept with the attempt before.
    assert read_tensors(run.folder.path / "attempts" / "1").steps.tolist() == [1, 4, 6]
    found = read_tensors(run.folder.path)
    assert found.steps.tolist() == [
        1,
        3,
        4,
        6,
    ]  # the first of each attempt, the fourth, and the last
    by_step = {row["step"]: row["grad_norm"] for row in run.rows}
    gradients = np.sqrt((found.data[:, 0].astype(float) ** 2).sum(1))
    assert gradients == pytest.approx([by_step[step] for step in found.steps], rel=1e-6)
    place = found.names.index("layers.0.attention.wk.weight")
    before, after = ({"layers.0.attention.wk.weight": torch.zeros(32, 64)} for _ in range(2))
    for step, weights in ((3, before), (4, after)):
        weights["layers.0.attention.wk.weight"] = torch.empty(found.sizes[place]).view(-1, 64)
        path = run.folder.path / "checkpoints" / f"step-{step}"
        dcp.load(weights, checkpoint_id=str(path), no_dist=True)
    [old], [new] = before.values(), after.values()
    expected = [float(old.double().norm()), float((new.double() - old.double()).norm())]
    assert found.data[2, 1:, place] == pytest.approx(expected, rel=1e-5)
    # A run that starts over begins a new file, and the old one moves with its curve.
    again = jobs.train(tmp_path, *overrides, *norms, "checkpoint.resume=false")
    assert read_tensors(again.folder.path / "attempts" / "2").steps.tolist() == [1, 3, 4, 6]
    assert read_tensors(again.folder.path).steps.tolist() == [1, 4, 6]
    unsized = b'{"values": [], "names": []}'
    for content, rule in ((b"{}", "'values'"), (b"[", ""), (unsized, "'sizes'")):
        (again.folder.path / "tensors.json").write_bytes(content)
        with one_line(UserError, f"damaged: {rule}"):
            read_tensors(again.folder.path)


def test_activations_are_recorded_between_rows_and_continue(tmp_path):
    """Steps without a row have records too, and nothing is compiled for them after the first step."""
    overrides = tuple(
        words("""
        training.steps=7 checkpoint.interval=2 checkpoint.keep_latest_k=0
        metrics.activations=true metrics.tensors_interval=3 metrics.log_interval=7 compile=on
        compile.backend=aot_eager model.mtp.depth=1
    """)
    )
    jobs.train(tmp_path, *overrides)
    run = jobs.train(tmp_path, *overrides, "checkpoint.load_step=4")
    assert run.folder.row["recompiles"] == 0
    # With the present weights, so a step is what it was.
    first = read_tensors(run.folder.path / "attempts" / "1", ACTIVATIONS)
    found = read_tensors(run.folder.path, ACTIVATIONS)
    assert first.steps.tolist() == [1, 3, 6, 7]
    assert found.steps.tolist() == [1, 3, 5, 6, 7]
    assert found.names == ["tok_embeddings", "layers.0", "mtp.block"]
    assert np.array_equal(found.data[-2:], first.data[-2:], equal_nan=True)
    assert np.isfinite(found.data[:, :3]).all() and np.isnan(found.data[:, 3]).all()
    # A step with a record is left out of throughput.
    assert run.rows[0]["profiled_steps"] == 1


@pytest.mark.parametrize(("seconds", "late"), [(550.0, False), (601.0, True)])
def test_a_rank_that_was_stopped_says_that_its_position_is_late(
    seconds, late, tmp_path, monkeypatch
):
    """By the monotonic clock of its own node: nodes may differ in their time of day."""
    run = mock.Mock(folder=tmp_path, limit_seconds=lambda _: 600)
    run.ranks.rank = 1
    run.progress.running = 3
    recorder = flight_recorder.FlightRecorder(run)
    recorder.begin_step(3)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + seconds, time=lambda: 0.0)
    monkeypatch.setattr(flight_recorder, "time", later)
    place = tmp_path / "flight_recorder" / "place-rank1.json"
    until(place.exists)
    recorder.close(None)
    assert json.loads(place.read_text())["late"] == late
