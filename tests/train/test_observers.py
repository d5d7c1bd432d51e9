"""Observers: they change no number of a run, a package can add one, and all are closed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import jobs
import pytest
import torch
from plugins import install

from harness.config.job import Job
from harness.config.training import OBSERVERS
from harness.launch.pool import RankPool
from harness.metrics.jsonl import read_metrics
from harness.run.folder import RunFolder
from harness.train.engine import Engine
from harness.train.observer import Observer, Row
from harness.train.setup import process_group
from harness.train.trainer import Trainer

SMALL = ("model.n_layers=1", "training.steps=7", "training.seq_len=32", "training.global_batch_size=4")
ALL = (
    *("profiling=on", "profiling.interval=3", "profiling.warmup=1", "profiling.active=1"),
    *("profiling.phases=true", "debug.nan=true", "metrics.all_ranks=true"),
    *("validation.interval=3", "validation.steps=2", "evaluation.interval=2"),
)


@pytest.fixture
def documents(tmp_path: Path) -> list[str]:
    """Overrides with documents, because evaluation needs some."""
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"document {number} has words, words and words\n" * 20)
    return [
        *("model.vocab_size=258", "data=local_text", f"data.paths=[{tmp_path}/*.txt]"),
        *("data.validation_fraction=0", f"data.validation_paths=[{tmp_path}/1.txt]"),
        f"data.cache_dir={tmp_path}/cache",
    ]


def numbers(job_json: str, folder: str, watched: bool) -> tuple[list[tuple[float, float]], int]:
    """Loss and gradient norm of each step, and the number of observers."""
    job = Job.from_json(job_json)
    engine = Engine(job, torch.device("cpu"))
    passes, found = engine.gradients, []

    def gradients(batch: object, **others: object) -> object:
        found.append(passes(batch, **others))  # type: ignore[arg-type]
        return found[-1]

    engine.gradients = gradients  # type: ignore
    observers = None if watched else []
    trainer = Trainer(job, RunFolder(Path(folder)), engine, None, time.monotonic(), observers)
    assert trainer.train() == "completed"
    return [(each.loss, each.grad_norm) for each in found], len(trainer.observers)


@pytest.mark.parametrize("layout", [(), ("parallelism=fsdp", "parallelism.dp_shard=2")], ids=["one", "fsdp"])
def test_a_run_has_the_same_numbers_without_observers(
    layout: Sequence[str], documents: list[str], tmp_path: Path, pool: RankPool
) -> None:
    job = jobs.tiny(*SMALL, *documents, *ALL, *layout, f"runs_dir={tmp_path}/runs")
    watched = pool.run(job.world_size, numbers, job.to_json(), str(tmp_path / "with"), True)
    alone = pool.run(job.world_size, numbers, job.to_json(), str(tmp_path / "without"), False)
    assert [count for _, count in watched] == [7 + bool(layout)] * job.world_size
    assert [count for _, count in alone] == [0] * job.world_size
    assert [each for each, _ in watched] == [each for each, _ in alone]
    assert len(watched[0][0]) == 7
    assert (tmp_path / "with" / "phases" / "rank0.jsonl").exists()
    assert list((tmp_path / "with" / "profile").glob("step-*/rank0.json.gz"))


GUEST = """
from harness.train.observer import Observer


class Sums(Observer):
    maxima = ("sums.largest",)

    def start(self):
        self.calls = [["start", self.run.progress.step]]

    def begin_step(self, step):
        self.calls.append(["begin_step", step])
        return [1.0, float(step)]

    def end_step(self, step, sums):
        self.calls.append(["end_step", step])
        return {"sums.ranks": sums[0], "sums.largest": sums[1]}

    def log(self, row, own):
        self.calls.append(["log", row["step"]])
        own["sums.own"] = row["sums.ranks"]

    def close(self, error):
        self.run.message(str(self.calls + [["close", str(error)]]))
