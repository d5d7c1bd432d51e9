"""Spikes: found as by plain numpy; then logged, skipped, or left out as if their batch had never been."""

import itertools
import json
import random
import re
import string
import sys
from pathlib import Path
from unittest.mock import Mock

import jobs
import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
from resumable_runs import train

from harness.checkpoint.catalog import DamagedCheckpoint
from harness.config.training import DebugConfig
from harness.data.loader import SampleLoader
from harness.data.tokenizer import build_tokenizer
from harness.metrics.spikes import SpikePolicy
from harness.metrics.tensor_file import read_tensors
from harness.parallelism.loss import TokenLoss
from harness.train.objective import loader_of
from harness.train.step import LATE_STEPS
from harness.util.errors import EXIT_NON_FINITE, ConfigError

STEPS, BATCH = 18, 256
SMALL = (
    "data=local_text data.shuffle=false model.vocab_size=320 optimizer.lr=0.01 training.seq_len=32 "
    f"training.global_batch_size=8 training.steps={STEPS} "
)


@pytest.fixture
def spoiled(tmp_path):
    """Text that a model learns soon, but for batches of noise."""

    def write(*batches):
        text = ["abcdefgh" * (BATCH // 8)] * 30
        for batch in batches:
            noise = random.Random(batch).choices(string.printable, k=BATCH - 2)
            text[batch - 1] = f"a{''.join(noise)}h"  # a sample begins with the last token before it
        (tmp_path / "text.txt").write_text("".join(text))
        return (SMALL + f"data.paths=[{tmp_path}/text.txt] data.cache_dir={tmp_path}").split()

    return write


def on(action):
    return f"debug.spikes={action}", "debug.spike_window=8", "debug.spike_zscore=10"


def numbers(done):
    names = ("step", "loss", "grad_norm", "lr", "tokens")
    return [[row[name] for name in names] for row in done.rows if "loss" in row]


def spikes(done):
    return [row["step"] for row in done.rows if "spike.loss" in row]


def test_spikes_are_those_of_a_plain_reference():
    draw = np.random.default_rng(0)
    values = draw.normal(3, 0.1, (400, 2))
    values += draw.choice([0, 1, -1], values.shape, p=[0.94, 0.03, 0.03])
    debug = DebugConfig(spikes="log", spike_window=16, spike_zscore=4.0)
    policy, usual, found = SpikePolicy(debug), [], 0
    for step, value in enumerate(values, 1):
        before = np.array([each for at, each in usual if at <= step - 2][-16:])
        scores = np.zeros(2)
        if len(before) >= 8:
            distance = abs(before - np.median(before, axis=0))
            scores = (value - np.median(before, axis=0)) / (1.4826 * np.median(distance, axis=0))
        spike = policy.check(step, *value)
        if scores.max() <= 4:
            assert spike is None
            usual.append((step, value))
        else:
            found += 1
            assert list(spike.row.values()) == pytest.approx([step, *scores])
        if step % 50 == 0:
            state = json.loads(json.dumps(policy.state_dict()))
            policy = SpikePolicy(debug)
            policy.load_state_dict(state)
    assert 10 < found < 60


def test_a_level_that_stays_becomes_usual_or_ends_the_run(spoiled, tmp_path):
    data = [*spoiled(*range(12, 30)), "training.steps=26"]
    logged = jobs.train(tmp_path / "log", *data, *on("log"))
    assert spikes(logged) == list(range(12, 23))
    skipped = jobs.train(tmp_path / "skip", *data, *on("skip"))
    assert (skipped.code, skipped.folder.row["skipped_steps"]) == (EXIT_NON_FINITE, 10)


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_a_spike_is_logged_or_its_update_is_skipped(spoiled, tmp_path, monkeypatch, implementation):
    """At the same step where values are read late, and beside a step that is not finite."""
    data = [*spoiled(12), f"optimizer.implementation={implementation}", "debug.non_finite=skip"]
    call, count = TokenLoss.__call__, itertools.count()

    def infinite(*args):
        return call(*args) * (float("inf") if next(count) % STEPS == 14 else 1)

    monkeypatch.setattr(TokenLoss, "__call__", infinite)
    logged = jobs.train(tmp_path / "log", *data, *on("log"))
    assert spikes(logged)[0] == 12 and logged.folder.row["skipped_steps"] == 1
    ends = []
    for late in (0, 1):
        monkeypatch.setitem(LATE_STEPS, "cpu", late)
        done = jobs.train(tmp_path / f"skip{late}", *data, *on("skip"))
        assert spikes(done) == [12]
        evidence = torch.load(done.folder.path / "evidence" / "step12-rank0.pt")
        assert evidence["inputs"].shape == (8, 32)
        assert (done.folder.row["skipped_steps"], done.folder.row["spikes"]) == (2, 1)
        ends.append(numbers(done))
    assert ends[0] == ends[1]
    assert ends[0][:12] == numbers(logged)[:12] and ends[0][12] < numbers(logged)[12]


@pytest.mark.parametrize(("late", "count", "batches"), [(0, 1, [12, 14]), (1, 9, [11, 12, 13, 14])])
def test_rows_after_a_rewind_are_those_of_a_run_without_the_batches(
    spoiled, tmp_path, monkeypatch, late, count, batches
):
    """The second spike goes back to the same checkpoint, and what was left out stays so."""
    monkeypatch.setitem(LATE_STEPS, "cpu", late)
    options = "checkpoint.interval=10 metrics.tensors=norms metrics.tensors_interval=1"
    data = [*spoiled(12, 14), *options.split()]
    rewinds = (*on("rewind"), f"debug.spike_batches={count}")
    done = jobs.train(tmp_path / "rewind", *data, *rewinds)
    never = jobs.train(tmp_path / "never", *data, f"data.leave_out={batches}")
    assert numbers(done) == numbers(never)
    found, expected = (read_tensors(each.folder.path) for each in (done, never))
    assert found.steps.tolist() == list(range(1, STEPS + 1))
    assert (found.data == expected.data).all()
    row = done.folder.row
    assert (row["spikes"], row["left_out_batches"], row["start_step"]) == (2, len(batches), 0)


LAYOUTS = {
    "one rank": "parallelism=single",
    "fsdp": "parallelism=fsdp parallelism.dp_shard=2 checkpoint=async",
    "fsdp with tp": "parallelism=fsdp_tp parallelism.dp_shard=2 parallelism.tp=2",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rewound_run_is_bitwise_the_one_that_never_had_the_batches(
    pool, spoiled, tmp_path, layout
):
    """Also when it stops and resumes on another layout."""

    def run(name, layout, *own, stop=None):
        folder = tmp_path / name / layout
        folder.mkdir(parents=True)
        options = ("checkpoint.interval=5", f"checkpoint.folder={tmp_path}/{name}/all")
        job = jobs.tiny(*spoiled(12, 16), *options, *LAYOUTS[layout].split(), *own)
        return pool.run(job.world_size, train, job.to_json(), str(folder), stop)

    other = "fsdp" if layout == "one rank" else "one rank"
    for name in (layout, other):
        stop = 14 if name == layout else None
        rewound = run("rewind", name, *on("rewind"), stop=stop)
        never = run("never", name, "data.leave_out=[12,16]", stop=stop)
        for one, two in zip(rewound, never, strict=True):
            assert (one.losses, one.norms, one.batches) == (two.losses, two.norms, two.batches)
            assert one.state == two.state
    assert rewound[0].facts["left_out_batches"] == 2
    assert any("back to step 14, without batches [16]" in each for each in rewound[0].messages)
    (spike,) = (each for each in rewound[0].messages if each.startswith("spike"))
    assert re.match(
        r"spike in step 15: loss .* \(z-score .*\), gradient norm .* \(z-score .*\); ", spike
    )
    assert "evidence" in spike


def test_a_rewind_that_cannot_be_ends_the_run(spoiled, tmp_path, monkeypatch):
    early = jobs.train(tmp_path / "early", *spoiled(12), *on("rewind"))
    assert ": there is no checkpoint to go back to" in early.folder.row["error.message"]
    monkeypatch.setattr("harness.metrics.spikes.MOST_REWINDS", 1)
    options = [*spoiled(12, 14), *on("rewind"), "checkpoint.interval=10"]
    often = jobs.train(tmp_path / "often", *options)
    assert often.code == EXIT_NON_FINITE
    assert "the run has gone back 1 times to step 10" in often.folder.row["error.message"]


def test_a_damaged_checkpoint_to_go_back_to_is_named(spoiled, tmp_path, monkeypatch):
    base = [*spoiled(12), *on("rewind")]
    first = jobs.train(tmp_path / "first", *base, "training.steps=10", "checkpoint.interval=10")
    path = first.folder.path / "checkpoints" / "step-10"
    load = [f"checkpoint.initial_load_path={path}", "checkpoint.initial_load_model_only=false"]
    load += ["checkpoint.allow_changed=[training.steps]"]
    damaged = DamagedCheckpoint("a file is missing")
    monkeypatch.setattr("harness.checkpoint.load.open_checkpoint", Mock(side_effect=damaged))
    second = jobs.train(tmp_path / "second", *base, *load)
    message = second.folder.row["error.message"]
    assert f"no checkpoint can be used ({path}: a file is missing)" in message


def test_batches_that_a_checkpoint_has_read_cannot_be_left_out(spoiled, tmp_path):
    base = [*spoiled(), "training.steps=6", "checkpoint.interval=4"]
    first = jobs.train(tmp_path / "first", *base)
    again = [
        *base,
        f"checkpoint.initial_load_path={first.folder.path}/checkpoints/step-4",
        "checkpoint.initial_load_model_only=false",
        "checkpoint.allow_changed=[data.leave_out]",
    ]
    late = jobs.train(tmp_path / "late", *again, "data.leave_out=[3,5]").folder.row["error.message"]
    assert late.startswith("data.leave_out=[3]: ") and "step-4 is after batch 4" in late
    assert jobs.train(tmp_path / "early", *again, "data.leave_out=[5]").code == 0


@pytest.mark.parametrize("option", ["data.leave_out=[3]", "debug.spikes=rewind"])
def test_a_loader_that_cannot_leave_out_batches_is_refused(monkeypatch, option):
    monkeypatch.setattr(SampleLoader, "leaves_out", False)
    tokenizer = build_tokenizer(jobs.tiny().tokenizer)
    assert loader_of(jobs.tiny(), tokenizer, range(1)).next()
    job = jobs.tiny(option, "checkpoint=sync")
    with pytest.raises(
        ConfigError, match=r"SampleLoader of data\.kind=synthetic leaves out no batch"
    ):
        loader_of(job, tokenizer, range(1))
    assert loader_of(job, tokenizer, range(1), "validation").next()
