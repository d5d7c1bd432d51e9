"""Corpora of ``harness tokenize``: the same documents whatever the shards and kills; checks when opened."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from equal import assert_equal
from loaders import BOS, BYTES, EOS, loader, steps
from one_line import one_line
from processes import PATIENCE, ROOT, python
from tokenizer_files import write_sentencepiece

import harness.data.cache as cache
import harness.util.store as store
from harness.compose.composer import compose_job
from harness.config.data import DataConfig, TokenizerConfig, ValidationSet
from harness.data.cache import open_documents
from harness.data.corpus import CorpusWriter, open_shards, read_manifest
from harness.data.tokenizer import build_tokenizer
from harness.data.tokenizing import is_held_out
from harness.launch.inputs import require_vocabulary
from harness.tools.tokenize import TokenizeJob, tokenize
from harness.util.errors import ConfigError, DataError, MachineError
from harness.util.files import lock

PYTHON = build_tokenizer(TokenizerConfig("sentencepiece", "asset:python_2k.model"))
TEXTS = [f"document {number} " * (number % 7) for number in range(60)]
TYPED = (
    "data=local_jsonl",
    "data.paths=[a.jsonl]",
    "data.validation_fraction=0.1",
    "tokenizer=bytes",
)


FILE_DAMAGES = {
    "last bit flipped": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "zeros": lambda content: bytes(len(content)),
    "cut short": lambda content: content[:-2],
    "emptied": lambda content: b"",
    "removed": lambda content: None,
}


def all_damages(folder):
    """Every file, by its path in the folder, with every damage that changes it."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return [
        (str(file.relative_to(folder)), name)
        for file in files
        for name in FILE_DAMAGES
        if name == "removed" or file.stat().st_size
    ]


def damage(file, name):
    changed = FILE_DAMAGES[name](file.read_bytes())
    if changed is None:
        file.unlink()
    else:
        file.write_bytes(changed)


@pytest.fixture(autouse=True)
def source(in_temporary_folder):
    write_source()


def write_source():
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))


def run(*typed):
    typed = (
        *TYPED,
        "tokenize.target=corpus",
        "tokenize.workers=1",
        "tokenize.unit_mib=2e-4",
        *typed,
    )
    result = tokenize(compose_job(typed, config_name="tokenize", schema=TokenizeJob), list(typed))
    assert not isinstance(result, int)
    return result


def texts_of(split):
    documents = [
        split.tokens[a:b].tolist() for a, b in pairwise([*split.starts, len(split.tokens)])
    ]
    assert all((ids[0], ids[-1]) == (BOS, EOS) for ids in documents)
    return [bytes(ids[1:-1]).decode() for ids in documents]


def documents(split):
    return [text for shard in open_shards(Path("corpus"), split) for text in texts_of(shard)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"byte_fallback": False},
            r"note: \d+\.\d\d% of the ids are unknown \([\d,]+ looked at\); would work: ",
        ),
        (
            {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
            r"note: the tokenizer does not keep line breaks or spaces: 'a\\n\\n  b' is read back as 'a b'",
        ),
        ({}, None),
    ],
)
def test_what_a_tokenizer_loses_is_said(options, says):
    Path("a.jsonl").write_text(json.dumps({"text": "one\n\ntwo  three ☃\n"}) + "\n")
    write_sentencepiece(Path("pieces"), **options)
    typed = ("tokenizer.kind=sentencepiece", "tokenizer.path=pieces", "data.validation_fraction=0")
    text = run(*typed).text
    assert re.search(says, text) if says else "note:" not in text


@pytest.mark.parametrize("shards", [1, 2, 7, 1000])
def test_documents_do_not_depend_on_the_shards(shards):
    result = run(f"tokenize.shards={shards}")
    held = [text for number, text in enumerate(TEXTS) if text and is_held_out(number, 0.1)]
    assert documents("validation") == held
    assert documents("train") == [text for text in TEXTS if text and text not in held]
    manifest = read_manifest(Path("corpus"))
    assert len(manifest.shards) == min(shards, result.data["shards"])
    assert manifest.counts.documents == {"train": len(documents("train")), "validation": len(held)}
    size = os.path.getsize("a.jsonl")
    assert manifest.source["files"] == [{"path": os.path.abspath("a.jsonl"), "size": size}]
    names = {path.name.partition("-")[0] for path in Path("corpus").iterdir()}
    assert names == {"manifest.json", "plan.json", "shard"}
    assert "is complete" in run().text


