"""Datasets of the `datasets` library, from local files: the order of streams, and tables tokenized first."""

import dataclasses
import json
import sys
from collections import Counter
from itertools import accumulate, chain, count, cycle, islice
from pathlib import Path

import datasets
import pytest
import torch
from cases import rows
from equal import assert_equal
from loaders import (
    BOS,
    BYTES,
    CHANGES,
    EOS,
    T,
    ids_of,
    loader,
    permutation,
    ranks_of,
    resumed,
    steps,
    streamed,
    write_jsonl,
)
from one_line import one_line

from harness.config.data import DataConfig
from harness.config.training import Sizes
from harness.data.batch import IGNORE_INDEX
from harness.data.stream_reader import RowReader
from harness.util.errors import DataError

STEPS, BUFFER = 30, 7

pytestmark = pytest.mark.usefixtures("opened_once")


def of_files(*files, **settings):
    """A stream of files in stored order, which the rank itself reads."""
    settings = {"streaming": True, "shuffle": False, "workers": 0, **settings}
    return DataConfig("hub", dataset="json", data_files=list(files), cache_dir="cache", **settings)


def table(*files, **settings):
    return of_files(*files, streaming=False, workers=1, **settings)


def shuffled(seed):
    return {} if seed is None else {"shuffle": True, "shuffle_buffer": BUFFER}


def write(shards):
    """Shards of different lengths, with empty documents."""
    files = [f"{shard}.jsonl" for shard in range(shards)]
    for shard, file in enumerate(files):
        write_jsonl(file, [f"{shard}/{i}" * (i % 5) for i in range(9 + 6 * (shard % 3))])
    return files


def texts_of(file):
    return [json.loads(line)["text"] for line in Path(file).read_text().splitlines()]


def passes_of(files, row, rows, seed):
    """The documents of a row in each pass, as docs/howto/data.md says it; with a seed, shuffled."""
    cuts = -(-rows // len(files))
    parts = [texts_of(file)[cut::cuts] for cut in range(cuts) for file in files]
    blocks = count()
    for number in count():
        names = (
            range(len(parts)) if seed is None else permutation("parts", seed, number, len(parts))
        )
        # Parts of this pass are dealt where the pass before ended.
        mine = [part for i, part in enumerate(names, number * len(parts)) if i % rows == row]
        texts = [text for part in mine for text in parts[part] if text]
        if seed is None:
            yield texts
            continue
        in_order = []
        for begin in range(0, len(texts), BUFFER):
            block = texts[begin : begin + BUFFER]
            order = permutation(f"documents of row {row}", seed, next(blocks), len(block))
            in_order += [block[i] for i in order]
        yield in_order


def labelled(tokens):
    labels = [IGNORE_INDEX if token == BOS else token for token in tokens[1:]]
    return (
        tokens[:-1],
        labels,
        list(accumulate([0, *(int(token == BOS) for token in tokens[1:-1])])),
    )


def by_hand(streams, changes, number):
    """Steps of rows of these texts: row j of a batch of b rows reads on in stream j * len(streams) / b."""
    batch_sizes, lengths = changes
    rows, tokens = len(streams), []
    for stream in streams:
        ids = chain.from_iterable([BOS, *text.encode(), EOS] for text in stream if text)
        tokens.append(list(islice(ids, number * T + 1)))
    done, found = [0] * rows, []
    for step in range(1, number + 1):
        size = next((size for last, size in batch_sizes if step <= last), rows)
        length = next((size for last, size in lengths if step <= last), T)
        pieces = []
        for of in range(0, rows, rows // size):
            pieces.append(labelled(tokens[of][done[of] : done[of] + length + 1]))
            done[of] += length
        found.append([torch.tensor(column) for column in zip(*pieces, strict=True)])
    return found


@pytest.mark.parametrize("seed", [None, 3], ids=["stored order", "shuffled"])
@pytest.mark.parametrize(
    ("shards", "rows", "changes"),
    [(5, 4, "none"), (9, 6, "none"), (3, 8, "none"), *((3, 8, each) for each in list(CHANGES)[1:])],
)
def test_rows_are_those_of_another_implementation(shards, rows, changes, seed):
    """On any number of ranks, over several passes, and after resuming on another number of ranks."""
    files = write(shards)
    data = of_files(*files, attend_across_documents=False, **shuffled(seed))
    streams = [chain.from_iterable(passes_of(files, row, rows, seed)) for row in range(rows)]
    expected = by_hand(streams, CHANGES[changes], STEPS)
    layouts = [
        ranks for ranks in (1, 2, 4, 8) if rows % ranks == 0 and (changes == "none" or ranks < 4)
    ]
    settings = {
        "global_batch_size": rows,
        "seed": seed or 0,
        "sizes": Sizes(rows, T, *CHANGES[changes]),
    }
    for ranks in layouts:
        assert_equal(steps(ranks_of(data, ranks, **settings), STEPS), expected)
    reading, at = ranks_of(data, layouts[-1], **settings), 0
    for stop, ranks in zip((1, 2, 11, 24, STEPS), cycle(layouts), strict=False):
        assert_equal(steps(reading, stop - at), expected[at:stop])
        reading, at = resumed(reading, ranks_of(data, ranks, **settings)), stop


def opened_by_the_library(files):
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True)


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
    ("shards", "rows", "readers"), [(6, 4, 1), (5, 4, 1), (3, 4, 2), (2, 8, 4), (1, 4, 4)]
)
def test_a_pass_opens_each_shard_once_or_once_for_each_row_that_shares_it(
    shards, rows, readers, seed, opened
):
    files = [str(Path(file).absolute()) for file in write(shards)]
    expected = [next(passes_of(files, row, rows, seed)) for row in range(rows)]
    every = Counter(text for file in files for text in texts_of(file) if text)
    dataset, found = opened_by_the_library(files), []
    opened.clear()
    for row in range(rows):
        buffer = None if seed is None else BUFFER
        reader = RowReader(dataset, BYTES, row, rows, "text", "it", seed or 0, buffer)
        documents = islice(reader.read(reader.beginning), len(expected[row]))
        found.append([BYTES.decode(document.tokens.tolist()) for document in documents])
    times = Counter(file for file in opened if file in files)
    assert found == expected
    assert Counter(chain(*found)) == every
    if seed is None:
        assert times == dict.fromkeys(files, readers)
    else:  # The end of a pass is seen by the first document of the next.
        assert shards * readers <= times.total() <= shards * readers + rows


