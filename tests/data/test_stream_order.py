"""The order of streams, judged by an independent implementation and by `datasets`."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import chain, count, cycle, islice
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from tiers import THOROUGH, rest_is_thorough

from harness.config.data import DataConfig, TokenizerConfig
from harness.data.loader import build_loader, merge_states
from harness.data.stream_reader import RowReader
from harness.data.tokenizer import build_tokenizer
from harness.util.errors import DataError

BYTES = build_tokenizer(TokenizerConfig("bytes"))
T, STEPS, BUFFER = 16, 60 if THOROUGH else 30, 7


@pytest.fixture(autouse=True)
def datasets_are_opened_once(monkeypatch):
    open_dataset = sys.modules["harness.data.sources"].open_dataset
    opened = cache(lambda files: open_dataset(config_of(files), "train"))
    monkeypatch.setattr(
        "harness.data.streaming.open_dataset", lambda data, split: opened(tuple(data.data_files))
    )


def config_of(files, **settings):
    return DataConfig(
        "hub", dataset="json", data_files=list(files), streaming=True, **{"workers": 0} | settings
    )


def write(folder, shards):
    """Shards of different lengths, with empty documents."""
    files = [str(folder / f"{shard}.jsonl") for shard in range(shards)]
    for shard, file in enumerate(files):
        texts = [f"{shard}/{i}" * (i % 5) for i in range(9 + 6 * (shard % 3))]
        Path(file).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return files


def texts_of(file):
    return [json.loads(line)["text"] for line in Path(file).read_text().splitlines()]


def permutation(purpose, seed, number, length):
    digest = hashlib.sha256(f"{purpose}/{seed}/{number}".encode()).digest()
    words = np.random.SeedSequence(int.from_bytes(digest, "little"))
    return np.random.RandomState(np.random.MT19937(words)).permutation(length)


def passes_of(files, row, rows, seed) -> Iterator[list[str]]:
    """The documents of a row in each pass, as docs/howto/data.md says it; with a seed, shuffled."""
    cuts = -(-rows // len(files))
    parts = [texts_of(file)[cut::cuts] for cut in range(cuts) for file in files]
    blocks = count()
    for number in count():
        names = range(len(parts)) if seed is None else permutation("parts", seed, number, len(parts))
        # Parts of this pass are dealt where the pass before ended.
        mine = [part for i, part in enumerate(names, number * len(parts)) if i % rows == row]
        texts = [text for part in mine for text in parts[part] if text]
        if seed is None:
            yield texts
            continue
        shuffled = []
        for begin in range(0, len(texts), BUFFER):
            block = texts[begin : begin + BUFFER]
            order = permutation(f"documents of row {row}", seed, next(blocks), len(block))
            shuffled += [block[i] for i in order]
        yield shuffled


def documents_of(files, row, rows, seed) -> Iterator[str]:
    return chain.from_iterable(passes_of(files, row, rows, seed))


def samples_of(documents: Iterator[str]) -> Iterator[list[int]]:
    tokens: list[int] = []
    for text in documents:
        tokens += [256, *text.encode(), 257]
        while len(tokens) > T:
            yield tokens[: T + 1]
            tokens = tokens[T:]


def loaders_of(files, rows, ranks, seed):
    data = config_of(files, shuffle=seed is not None, **({} if seed is None else {"shuffle_buffer": BUFFER}))
    data.validate()
    shares = [range(rank * rows // ranks, (rank + 1) * rows // ranks) for rank in range(ranks)]
    return [
        build_loader(
            data, BYTES, seq_len=T, global_batch_size=rows, seed=seed or 0, rows=share, model_vocab_size=258
        )
        for share in shares
    ]


def inputs_of(loaders, steps):
    """``inputs[step][row]``"""
    return [torch.cat([loader.next().inputs_BT for loader in loaders]).tolist() for _ in range(steps)]


CASES = [(8, 4), (5, 4), (9, 6), (3, 8), (1, 4), (4, 6)]


@pytest.mark.parametrize("seed", [None, 3], ids=["stored order", "shuffled"])
@pytest.mark.parametrize(
    "case", rest_is_thorough(CASES, (5, 4), (3, 8)), ids=lambda case: "{} for {}".format(*case)
)
def test_rows_are_those_of_another_implementation(tmp_path, case, seed):
    """On any number of ranks, over several passes, and after resuming on another number of ranks."""
    shards, rows = case
    files = write(tmp_path, shards)
    streams = [samples_of(documents_of(files, row, rows, seed)) for row in range(rows)]
    expected = [[next(stream)[:T] for stream in streams] for _ in range(STEPS)]
    layouts = [ranks for ranks in (1, 2, 4, 8) if rows % ranks == 0]
    for ranks in layouts:
        assert inputs_of(loaders_of(files, rows, ranks, seed), STEPS) == expected
    loaders, step = loaders_of(files, rows, layouts[-1], seed), 0
    for number, stop in enumerate(stop for stop in (1, 2, 11, 24, 41) if stop < STEPS):
        assert inputs_of(loaders, stop - step) == expected[step:stop]
        state = json.loads(json.dumps(merge_states([loader.state_dict() for loader in loaders])))
        loaders, step = loaders_of(files, rows, layouts[number % len(layouts)], seed), stop
        for loader in loaders:
            loader.load_state_dict(state)
    assert inputs_of(loaders, STEPS - step) == expected[step:]


def streamed(files):
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True)


@pytest.mark.parametrize(("shards", "rows"), [(8, 4), (1, 4)])
def test_rows_are_the_nodes_of_the_library(tmp_path, shards, rows):
    files = write(tmp_path, shards)
    streams = []
    for row in range(rows):
        node = split_dataset_by_node(streamed(files), rank=row, world_size=rows)
        streams.append(samples_of(cycle([example["text"] for example in node if example["text"]])))
    expected = [[next(stream)[:T] for stream in streams] for _ in range(STEPS)]
    assert inputs_of(loaders_of(files, rows, 1, None), STEPS) == expected


def test_states_of_earlier_versions_go_on_in_their_order(tmp_path):
    files, rows = write(tmp_path, 3), 4
    slots, expected = {}, []
    for row in range(rows):
        node = split_dataset_by_node(streamed(files), rank=row, world_size=rows)
        examples = iter(node)
        done = [next(examples)["text"] for _ in range(row + 2)]
        slots[str(row)] = {"document": node.state_dict(), "offset": 0}
        rest = [example["text"] for example in examples]
        texts = chain(rest, cycle([*done, *rest]))
        expected.append(list(islice(samples_of(text for text in texts if text), STEPS)))
    loaders = loaders_of(files, rows, 2, None)
    for loader in loaders:
        loader.load_state_dict({"step": 5, "global_batch_size": rows, "slots": slots})
    for step in range(STEPS):
        assert inputs_of(loaders, 1) == [[samples[step][:T] for samples in expected]]
        state = json.loads(json.dumps(merge_states([loader.state_dict() for loader in loaders])))
        assert state["step"] == 6 + step
        for loader in loaders:
            loader.load_state_dict(state)


@pytest.fixture(scope="module")
def opened():
    """Every file that this process opens."""
    files, active = [], True
    # A hook cannot be removed.
    sys.addaudithook(
        lambda event, arguments: files.append(arguments[0]) if active and event == "open" else None
    )
    yield files
    active = False


@pytest.mark.parametrize("seed", [None, 0], ids=["stored order", "shuffled"])
@pytest.mark.parametrize(
    ("shards", "rows", "readers"), [(8, 4, 1), (6, 4, 1), (5, 4, 1), (3, 4, 2), (2, 8, 4), (1, 4, 4)]
)
def test_a_pass_opens_each_shard_once_or_once_for_each_row_that_shares_it(
    tmp_path, shards, rows, readers, seed, opened
):
    files = write(tmp_path, shards)
    expected = [next(passes_of(files, row, rows, seed)) for row in range(rows)]
    every = Counter(text for file in files for text in texts_of(file) if text)
    dataset, found = streamed(files), []
    opened.clear()
    for row in range(rows):
        reader = RowReader(
            dataset, BYTES, row, rows, "text", "it", seed or 0, None if seed is None else BUFFER
        )
        documents = islice(reader.read(reader.beginning), len(expected[row]))
        found.append([BYTES.decode(document.tokens.tolist()) for document in documents])
    times = Counter(file for file in opened if file in files)
    assert found == expected
    assert Counter(chain(*found)) == every
    if seed is None:
        assert times == dict.fromkeys(files, readers)
    else:  # The end of a pass is seen by the first document of the next.
        assert shards * readers <= times.total() <= shards * readers + rows


def test_positions_of_other_data_are_refused(tmp_path):
    files = write(tmp_path, 4)
    [before] = loaders_of(files, 4, 1, None)
    before.next()
    state = before.state_dict()
    [more] = loaders_of([*files, *write(tmp_path, 5)[4:]], 4, 1, None)
    with pytest.raises(DataError, match=r"row 0 of 4: the dataset has 5 shards, but 4 when the position was"):
        more.load_state_dict(state)
    [shuffled] = loaders_of(files, 4, 1, 0)
    with pytest.raises(DataError, match=r"saved with data\.shuffle=false; set data\.shuffle as it was"):
        shuffled.load_state_dict(state)


def test_validation_is_not_shuffled(tmp_path):
    data = config_of(write(tmp_path, 2), shuffle=True, validation_split="train")
    settings = {"seq_len": T, "global_batch_size": 2, "seed": 0, "rows": range(2), "model_vocab_size": 258}
    validation = build_loader(data, BYTES, split="validation", **settings)
    plain = build_loader(config_of(data.data_files, shuffle=False), BYTES, **settings)
    assert torch.equal(validation.next().inputs_BT, plain.next().inputs_BT)