def test_a_split_without_documents():
    run("data.validation_fraction=0")
    with one_line(DataError, r"corpus has no validation documents; would work: harness tokenize"):
        open_shards(Path("corpus"), "validation")


def test_a_corpus_of_another_job_is_not_overwritten():
    run("tokenize.shards=2")
    before = read_manifest(Path("corpus"))
    Path("b.jsonl").write_text('{"text": "b"}')
    for typed, says in {
        "data.validation_fraction=0.2": r"tokenize\.target=corpus: is a corpus of these files .* data field",
        "data.paths=[b.jsonl]": r"is a corpus of data\.paths=\[a\.jsonl\] by bytes, not of this job",
        "tokenizer=python_2k": "with another tokenizer",
        "tokenize.shards=3": r"tokenize\.shards=3: corpus is complete with 2 shards; would work: null, 2",
    }.items():
        with one_line(ConfigError, says):
            run(typed)
    Path("other").mkdir()
    Path("other/file").touch()
    with one_line(ConfigError, r"tokenize\.target=other: has other files; would work: a new"):
        run("tokenize.target=other")
    assert read_manifest(Path("corpus")) == before


def test_an_error_keeps_finished_units_and_the_same_command_continues():
    lines = Path("a.jsonl").read_text().splitlines()
    Path("b.jsonl").write_text("\n".join(lines))
    lines[50] = "no JSON"
    Path("a.jsonl").write_text("\n".join(lines))
    both = "data.paths=[a.jsonl,b.jsonl]"
    with one_line(DataError, r"a\.jsonl, line .*: not a JSON object"):
        run(both)
    units = Path("corpus/.unfinished/units")
    assert len(list(units.glob("*.index"))) > 5
    with one_line(ConfigError, "an unfinished corpus with another value of tokenizer; would"):
        run(both, "tokenizer=python_2k")
    write_source()
    run(both)
    assert len(documents("train")) + len(documents("validation")) == 2 * len(
        [text for text in TEXTS if text]
    )
    assert not units.exists()


TOKENS, MANIFEST = Path("corpus/shard-00001/train.tokens"), Path("corpus/manifest.json")


def changed(value, *names):
    """Change a value of the manifest."""
    content = json.loads(MANIFEST.read_text())
    part = content
    for name in names[:-1]:
        part = part[name]
    part[names[-1]] = value
    MANIFEST.write_text(json.dumps(content))


DAMAGES = {
    "shard-00001 is damaged: train.tokens: bytes 0": lambda: damage(TOKENS, "last bit flipped"),
    "corpus is not a complete corpus of harness tokenize": lambda: MANIFEST.unlink(),
    "manifest.json is damaged: KeyError": lambda: MANIFEST.write_text('{"version": 1}'),
    "has format version 9; this": lambda: changed(9, "version"),
    "has format version '1'; this": lambda: changed("1", "version"),
    "ValueError: '/etc' is no name": lambda: changed("/etc", "shards", 0, "folder"),
    "ValueError: '../x' is no": lambda: changed("../x", "shards", 1, "folder"),
    "KeyError: 'vocab_size'": lambda: changed({}, "tokenizer"),
    "ValueError: 1 train tokens, and its": lambda: changed(1, "counts", "tokens", "train"),
}


@pytest.mark.parametrize("says", DAMAGES)
def test_a_damaged_corpus_is_one_line(says):
    run("tokenize.shards=2")
    whole = documents("train")
    DAMAGES[says]()
    with one_line(DataError, says):
        open_shards(Path("corpus"), "train")
    if "shard-0000" in says:  # the remedy of the message
        MANIFEST.unlink()
        shutil.rmtree(TOKENS.parent)
        run("tokenize.shards=2")
        assert documents("train") == whole


def test_any_damaged_file_of_a_corpus_is_one_line_or_without_effect():
    run("tokenize.shards=2")
    whole, corpus = documents("train"), Path("corpus")
    for name, how in all_damages(corpus):
        content = (corpus / name).read_bytes()
        damage(corpus / name, how)
        try:
            assert documents("train") == whole, (name, how)
            assert "train" not in name and not name.endswith(("meta.json", "manifest.json")), (
                name,
                how,
            )
        except DataError as error:
            assert "\n" not in str(error) and (
                "damaged" in str(error) or "not a complete" in str(error)
            )
        (corpus / name).write_bytes(content)
    assert documents("train") == whole