def test_positions_of_other_data_are_refused():
    files = write(5)
    state = loader(of_files(*files[:4]), global_batch_size=4).state_dict()
    more, mixed = of_files(*files), of_files(*files[:4], **shuffled(0))
    for data, says in (
        (more, r"row 0 of 4: the dataset has 5 shards, but 4 when the position was"),
        (mixed, r"saved with data\.shuffle=false; set data\.shuffle as it was"),
    ):
        with one_line(DataError, says):
            loader(data, global_batch_size=4).load_state_dict(state)


def test_validation_has_its_own_split_and_is_not_shuffled():
    files = write(2)
    data = of_files(*files, validation_split="train", shuffle=True)
    plain = steps([loader(of_files(*files))], 3)
    assert_equal(steps([loader(data, split="validation")], 3), plain)
    assert not torch.equal(steps([loader(data)], 3)[0][0], plain[0][0])
    for streaming in (True, False):
        data = dataclasses.replace(streamed(3), streaming=streaming, workers=0 if streaming else 1)
        rows = (
            loader(dataclasses.replace(data, cache_dir="cache"), split="validation")
            .next()
            .inputs_BT
        )
        assert "validation" in BYTES.decode(rows.flatten().tolist())


def test_fewer_documents_than_rows():
    write_jsonl("few.jsonl", ["one document only"])
    with one_line(DataError, r"row 1 of 8 holds no text; it may have fewer documents"):
        loader(of_files("few.jsonl")).next()


def test_not_streamed_is_tokenized_once():
    texts = [f"{i} " * (i % 9) for i in range(100)]
    write_jsonl("a.jsonl", texts, field="body")
    data = table("a.jsonl", text_field="body", validation_fraction=0.2)
    one = steps([loader(data)], 20)
    assert_equal(steps(ranks_of(data, 2), 20), one)
    loader(data, split="validation").next()
    assert len(list(Path("cache").iterdir())) == 1
    write_jsonl("a.jsonl", [*texts, "more"], field="body")
    loader(data)
    assert len(list(Path("cache").iterdir())) == 2, "changed files are tokenized again"
    everything = dataclasses.replace(data, validation_fraction=0.0)
    first = ids_of([*texts, "more"])[0]
    assert loader(everything).next().inputs_BT[0, : len(first)].tolist() == first


@pytest.mark.parametrize("make", [of_files, table])
def test_unusable_datasets(make):
    write_jsonl("a.jsonl", ["x" * 99] * 9)
    Path("bad.jsonl").write_text('{"text": "x"}\n{"text": ')
    for file, settings, says in rows("""
        a.jsonl        {text_field: body}  no (column|field) 'body' among n, text; set data.text_field
        a.jsonl        {text_field: n}     field 'n' holds int, not text
        a.jsonl        {split: test}       'dataset json, split test: cannot be opened'
        nothing.jsonl  {}                  'dataset json, split train: cannot be opened: FileNotFound'
        bad.jsonl      {}                  dataset json, split train
    """):
        with one_line(DataError, says):
            loader(make(file, **settings)).next()
