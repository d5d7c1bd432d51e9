"""The token cache: content, when it is built, and that readers never see a partial cache."""

import errno
import os
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from file_damages import all_damages, damage

import harness.data.cache as cache
import harness.util.store as store
from harness.config.data import DataConfig, TokenizerConfig
from harness.data.cache import open_cache
from harness.data.corpus import CorpusWriter
from harness.data.sources import LocalFiles
from harness.data.tokenizer import build_tokenizer
from harness.util.errors import DataError, MachineError
from harness.util.files import lock

BYTES = build_tokenizer(TokenizerConfig("bytes"))


def write_documents(*texts):
    for index, text in enumerate(texts):
        Path(f"{index:04}.txt").write_text(text)


def opened(split="train", held_out=0.0, tokenizer=BYTES, wait_for_all=None, is_builder=True):
    source = LocalFiles(DataConfig(paths=["*.txt"]), "paths")
    settings = {"cache_dir": "cache", "wait_for_all": wait_for_all, "is_builder": is_builder}
    return open_cache(source, tokenizer, split=split, held_out=held_out, **settings)


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


def test_built_once_and_rebuilt_when_something_changes(monkeypatch):
    builds = []
    build = cache._build
    monkeypatch.setattr(cache, "_build", lambda *a, **options: (builds.append(1), build(*a, **options)))
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
        opened(is_builder=False, wait_for_all=lambda: None)
    assert not Path("cache").exists()
    seen = []
    opened(wait_for_all=lambda: seen.append(len(list(Path("cache").iterdir()))))
    assert seen == [1], "the builder waits with the cache in place"
    assert opened(is_builder=False).tokens.tolist() == [256, 97, 98, 257]