def test_the_command_is_killed_with_its_processes_and_continued():
    Path("a.jsonl").write_text(
        "".join(json.dumps({"text": text * 50}) + "\n" for text in TEXTS * 10)
    )
    typed = [*TYPED, "tokenize.target=corpus", "tokenize.workers=2", "tokenize.unit_mib=1e-3"]
    command = [sys.executable, "-m", "harness", "tokenize", *typed]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    units = Path("corpus/.unfinished/units")
    for least in (3, 10, 25):
        killed = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
        while len(list(units.glob("*.index"))) < least and killed.poll() is None:
            time.sleep(0.005)
        killed.send_signal(signal.SIGKILL)
        _, words = killed.communicate(
            timeout=PATIENCE
        )  # the processes have the pipe, so they have ended too
        assert killed.returncode == -signal.SIGKILL, words
        assert len(list(units.glob("*.index"))) >= least
    tokens = (index.with_suffix(".tokens") for index in units.glob("*.index"))
    damaged = next(file for file in tokens if file.stat().st_size)  # documents may be empty
    damage(damaged, "last bit flipped")
    ended = python(*command[1:], cwd=Path.cwd())
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count(f"WARNING {damaged} is damaged and is made again\n") == 1
    assert "next: harness train data=tokens 'data.paths=[corpus]'" in ended.stdout
    found = documents("train")
    held = {number for number in range(len(TEXTS) * 10) if is_held_out(number, 0.1)}
    texts = [text * 50 for text in TEXTS * 10]
    assert found == [text for number, text in enumerate(texts) if text and number not in held]


# -- as data=tokens ----


def tokens_of(*folders, **fields):
    return DataConfig("tokens", paths=list(folders), **fields)


def read(data, split="train", **settings):
    return steps([loader(data, split=split, **settings)], 12)


@pytest.mark.parametrize("shards", [1, 3])
def test_its_samples_are_those_of_a_job_that_tokenizes(shards):
    """The same order, and the same held out."""
    run(f"tokenize.shards={shards}")
    local = DataConfig(paths=["a.jsonl"], validation_fraction=0.1, cache_dir="cache")
    for split in ("train", "validation") if shards == 1 else ("train",):
        assert_equal(read(tokens_of("corpus"), split), read(local, split))


def test_a_corpus_that_does_not_fit_and_several_of_them():
    """One of them is for training only, also in a mixture."""
    run()
    run("tokenize.target=plain", "data.validation_fraction=0")
    with one_line(ConfigError, "has held-out documents of its own; would work: 0"):
        loader(tokens_of("corpus", validation_fraction=0.1))
    says = r"model: has 2048 tokens, and .*corpus was .*: bytes, 258 tokens; would work: the tokenizer of"
    with one_line(ConfigError, says):
        loader(tokens_of("corpus"), tokenizer=PYTHON, model_vocab_size=2048)
    with one_line(ConfigError, says):  # before anything starts
        require_vocabulary(compose_job(["data=tokens", "data.paths=[.]", "tokenizer=python_2k"]))
    loader(tokens_of("corpus"), tokenizer=build_tokenizer(TokenizerConfig("none")))
    assert_equal(
        read(tokens_of(".")), read(tokens_of("corpus", "plain")), "the folder of both corpora"
    )
    with one_line(ConfigError, "no tokens are held out for validation"):
        loader(tokens_of("plain"), split="validation")
    own = read(tokens_of("corpus"), "validation")
    assert_equal(read(tokens_of("corpus", "plain"), "validation"), own)
    whole = ValidationSet("tokens", paths=["corpus"])
    both = tokens_of("plain", validation_paths=["corpus"])
    assert_equal(read(whole, "validation"), read(both, "validation"), "a set has both splits")
    sources = {name: tokens_of(name) for name in ("corpus", "plain")}
    mixture = DataConfig("mixture", sources=sources, weights={"corpus": 1.0, "plain": 1.0})
    assert_equal([step[:2] for step in read(mixture, "validation")], own)
    alone = DataConfig("mixture", sources={"plain": sources["plain"]}, weights={"plain": 1.0})
    with one_line(ConfigError, r"data\.sources\.plain\..*no tokens are held out for validation"):
        loader(alone, split="validation")


