"""Datasets of the `datasets` library, streamed or tokenized first, from local files only."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import loaders
import pytest
import torch
from equal import assert_equal
from loaders import BYTES, T, split_rows, steps

from harness.config.data import DataConfig
from harness.data import sources
from harness.data.loader import IGNORE_INDEX, merge_states
from harness.util.errors import ConfigError, DataError

B = 4
STREAMED = {"streaming": True, "shuffle": False, "workers": 0}


def write_jsonl(name, texts, field="text"):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("".join(json.dumps({field: text, "n": i}) + "\n" for i, text in enumerate(texts)))


def text_of(i):
    return f"<{i:03}>" + "abcdefghij"[i % 10] * (i * i % 23) if i % 6 else ""


def streamed(files):
    """120 documents, some empty, one long, in as many files as rows (read by file) or fewer (by example)."""
    texts = [text_of(i) for i in range(120)]
    texts[50] = "long" * 60
    for shard in range(files):
        write_jsonl(f"corpus/train-{shard}.jsonl", texts[shard::files])
    write_jsonl("corpus/validation-0.jsonl", [f"validation {i}" for i in range(40)])
    folder = str(Path("corpus").absolute())
    return DataConfig(kind="hub", dataset=folder, validation_split="validation", **STREAMED)


@pytest.fixture(params=[4, 3], ids=["a file per row", "files shared by rows"])
def data(request):
    return streamed(request.param)


loader = partial(loaders.loader, global_batch_size=B)


@pytest.fixture
def opened_once(monkeypatch):
    """Loaders of the same data share a dataset, which has no position of its own."""
    opened = {}

    def open_once(data, split):
        key = repr(data), split
        if key not in opened:
            opened[key] = sources.open_dataset(data, split)
        return opened[key]

    monkeypatch.setattr("harness.data.streaming.open_dataset", open_once)


def tokens_of_row(batches, row):
    """Tokens that a row read: the inputs of its samples, concatenated."""
    return torch.cat([batch[0, row] for batch in batches]).tolist()


def test_documents_are_numbered(data):
    numbered = loader(dataclasses.replace(data, attend_across_documents=False))
    plain = loader(data)
    for _ in range(6):
        batch, expected = numbered.next(), plain.next()
        assert_equal(batch.inputs_BT, expected.inputs_BT)
        begins = torch.zeros_like(batch.inputs_BT)
        begins[:, 1:] = (batch.labels_BT[:, :-1] == IGNORE_INDEX).long()
        assert begins.any()
        assert_equal(batch.documents_BT, begins.cumsum(1))


def test_labels_continue_and_boundaries_are_masked(data):
    one = steps([loader(data)], 30)
    for row in range(B):
        inputs = torch.cat([batch[0, row] for batch in one])
        labels = torch.cat([batch[1, row] for batch in one])[:-1]
        boundary = inputs[1:] == BYTES.bos_id
        assert_equal(labels == IGNORE_INDEX, boundary)
        assert_equal(labels[~boundary], inputs[1:][~boundary])
        assert boundary.any()
    open_ = DataConfig(**{**vars(data), "mask_document_boundary": False})
    assert all((batch[1] != IGNORE_INDEX).all() for batch in steps([loader(open_)], 10))


@pytest.mark.usefixtures("opened_once")
@pytest.mark.parametrize("ranks", [1, 4])
def test_resume_anywhere_on_another_number_of_ranks(data, ranks):
    expected = steps([loader(data)], 70)  # several epochs of every row
    halves = [loader(data, rows) for rows in split_rows(2, B)]
    for step in range(60):
        state = json.loads(json.dumps(merge_states([half.state_dict() for half in halves])))
        assert state["step"] == step
        if step % 7 == 0:
            resumed = [loader(data, rows) for rows in split_rows(ranks, B)]
            for each in resumed:
                each.load_state_dict(state)
            assert_equal(expected[step : step + 3], steps(resumed, 3), f"step {step}")
        steps(halves, 1)


def test_after_the_last_document_comes_the_first(data):
    one = steps([loader(data)], 60)
    for row in range(B):
        tokens = tokens_of_row(one, row)
        start = tokens.index(BYTES.bos_id, 1)
        first = tokens[: start + 1]
        assert sum(tokens[i : i + len(first)] == first for i in range(len(tokens))) > 1


def test_validation_has_its_own_split(data):
    validation = steps(loader(data, split="validation"), 5)
    assert "validation" in BYTES.decode(tokens_of_row(validation, 0))
    data = dataclasses.replace(data, validation_split=None)
    with pytest.raises(ConfigError, match=r"data\.validation_split"):
        loader(data, split="validation")


def test_another_batch_size_is_refused(data):
    state = loader(data).state_dict()
    with pytest.raises(DataError, match=r"global_batch_size=8; the state was saved with 4"):
        loader(data, range(8), global_batch_size=8).load_state_dict(state)


def test_states_that_do_not_fit(data):
    half = loader(data, range(2)).state_dict()
    with pytest.raises(DataError, match=r"has no rows 2, 3; merge the states"):
        loader(data).load_state_dict(half)
    with pytest.raises(DataError, match=r"data\.streaming is true"):
        loader(data).load_state_dict({"step": 3})


def test_fewer_documents_than_rows():
    write_jsonl("few.jsonl", ["one document only"])
    with pytest.raises(DataError, match=r"row 1 of 4 holds no text; it may have fewer documents"):
        loader(of_files("few.jsonl", **STREAMED)).next()


def test_a_streamed_document_longer_than_many_batches():
    write_jsonl("long.jsonl", ["x" * 1_000_000] * B)
    batch = loader(of_files("long.jsonl", **STREAMED)).next()
    assert batch.inputs_BT.tolist() == [[BYTES.bos_id] + [ord("x")] * (T - 1)] * B


def of_files(*files, **settings):
    return DataConfig(kind="hub", dataset="json", data_files=list(files), cache_dir="cache", **settings)


def test_not_streamed_is_tokenized_once(monkeypatch):
    write_jsonl("a.jsonl", [text_of(i) for i in range(100)], field="body")
    data = of_files("a.jsonl", text_field="body", validation_fraction=0.2)
    one = steps([loader(data)], 20)
    assert_equal(one, steps([loader(data, rows) for rows in split_rows(2, B)], 20))
    assert len(list(Path("cache").iterdir())) == 1
    loader(data, split="validation").next()
    assert len(list(Path("cache").iterdir())) == 1
    write_jsonl("a.jsonl", [text_of(i) for i in range(101)], field="body")
    loader(data)
    assert len(list(Path("cache").iterdir())) == 2, "changed files are tokenized again"


def test_not_streamed_with_a_validation_split(data):
    table = DataConfig(**{**vars(data), "streaming": False, "workers": 1, "cache_dir": "cache"})
    batch = loader(table, split="validation").next()
    assert "validation" in BYTES.decode(batch.inputs_BT.flatten().tolist())


@pytest.mark.parametrize("streaming", [True, False])
def test_unusable_datasets(streaming):
    settings = STREAMED if streaming else {}
    write_jsonl("a.jsonl", ["x" * 99] * 9)
    with pytest.raises(DataError, match=r"no (column|field) 'body' among n, text; set data.text_field"):
        loader(of_files("a.jsonl", text_field="body", **settings)).next()
    with pytest.raises(DataError, match=r"field 'n' holds int, not text"):
        loader(of_files("a.jsonl", text_field="n", **settings)).next()
    with pytest.raises(DataError, match=r"dataset json, split test: cannot be opened"):
        loader(DataConfig(**{**vars(of_files("a.jsonl", **settings)), "split": "test"}))
    with pytest.raises(DataError, match=r"dataset json, split train: cannot be opened: FileNotFound"):
        loader(of_files("nothing.jsonl", **settings))
    Path("bad.jsonl").write_text('{"text": "x"}\n{"text": ')
    with pytest.raises(DataError, match=r"dataset json, split train") as caught:
        loader(of_files("bad.jsonl", **settings)).next()
    assert "\n" not in str(caught.value)


def test_a_dataset_that_does_not_exist(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    data = DataConfig(kind="hub", dataset="nobody/nothing", subset="en", streaming=True, shuffle=False)
    with pytest.raises(DataError, match=r"dataset nobody/nothing/en, split train: cannot be opened"):
        loader(data)
