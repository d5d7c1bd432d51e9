"""The loader: samples depend on the step, never on how the batch is split over ranks or on resumes."""

import dataclasses
import threading
import time
import traceback
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import torch
from cases import texts
from equal import assert_equal
from loaders import (
    BOS,
    CHANGES,
    B,
    T,
    ids_of,
    loader,
    local,
    mixture,
    packed,
    ranks_of,
    resumed,
    scheduled,
    split_rows,
    steps,
    streamed,
    with_stream,
    write_texts,
)
from one_line import one_line
from processes import until

from harness.compose.composer import compose_job, compose_points
from harness.config.data import DataConfig
from harness.config.training import Sizes
from harness.data.batch import IGNORE_INDEX, DeviceBatch, count_valid
from harness.data.loader import Cursor, merge_states
from harness.data.prefetch import Prefetcher
from harness.data.tokenizing import is_held_out
from harness.launch import train
from harness.launch.inputs import require_vocabulary
from harness.util.errors import ConfigError, DataError, UserError

STEPS = 14
SYNTHETIC = DataConfig(kind="synthetic", mask_fraction=0.3)
SOURCES = {
    "local": local,
    "synthetic": lambda: SYNTHETIC,
    "a file per row": partial(streamed, B, attend_across_documents=False),
    "files shared by rows": partial(streamed, 3, attend_across_documents=False),
    "mixture": partial(mixture, weight_changes=[{"step": 99, "math": 1}]),
    "mixture with a stream": partial(with_stream, B),
    "mixture with a shared stream": partial(with_stream, 3),
}


@pytest.mark.usefixtures("opened_once")
@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("source", SOURCES)
def test_any_ranks_and_any_resume_read_the_same(source, changes):
    data, sizes = SOURCES[source](), Sizes(B, T, *CHANGES[changes])
    expected = steps(ranks_of(data, 1, sizes=sizes), STEPS)
    assert not torch.equal(expected[-1][0], expected[-2][0])
    layouts = cycle((8, 1, 4, 2) if changes == "none" else (2, 1))
    reading, at = ranks_of(data, next(layouts), sizes=sizes), 0
    # The second resume of a stream used to lose positions.
    for stop in (1, 3, 4, 5, 8, 11, STEPS):
        assert_equal(steps(reading, stop - at), expected[at:stop], f"steps {at} to {stop}")
        state, at = reading[0].state_dict(), stop
        assert state["step"] == stop
        if "slots" not in state and "mixture" not in state:
            assert state["samples"] * T + state.get("tokens", 0) == sizes.position(stop)
        reading = resumed(reading, ranks_of(data, next(layouts), sizes=sizes))
    for each in reading:
        each.reset()
    assert_equal(steps(reading, 2), expected[:2], "after a reset")


@pytest.mark.usefixtures("opened_once")
@pytest.mark.parametrize("source", SOURCES)
def test_batches_that_are_left_out_are_read_by_no_step(source):
    """Those of the job, and those that a state names; on any ranks."""
    data, left_out = SOURCES[source](), [1, 5, 6, 9]
    every = enumerate(steps(ranks_of(data, 1), STEPS), 1)
    expected = [batch for number, batch in every if number not in left_out]
    some = dataclasses.replace(data, leave_out=left_out[:2])
    reading, at = ranks_of(some, 4), 0
    for stop, ranks in ((3, 1), (4, 2), (6, 8), (len(expected), 1)):
        assert_equal(steps(reading, stop - at), expected[at:stop], f"steps {at} to {stop}")
        reading, at = resumed(reading, ranks_of(some, ranks)), stop
        if stop == 3:
            reading[0].load_state_dict({**reading[0].state_dict(), "leave_out": left_out[2:]})
    assert reading[0].state_dict()["batch"] == STEPS


