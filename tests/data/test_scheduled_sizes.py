"""Scheduled batch sizes and lengths: the tokens of every step, on any ranks and across resumes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import datasets  # noqa: F401
import loaders as loaders_
import numpy as np
import pytest
import torch
from equal import assert_equal
from loaders import BYTES, B, T, split_rows, steps

from harness.config.data import DataConfig
from harness.config.training import Sizes
from harness.data.loader import IGNORE_INDEX, Loader, merge_states

STEPS = 14
# (last step, size) of batches, and of sequences. In the last case steps of 8 tokens end inside a sample.
CHANGES = {
    "batch": ([(3, 4), (7, 2)], []),
    "length": ([], [(2, 4), (5, 8)]),
    "both": ([(3, 4), (7, 2)], [(2, 4), (5, 8)]),
    "inside a sample": ([(3, 2)], [(1, 4), (6, 8)]),
}


@pytest.fixture(params=CHANGES)
def changes(request: pytest.FixtureRequest) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    return CHANGES[request.param]


def documents() -> list[str]:
    return [f"{i:02}" * (1 + i * i % 11) if i != 7 else "long " * 40 for i in range(40)]


@pytest.fixture
def corpus() -> DataConfig:
    for i, text in enumerate(documents()):
        Path(f"{i:02}.txt").write_text(text)
    return DataConfig(paths=["*.txt"], cache_dir="cache", attend_across_documents=False)


def loader(data: DataConfig, changes, rows: range | None = None) -> Loader:
    return loaders_.loader(data, rows, seed=3, sizes=Sizes(B, T, *changes))


def loaders(data: DataConfig, changes, ranks: int) -> list[Loader]:
    return [loader(data, changes, rows) for rows in split_rows(ranks)]


def read_by_hand(changes) -> Iterator[np.ndarray]:
    """Inputs, labels and document numbers of every step, without the code under test.

    Packed documents are cut into samples of T tokens, which are shuffled by the rule of NEP 19 in
    ``harness/data/samples.py``; the sequence of samples is read from left to right.
    """
    from harness.data.samples import random_stream

    tokens, first = [], []
    for text in documents():
        tokens += [BYTES.bos_id, *text.encode(), BYTES.eos_id]
        first += [True] + [False] * (len(text) + 1)
    samples = (len(tokens) - 1) // T
    batch_sizes, lengths = changes
    position = 0  # tokens from the beginning of the shuffled sequence
    for step in range(1, STEPS + 1):
        rows = next((size for last, size in batch_sizes if step <= last), B)
        length = next((size for last, size in lengths if step <= last), T)
        while position % length:
            position += 1
        read = []
        for _ in range(rows):
            epoch, index = divmod(position // T, samples)
            order = random_stream("order", 3, epoch).permutation(samples)
            start = int(order[index]) * T + position % T
            labels = [IGNORE_INDEX if first[i] else tokens[i] for i in range(start + 1, start + length + 1)]
            numbers = np.cumsum([0] + [first[i] for i in range(start + 1, start + length)])
            read.append([tokens[start : start + length], labels, numbers.tolist()])
            position += length
        yield np.array(read).transpose(1, 0, 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_step_reads_the_tokens_of_the_rule(corpus: DataConfig, changes, ranks: int) -> None:
    expected = [torch.from_numpy(each) for each in read_by_hand(changes)]
    assert_equal(expected, steps(loaders(corpus, changes, ranks), STEPS))


@pytest.mark.parametrize("at", range(1, STEPS, 2))
def test_a_resume_on_other_ranks_reads_the_same(corpus: DataConfig, changes, at: int) -> None:
    expected = steps([loader(corpus, changes)], STEPS)
    two = loaders(corpus, changes, 2)
    steps(two, at)
    state = json.loads(json.dumps(merge_states([each.state_dict() for each in two])))
    again = loader(corpus, changes)
    again.load_state_dict(state)
    assert_equal(expected[at:], steps([again], STEPS - at))


def test_positions_are_those_of_the_schedule(corpus: DataConfig, changes) -> None:
    sizes, a_loader = Sizes(B, T, *changes), loader(corpus, changes)
    for step in range(1, STEPS + 1):
        a_loader.next()
        state = a_loader.state_dict()
        assert state["step"] == step
        assert state["samples"] * T + state.get("tokens", 0) == sizes.position(step)


def test_a_position_of_an_earlier_version_is_a_number_of_samples(corpus: DataConfig) -> None:
    expected = steps([loader(corpus, ([], []))], 5)
    a_loader = loader(corpus, ([], []))
    a_loader.load_state_dict({"step": 3, "samples": 3 * B})
    assert_equal(expected[3:], steps([a_loader], 2))


@pytest.fixture
def stream() -> DataConfig:
    for shard in range(3):
        lines = [json.dumps({"text": text}) + "\n" for text in documents()[shard::3]]
        Path("corpus").mkdir(exist_ok=True)
        Path(f"corpus/train-{shard}.jsonl").write_text("".join(lines))
    path = str(Path("corpus").absolute())
    return DataConfig(
        kind="hub", dataset=path, streaming=True, workers=0, shuffle=False, attend_across_documents=False
    )


def test_streams_read_on_where_their_row_stopped(stream: DataConfig, changes) -> None:
    """Row j of a batch of b rows reads stream j * B / b, on any ranks; a stream leaves out no token."""
    full = steps([loader(stream, ([], []))], STEPS)
    tokens = {row: torch.cat([each[0, row] for each in full]) for row in range(B)}
    done = dict.fromkeys(range(B), 0)
    found = steps([loader(stream, changes)], STEPS)
    for batch in found:
        for row, inputs in enumerate(batch[0]):
            of = row * B // len(batch[0])
            assert_equal(inputs, tokens[of][done[of] : done[of] + len(inputs)])
            done[of] += len(inputs)
    assert_equal(found, steps(loaders(stream, changes, 2), STEPS))
    two = loaders(stream, changes, 2)
    steps(two, 4)
    again = loader(stream, changes)
    again.load_state_dict(json.loads(json.dumps(merge_states([each.state_dict() for each in two]))))
    assert_equal(found[4:], steps([again], STEPS - 4))


def test_tokens_and_the_steps_that_train_them(changes) -> None:
    sizes, trained = Sizes(B, T, *changes), 0
    for step, batch in enumerate(read_by_hand(changes), start=1):
        assert sizes.steps_for(trained + 1) == step
        trained += batch[0].size
        assert sizes.tokens(step) == trained
        assert sizes.steps_for(trained) == step