def test_one_of_two_builders_builds_and_the_other_waits(monkeypatch):
    write_documents("ab", "cd")
    builds, write, waits = [], CorpusWriter.write_all, threading.Event()
    monkeypatch.setattr(
        CorpusWriter, "write_all", lambda *each: (builds.append(1), waits.wait(20), write(*each))
    )
    sleep = time.sleep
    monkeypatch.setattr(store.time, "sleep", lambda seconds: (waits.set(), sleep(seconds)))
    found = []
    threads = [threading.Thread(target=lambda: found.append(documents_of(opened()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["ab", "cd"], ["ab", "cd"]] and len(builds) == 1
    assert len(list(Path("cache").iterdir())) == 1, "nothing unfinished is left behind"


def full(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("prepare", "error", "says"),
    [
        (lambda: Path("0001.txt").write_bytes(b"\xff"), DataError, r"0001\.txt"),
        (lambda: write_documents("", ""), DataError, r"data.paths=\[\*.txt\] holds no text"),
        (lambda: None, MachineError, r"data\.cache_dir: cache: No space left on device"),
    ],
)
def test_a_failed_build_leaves_nothing_behind(prepare, error, says, monkeypatch):
    write_documents("ab")
    prepare()
    if error is MachineError:
        monkeypatch.setattr(CorpusWriter, "write_all", full)
    with pytest.raises(error, match=says):
        opened()
    assert list(Path("cache").iterdir()) == []
    Path("cache").rmdir()
    Path("cache").touch()
    with pytest.raises(DataError, match=r"data.cache_dir: cannot write to cache"):
        opened()


SAYS = {
    ("train.tokens", "last bit flipped"): "checksum",
    ("train.tokens", "zeros"): "checksum",
    ("train.tokens", "cut short"): "12 bytes instead of 14",
    ("train.tokens", "removed"): "No such file",
    ("train.starts", "cut short"): "14 bytes instead of 16",
    ("train.starts", "zeros"): "checksum",
    ("meta.json", "emptied"): "meta.json",
    ("meta.json", "removed"): "No such file",
    ("manifest.json", "cut short"): "manifest.json is damaged",
}


@pytest.mark.parametrize("opened_before", [False, True])
def test_a_cache_with_any_damaged_file_is_rebuilt(opened_before, capsys):
    write_documents("ab", "c")
    for _ in range(2 if opened_before else 1):
        expected = documents_of(opened())
    (folder,) = Path("cache").iterdir()
    for name, how in all_damages(folder):
        if not (folder / name).exists():  # checked.json is written when the folder is opened again
            continue
        damage(folder / name, how)
        assert documents_of(opened()) == expected, (name, how)
        warning, says = capsys.readouterr().err, SAYS.get((Path(name).name, how))
        if says:
            assert says in warning and "is damaged and is rebuilt" in warning and warning.count("\n") == 1
        assert documents_of(opened()) == expected and capsys.readouterr().err == "", (name, how)
        assert len(list(Path("cache").iterdir())) == 1


def test_a_cache_whose_description_is_another_is_rebuilt(capsys):
    write_documents("ab", "c")
    expected = documents_of(opened())
    for old, new in ((b"tokens", b"else"), (b"train.starts", b"trai..starts"), (b"uint16", b"uint32")):
        (meta,) = Path("cache").glob("*/*/meta.json")
        meta.write_bytes(meta.read_bytes().replace(old, new))
        assert documents_of(opened()) == expected
        assert "meta.json" in capsys.readouterr().err


def test_only_the_builder_rebuilds_a_damaged_cache():
    write_documents("abc")
    opened()
    (tokens,) = Path("cache").glob("*/*/train.tokens")
    damage(tokens, "cut short")
    with pytest.raises(DataError, match=r"train\.tokens has 8 bytes instead of 10; remove the folder"):
        opened(is_builder=False)


def test_a_large_cache_that_was_checked_is_sampled(monkeypatch):
    monkeypatch.setattr(store, "BLOCK_BYTES", 4)
    monkeypatch.setattr(store, "SAMPLE_BLOCKS", 3)
    write_documents("a" * 100)
    opened()  # builds
    opened()  # checks all of it
    hashed = []
    hash_blocks = store._hash_blocks
    monkeypatch.setattr(
        store,
        "_hash_blocks",
        lambda file, blocks: hashed.append(len(blocks)) or hash_blocks(file, blocks),
    )
    opened()
    assert hashed == [3, 2], "204 bytes of tokens are 51 blocks; starts are 2, fewer than the sample"
    (tokens,) = Path("cache").glob("*/*/train.tokens")
    os.utime(tokens)
    opened()
    assert hashed[2:] == [51, 2]


def test_unfinished_caches_of_killed_builders_are_removed(monkeypatch):
    write_documents("ab")
    code = (
        "import os, sys; from pathlib import Path; from harness.util.files import lock;"
        "held = lock(Path(sys.argv[1]) / '.lock', create=True); os.kill(os.getpid(), 9)"
    )
    killed, unlocked, busy, closed, complete = (
        Path(f"cache/corpus-{name}/.unfinished")
        for name in ("killed", "unlocked", "busy", "closed", "complete")
    )
    (closed / ".lock").mkdir(parents=True)  # cannot be opened, like another user's file
    for path in (killed, unlocked, busy, complete):
        path.mkdir(parents=True)
    (complete.parent / "manifest.json").touch()
    assert subprocess.run([sys.executable, "-c", code, str(killed)]).returncode == -9
    monkeypatch.setattr(cache, "_KEPT_SECONDS", -1.0)
    with lock(busy / ".lock", create=True):
        opened()
        assert not killed.parent.exists() and unlocked.exists() and busy.exists() and complete.exists()
    day_ago = time.time() - 2 * 86400
    for path in (unlocked, unlocked.parent):
        os.utime(path, (day_ago, day_ago))
    opened()
    assert not unlocked.parent.exists() and not busy.parent.exists()


def test_a_builder_that_has_not_locked_yet_is_left_alone(monkeypatch):
    """Cleaning up must not hold the lock that the builder is about to take."""
    write_documents("abc")
    work = Path("cache/corpus-new/.unfinished")
    work.mkdir(parents=True)
    (work / ".lock").touch()
    opened()
    assert work.is_dir()
    monkeypatch.setattr(store, "lock", lambda *_, **__: pytest.fail("locked"))
    store.remove_abandoned(work.parent, work, cache._KEPT_SECONDS)
    assert work.is_dir()
