"""The token cache: what it holds, when it is built, and that nobody sees half of one."""

import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import harness.data.cache as cache
from harness.data import DataConfig, TokenizerConfig
from harness.data.cache import is_held_out, open_cache
from harness.data.sources import LocalFiles
from harness.data.tokenizer import build_tokenizer
from harness.errors import DataError

BYTES = build_tokenizer(TokenizerConfig("bytes"))


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_documents(*texts):
    for index, text in enumerate(texts):
        Path(f"{index:04}.txt").write_text(text)


def opened(split="train", held_out=0.0, tokenizer=BYTES, barrier=None, is_builder=True, **settings):
    source = LocalFiles(DataConfig(paths=["*.txt"], **settings), "paths")
    return open_cache(
        source,
        tokenizer,
        split=split,
        held_out=held_out,
        cache_dir="cache",
        barrier=barrier,
        is_builder=is_builder,
    )


def documents_of(split):
    starts = [*split.starts, len(split.tokens)]
    documents = [split.tokens[a:b].tolist() for a, b in pairwise(starts)]
    assert all(document[0] == BYTES.bos_id and document[-1] == BYTES.eos_id for document in documents)
    return [bytes(document[1:-1]).decode() for document in documents]


def test_tokens_and_starts():
    write_documents("ab", "", "c")
    split = opened()
    assert split.tokens.tolist() == [256, 97, 98, 257, 256, 99, 257], "the empty document is skipped"
    assert split.starts.tolist() == [0, 4]
    assert split.tokens.dtype == np.uint16


def test_a_large_vocabulary_gets_wider_tokens():
    class Large(type(BYTES)):
        vocab_size = 2**16 + 1
        fingerprint = "large"

        def encode(self, text):
            return [2**16]

    write_documents("a")
    assert opened(tokenizer=Large()).tokens.tolist() == [256, 2**16, 257]


def test_documents_of_many_batches_keep_their_order(monkeypatch):
    monkeypatch.setattr(cache, "_CHARS_PER_BATCH", 5)
    texts = [str(i) * (i % 7 + 1) for i in range(40)]
    write_documents(*texts)
    assert documents_of(opened()) == texts


def test_held_out_documents_are_apart_and_none_is_lost():
    texts = [f"document {i}" for i in range(200)]
    write_documents(*texts)
    train, validation = (documents_of(opened(split, held_out=0.2)) for split in ("train", "validation"))
    assert sorted(train + validation) == sorted(texts)
    assert validation == [text for i, text in enumerate(texts) if is_held_out(i, 0.2)]
    assert 20 < len(validation) < 60
    assert {i for i in range(200) if is_held_out(i, 0.1)} < {i for i in range(200) if is_held_out(i, 0.2)}
    assert not any(is_held_out(i, 0.0) for i in range(1000))


def test_built_once_and_again_when_something_changes(monkeypatch):
    builds = []
    build = cache._build
    monkeypatch.setattr(cache, "_build", lambda *arguments: (builds.append(1), build(*arguments)))
    write_documents("ab")
    opened(), opened()
    assert len(builds) == 1
    opened(held_out=0.5)
    assert len(builds) == 2
    python = build_tokenizer(TokenizerConfig("sentencepiece", "asset:python_2k.model"))
    opened(tokenizer=python)
    assert len(builds) == 3
    write_documents("ac")
    assert documents_of(opened()) == ["ac"]
    assert len(builds) == 4


def test_only_the_builder_builds():
    write_documents("ab")
    with pytest.raises(
        DataError, match=r"not visible to this rank; data.cache_dir must be a folder that all"
    ):
        opened(is_builder=False, barrier=lambda: None)
    assert not Path("cache").exists()
    seen = []
    opened(barrier=lambda: seen.append(len(list(Path("cache").iterdir()))))
    assert seen == [1], "the builder waits with the cache in place"
    assert opened(is_builder=False).tokens.tolist() == [256, 97, 98, 257]


def test_two_builders_at_once_are_harmless(monkeypatch):
    write_documents("ab", "cd")
    both_written = threading.Barrier(2)
    write = cache._write
    monkeypatch.setattr(cache, "_write", lambda *arguments: (write(*arguments), both_written.wait(20)))
    found = []
    threads = [threading.Thread(target=lambda: found.append(documents_of(opened()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["ab", "cd"], ["ab", "cd"]]
    assert len(list(Path("cache").iterdir())) == 1, "nothing unfinished is left behind"


def test_a_failed_build_leaves_nothing_behind():
    write_documents("ab")
    Path("0001.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"0001\.txt"):
        opened()
    assert list(Path("cache").iterdir()) == []


def test_no_text_at_all():
    write_documents("", "")
    with pytest.raises(DataError, match=r"data.paths=\[\*.txt\] holds no text"):
        opened()


def test_a_damaged_cache_is_not_read():
    write_documents("abc")
    opened()
    (tokens,) = Path("cache").glob("*/train.tokens")
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"train\.tokens is cut short; remove the folder"):
        opened()


def test_a_cache_dir_that_cannot_be_written():
    write_documents("abc")
    Path("cache").write_text("a file")
    with pytest.raises(DataError, match=r"data.cache_dir: cannot write to cache"):
        opened()