def test_a_batch_that_is_left_out_has_the_size_of_the_step_that_would_have_read_it():
    cursor = Cursor(range(8), Sizes(8, T, [[3, 4]]), [2, 5])
    assert [cursor.advance()[0].number for _ in range(4)] == [0, 8, 12, 24]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"shuffle": False},
        {"mask_document_boundary": False},
        {"attend_across_documents": True},
        {"validation_fraction": 0.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("changes", CHANGES)
def test_every_step_reads_the_tokens_of_the_rule(fields, changes):
    """Over several epochs; validation is in the order of the files, whatever the seed."""
    data, texts, sizes = local(**fields), write_texts(), Sizes(B, T, *CHANGES[changes])
    for split in ("train", "validation") if data.validation_fraction else ("train",):
        held_out = [is_held_out(number, data.validation_fraction) for number in range(len(texts))]
        own = [
            text
            for text, held in zip(texts, held_out, strict=True)
            if held == (split == "validation")
        ]
        seed = 3 if data.shuffle and split == "train" else None
        samples = packed(ids_of(own), seed, masks=data.mask_document_boundary)
        expected = list(scheduled(samples, CHANGES[changes], STEPS))
        read = loader(data, seed=3, sizes=sizes, split=split)
        kept = 2 if data.attend_across_documents else 3
        assert_equal(steps([read], STEPS), [step[:kept] for step in expected])
        assert read.samples_per_epoch == (sum(map(len, ids_of(own))) - 1) // T < STEPS * B


@pytest.mark.parametrize("changes", CHANGES)
def test_tokens_and_the_steps_that_train_them(changes):
    sizes, trained = Sizes(B, T, *CHANGES[changes]), 0
    samples = packed([[1] * 999])
    for step, batch in enumerate(scheduled(samples, CHANGES[changes], STEPS), start=1):
        assert sizes.steps_for(trained + 1) == step
        trained += batch[0].numel()
        assert sizes.tokens(step) == trained
        assert sizes.steps_for(trained) == step


def test_the_batch_size_only_cuts_the_sequence_of_synthetic_samples_and_seeds_differ():
    inputs, labels = steps([loader(SYNTHETIC, global_batch_size=6 * B)], 1)[0]
    threes = steps([loader(SYNTHETIC, global_batch_size=3)], 16)
    assert_equal([torch.cat(parts) for parts in zip(*threes, strict=True)], [inputs, labels])
    valid = labels[:, :-1] != IGNORE_INDEX
    assert_equal(labels[:, :-1][valid], inputs[:, 1:][valid])
    for other in ({"seed": 1}, {"seed": -1}, {"split": "validation"}):
        found = steps([loader(SYNTHETIC, **other)], 1)
        assert not torch.equal(found[0][0], inputs[:B]), other
        assert_equal(found, steps([loader(SYNTHETIC, **other)], 1))


def test_validation_from_its_own_files():
    Path("held").mkdir()
    Path("held/v.txt").write_text("v" * 100)
    data = local(validation_paths=["held/*"])
    batch = loader(data, split="validation", seed=5).next()
    assert set(batch.inputs_BT.flatten().tolist()) == {BOS, ord("v")}
    assert not any((step[0] == ord("v")).any() for step in steps([loader(data)], 20))


def test_synthetic_masks_unevenly_and_never_everything():
    labels = loader(SYNTHETIC, global_batch_size=512, seq_len=64).next().labels_BT
    share = (labels == IGNORE_INDEX).float().mean(dim=1)
    assert abs(share.mean().item() - 0.3) < 0.03
    assert share.min() < 0.05 and 0.55 < share.max() < 0.65 and share.std() > 0.1
    half = dataclasses.replace(SYNTHETIC, mask_fraction=0.5)
    assert (loader(half, global_batch_size=256, seq_len=1).next().labels_BT != IGNORE_INDEX).all()


@pytest.mark.parametrize(
    ("text", "settings", "says"),
    [
        (
            "ab",
            {},
            r"4 tokens \(documents: 1\) are fewer than one sample of training.seq_len \+ 1 = 17",
        ),
        ("a" * 14, {}, r"16 tokens \(documents: 1\) are fewer than one sample"),
        ("a" * 99, {"model_vocab_size": 257}, "model.vocab_size=257: the tokenizer has 258 tokens"),
        ("a" * 99, {"split": "validation"}, r"validation documents: 0 tokens .documents: 0."),
        ("", {}, "holds no text"),
    ],
)
def test_unusable_data(text, settings, says):
    Path("a.txt").write_text(text)
    data = DataConfig(paths=["a.txt"], validation_fraction=0.01, cache_dir="cache")
    with one_line(UserError, says):
        loader(data, **settings)


@pytest.mark.parametrize(
    ("loads", "saved", "says"),
    texts("""
        local           a file per row  is in a streamed dataset, and the job reads one source that is not
        a file per row  local  is in one source that is not streamed, and the job reads a streamed dataset
        mixture         local  is in one source that is not streamed, and the job reads a mixture
        local           mixture  is in a mixture, and the job reads one source
    """),
)
def test_positions_of_other_kinds_are_refused(loads, saved, says):
    state = loader(SOURCES[saved]()).state_dict()
    with one_line(DataError, says):
        loader(SOURCES[loads]()).load_state_dict(state)


def test_positions_of_some_ranks_or_of_another_batch_are_refused():
    with one_line(DataError, "different steps: 3, 4"):
        merge_states([{"step": 3}, {"step": 4}])
    stream, both = streamed(3), with_stream(B)
    half = loader(stream, split_rows(2)[0]).state_dict()
    with one_line(DataError, r"has no rows 4, 5, 6, 7; merge the states"):
        loader(stream).load_state_dict(half)
    with one_line(DataError, r"global_batch_size=4; the state was saved with 8"):
        loader(stream, global_batch_size=4).load_state_dict(loader(stream).state_dict())
    half = loader(both, split_rows(2)[0]).state_dict()
    with one_line(DataError, r"no c4/4 \(source/row\); merge the states"):
        loader(both).load_state_dict(half)


# -- prefetching in a thread ----


@pytest.fixture
def no_thread_left():
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def prefetched(depth=2):
    inner = loader(SYNTHETIC)
    return inner, Prefetcher(inner, depth, torch.device("cpu"))


@pytest.mark.usefixtures("no_thread_left")
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_batches_are_in_order_and_the_state_ignores_prefetched_ones(depth):
    alone = loader(SYNTHETIC)
    expected = [alone.next() for _ in range(9)]
    inner, read = prefetched(depth)
    for number in range(6):
        assert read.state_dict()["step"] == number
        batch = read.next()
        assert isinstance(batch, DeviceBatch)
        assert_equal([batch.inputs_BT, batch.labels_BT], list(expected[number][:2]))
        # The thread has counted them.
        assert count_valid(batch) == count_valid(expected[number]) < B * T
    # As many as the queue holds, and the one that waits for a place in it.
    until(lambda: inner.state_dict()["step"] == 6 + depth + 1, what="`depth` prefetched batches")
    time.sleep(0.1)
    assert inner.state_dict()["step"] == 6 + depth + 1
    assert read.state_dict()["step"] == 6
    read.close()
    # A thread that waited for the queue would be abandoned, and its batches not read again.
    assert_equal(read.next().inputs_BT, expected[6].inputs_BT, "prefetched batches are lost")
    read.load_state_dict({"step": 7, "samples": 7 * B})
    assert read.state_dict()["step"] == 7
    assert_equal(read.next().inputs_BT, expected[7].inputs_BT)
    read.reset()
    assert_equal(read.next().inputs_BT, expected[0].inputs_BT)
    read.close()


@pytest.mark.usefixtures("no_thread_left")
def test_an_exception_of_the_thread_is_raised_in_the_loop_after_earlier_batches():
    inner, read = prefetched()
    own = inner.next

    def breaks():
        if inner.state_dict()["step"] == 3:
            raise DataError("there is no batch 3")
        return own()

    inner.next = breaks
    for _ in range(3):
        read.next()
    for _ in range(2):
        with one_line(DataError, "there is no batch 3") as raised:
            read.next()
    frames = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert "_run" in frames and frames[-1] == "breaks", "the traceback is lost"
    read.close()


# -- a tokenizer with more tokens than the model's vocabulary is refused before ranks start ----

TEXT = ["data=python_stdlib", "model=llama3_tiny", "model.vocab_size=256"]
REFUSED = r"model.vocab_size=256: the tokenizer has 258 tokens.*; would work: 258 and more, another tokenizer"


def test_a_job_that_reads_text():
    with one_line(ConfigError, REFUSED):
        require_vocabulary(compose_job([*TEXT, "tokenizer=bytes"]))
    require_vocabulary(compose_job([*TEXT, "tokenizer=bytes", "model.vocab_size=258"]))
    require_vocabulary(compose_job([*TEXT[1:], "tokenizer=bytes", "data=synthetic"]))


def test_points_of_a_sweep_are_skipped(monkeypatch):
    seen = []
    monkeypatch.setattr("harness.launch.sweep.run.sweep", seen.extend)
    train.train_sweep(compose_points([*TEXT, "tokenizer=bytes", "model.vocab_size=256,258"]))
    refused, legal = seen
    assert refused.job is None and "the tokenizer has 258 tokens" in refused.reason
    assert legal.job is not None


def test_a_missing_file_is_found_before_ranks_start(tmp_path):
    missing = [
        "tokenizer=llama3",
        f"tokenizer.path={tmp_path}/tokenizer.model",
        "model.vocab_size=128256",
    ]
    with one_line(UserError, r"^tokenizer file .*/tokenizer.model: No such file"):
        require_vocabulary(compose_job([*TEXT, *missing]))
    require_vocabulary(compose_job([*TEXT, *missing, "cluster=slurm_cpu"]))  # nodes may have it