"""


@pytest.fixture
def guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with the observer ``sums``, on sys.path."""
    folder = tmp_path / "packages"
    install(folder, "guest_of_tests", {"harness.observer": {"sums": "guest_of_tests:Sums"}}, GUEST)
    monkeypatch.syspath_prepend(folder)
    OBSERVERS.__dict__.pop("plugins", None)
    yield
    OBSERVERS.__dict__.pop("plugins", None)
    OBSERVERS._loaded.pop("sums", None)


def test_a_package_adds_an_observer(guest: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("training.steps=3", "metrics.console=plain", "metrics.all_ranks=true", "checkpoint=disabled")
    code, folder, job = jobs.train(tmp_path, *overrides, "training.observers=[sums]")
    assert code == 0
    rows = read_metrics(folder.path / "metrics.jsonl")
    assert [(row["sums.ranks"], row["sums.largest"]) for row in rows] == [(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]
    own = read_metrics(folder.path / "metrics" / "rank0.jsonl")
    assert [(row["sums.own"], row["sums.largest"]) for row in own] == [(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]
    calls = [["start", 0]]
    for step in range(1, 4):
        calls += [["begin_step", step], ["end_step", step], ["log", step]]
    assert str([*calls, ["close", "None"]]) in capsys.readouterr().out
    # Who watches is no part of what is computed.
    assert job.id == jobs.tiny("model.n_layers=1", *overrides, f"runs_dir={tmp_path}").id
    assert json.loads((folder.path / "job.json").read_text())["training"]["observers"] == ["sums"]


class Recording(Observer):
    """Notes how it is closed; fails on request."""

    closed: ClassVar[list[tuple[str, str]]] = []
    name, fails_in = "first", ""

    def end_step(self, step: int, sums: Sequence[float]) -> Row:
        if self.fails_in == "end_step":
            raise LookupError("a bug of an observer")
        return {}

    def close(self, error: BaseException | None) -> None:
        self.closed.append((self.name, str(error)))
        if self.fails_in == "close":
            raise OSError("cannot close")


class Failing(Recording):
    name, fails_in = "second", "end_step"


class FailsToClose(Recording):
    name, fails_in = "third", "close"


def test_all_are_closed_in_reverse_after_an_error(tmp_path: Path) -> None:
    job = jobs.tiny(*SMALL, "checkpoint=disabled")
    Recording.closed.clear()
    observers = [Recording, Failing, FailsToClose]
    cpu = torch.device("cpu")
    with process_group(job, cpu), pytest.raises(OSError, match="cannot close") as raised:
        engine = Engine(job, cpu)
        Trainer(job, RunFolder(tmp_path), engine, None, time.monotonic(), observers).train()
    assert isinstance(raised.value.__context__, LookupError)
    assert Recording.closed == [
        ("third", "a bug of an observer"),
        ("second", "cannot close"),
        ("first", "cannot close"),
    ]


def test_rows_of_a_rank_are_its_own_and_continue(tmp_path: Path) -> None:
    overrides = ("training.steps=4", "checkpoint.interval=2", "metrics.all_ranks=true")
    jobs.train(tmp_path, *overrides)
    run = jobs.train(tmp_path, *overrides, "checkpoint.load_step=2")
    own = read_metrics(run.folder.path / "metrics" / "rank0.jsonl")
    assert [row["step"] for row in own] == [1, 2, 3, 4]
    for row, of_all in zip(own, read_metrics(run.folder.path / "metrics.jsonl"), strict=True):
        assert row["loss"] == of_all["loss"]  # there is no other rank
        assert row["memory_gib"] > 0 and row["step_seconds"] == of_all["step_seconds"]
        assert (row["rank"], row["stage"]) == (0, 0)


def test_without_it_there_is_no_file(tmp_path: Path) -> None:
    run = jobs.train(tmp_path, "training.steps=2", "checkpoint=disabled")
    assert not (run.folder.path / "metrics").exists()