# -- the cache of a job, a corpus with one shard ----


def write_documents(*texts):
    for index, text in enumerate(texts):
        Path(f"{index:04}.txt").write_text(text)


def opened(held_out=0.0, tokenizer=BYTES, wait_for_all=None, is_builder=True):
    data = DataConfig(paths=["*.txt"], cache_dir="cache", validation_fraction=held_out)
    ranks = {"wait_for_all": wait_for_all, "is_builder": is_builder}
    return open_documents(SimpleNamespace(data=data, tokenizer=tokenizer, split="train", **ranks))


def test_a_large_vocabulary_gets_wider_tokens():
    class Large(type(BYTES)):
        vocab_size = 2**16 + 1
        fingerprint = "large"

        def encode_in_pieces(self, parts):
            yield [2**16]

    write_documents("a")
    assert opened().tokens.dtype == np.uint16
    assert opened(tokenizer=Large()).tokens.tolist() == [256, 2**16, 257]


def test_built_once_and_rebuilt_when_something_changes(monkeypatch):
    builds, build = [], cache._build
    monkeypatch.setattr(
        cache, "_build", lambda *a, **options: (builds.append(1), build(*a, **options))
    )
    write_documents("ab")
    for times, changed in enumerate(({}, {"held_out": 0.5}, {"tokenizer": PYTHON}), start=1):
        opened(**changed), opened(**changed)
        assert len(builds) == times
    write_documents("ac")
    assert texts_of(opened()) == ["ac"] and len(builds) == 4


def test_only_the_builder_builds():
    write_documents("ab")
    with one_line(DataError, r"not visible to this rank; data.cache_dir must be a folder that all"):
        opened(is_builder=False, wait_for_all=lambda: None)
    assert not Path("cache").exists()
    seen = []
    opened(wait_for_all=lambda: seen.append(len(list(Path("cache").iterdir()))))
    assert seen == [1], "the builder waits with the cache in place"
    assert texts_of(opened(is_builder=False)) == ["ab"]
    (tokens,) = Path("cache").glob("*/*/train.tokens")
    damage(tokens, "cut short")
    with one_line(DataError, r"train\.tokens has 6 bytes instead of 8; remove the folder"):
        opened(is_builder=False)


def test_one_of_two_builders_builds_and_the_other_waits(monkeypatch):
    write_documents("ab", "cd")
    builds, write, waits = [], CorpusWriter.write_all, threading.Event()
    monkeypatch.setattr(
        CorpusWriter,
        "write_all",
        lambda *each: (builds.append(1), waits.wait(PATIENCE), write(*each)),
    )
    sleep = time.sleep
    monkeypatch.setattr(store.time, "sleep", lambda seconds: (waits.set(), sleep(seconds)))
    found = []
    threads = [threading.Thread(target=lambda: found.append(texts_of(opened()))) for _ in range(2)]
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
    with one_line(DataError, r"data.cache_dir: cannot write to cache"):
        opened()


@pytest.mark.parametrize("opened_before", [False, True])
def test_a_cache_with_any_damaged_file_is_rebuilt(opened_before, capsys):
    write_documents("ab", "c")
    for _ in range(2 if opened_before else 1):
        expected = texts_of(opened())
    (folder,) = Path("cache").iterdir()
    for name, how in all_damages(folder):
        if not (folder / name).exists():  # checked.json is written when the folder is opened again
            continue
        damage(folder / name, how)
        assert texts_of(opened()) == expected, (name, how)
        warning = capsys.readouterr().err
        if name.endswith(("tokens", "starts")) or how == "removed":
            assert "is damaged and is rebuilt" in warning or "train" not in name
        assert warning.count("\n") < 2
        assert texts_of(opened()) == expected and capsys.readouterr().err == "", (name, how)
        assert len(list(Path("cache").iterdir())) == 1


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
        assert (
            not killed.parent.exists() and unlocked.exists() and busy.exists() and complete.exists()
        )
    day_ago = time.time() - 2 * 86400
    for path in (unlocked, unlocked.parent):
        os.utime(path, (day_ago, day_ago))
    opened()
    assert not unlocked.parent.exists() and not busy.parent.exists()
