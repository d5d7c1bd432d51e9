"""Traces: they hold exactly the configured steps, are valid Chrome traces, and do not affect throughput."""

import gzip
import json
import time
from pathlib import Path
from types import SimpleNamespace

import jobs
import pytest
import torch

from harness.config.metrics import ProfilingConfig
from harness.metrics.jsonl import read_metrics
from harness.run.folder import RunFolder
from harness.train.engine import Engine
from harness.train.observers.profiler import Profiling
from harness.train.trainer import Trainer

SMALL = (
    "training.steps=12",
    "training.seq_len=16",
    "training.global_batch_size=4",
    "checkpoint=disabled",
)
ON = ("profiling=on", "profiling.interval=5", "profiling.warmup=1", "profiling.active=2")


def events_of(trace):
    """Complete events ("X") of a Chrome trace, in the order they began."""
    read = json.loads(gzip.decompress(trace.read_bytes()))
    return sorted(
        (event for event in read["traceEvents"] if event["ph"] == "X"), key=lambda each: each["ts"]
    )


def traces_in(folder):
    return sorted(
        str(path.relative_to(folder)) for path in folder.glob("profile/**/*") if path.is_file()
    )


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """The folder of a run with two traces."""
    own = (*ON, "training.steps=14", "metrics.log_interval=3", "metrics.warmup_steps=1")
    done = jobs.train(tmp_path_factory.mktemp("runs"), *SMALL, *own)
    assert done.code == 0
    return done.folder.path


def test_a_trace_holds_its_steps_and_no_others(profiled):
    # The third one would end after the run.
    assert traces_in(profiled) == ["profile/step-10/rank0.json.gz", "profile/step-5/rank0.json.gz"]
    for last in (5, 10):
        events = events_of(profiled / f"profile/step-{last}/rank0.json.gz")
        steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
        assert [step["name"] for step in steps] == [
            f"ProfilerStep#{last - 1}",
            f"ProfilerStep#{last}",
        ]
        for step in steps:
            inside = [e["name"] for e in events if 0 <= e["ts"] - step["ts"] < step["dur"]]
            for part in ("data", "forward_backward", "gradient_norm", "optimizer"):
                assert inside.count(part) == 1, part
        products = [event for event in events if event["name"] == "aten::mm"]
        assert products and all(event["args"]["Input Dims"] for event in products)


def test_profiled_steps_do_not_count_and_the_rows_say_so(profiled):
    rows = {
        row["step"]: row.get("profiled_steps") for row in read_metrics(profiled / "metrics.jsonl")
    }
    # The profiler ran during steps 3, 4, 5, then 8, 9, 10, then 13 and 14.
    assert rows == {1: None, 3: 1, 6: 2, 9: 2, 12: 1, 14: 2}
    result = json.loads((profiled / "result.json").read_text())
    assert (result["window.profiled_steps"], result["window.window_steps"]) == (8, 5)


def train(job, run_dir):
    trainer = Trainer(
        job, RunFolder(Path(run_dir)), Engine(job, torch.device("cpu")), None, time.monotonic()
    )
    trainer.train()
    return [step.seconds for step in trainer.window._latest]


def test_only_the_listed_ranks_write(pool, tmp_path):
    job = jobs.tiny(
        *SMALL, *ON, "parallelism=fsdp", "parallelism.dp_shard=2", "profiling.ranks=[1]"
    )
    counted = pool.run(2, train, job, str(tmp_path))
    assert traces_in(tmp_path) == ["profile/step-10/rank1.json.gz", "profile/step-5/rank1.json.gz"]
    # On both ranks, steps from 4 on count, except 4, 5, 8, 9 and 10.
    assert [len(steps) for steps in counted] == [4, 4]
    events = events_of(tmp_path / "profile/step-5/rank1.json.gz")
    assert any(event["name"].startswith("gloo:") for event in events)


@pytest.mark.parametrize("enabled", [True, False])
def test_running_out_of_memory_writes_a_snapshot(tmp_path, monkeypatch, enabled):
    """With the two functions of torch that need a GPU replaced; tests/test_gpu.py has the real ones."""
    recording = []
    monkeypatch.setattr(
        "torch.cuda.memory._record_memory_history", lambda **options: recording.append(options)
    )
    monkeypatch.setattr(
        "torch.cuda.memory._dump_snapshot", lambda path: Path(path).write_text("snapshot")
    )
    config = ProfilingConfig(enable=True, memory_snapshot=enabled)
    run = SimpleNamespace(
        job=SimpleNamespace(profiling=config),
        folder=tmp_path,
        engine=SimpleNamespace(device=torch.device("cuda"), world_max=list),
        progress=SimpleNamespace(step=6),
        ranks=SimpleNamespace(rank=0),
        message=print,
    )
    profiler = Profiling(run)
    profiler.start()
    profiler.close(torch.OutOfMemoryError())
    wanted = ["profile/step-7/memory/rank0-out-of-memory.pickle"] if enabled else []
    assert traces_in(tmp_path) == wanted
    assert [options.get("enabled", True) for options in recording] == (
        [True, None] if enabled else []
    )
