"""Corpora of ``harness tokenize``: the same documents whatever the shards and kills; checks when opened."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from equal import assert_equal
from file_damages import all_damages, damage
from loaders import loader, steps
from processes import ROOT

from harness.compose.composer import compose_job
from harness.config.data import DataConfig, TokenizerConfig
from harness.data.corpus import open_shards, read_manifest
from harness.data.tokenizer import build_tokenizer
from harness.data.tokenizing import is_held_out
from harness.tools.tokenize import TokenizeJob, tokenize
from harness.util.errors import ConfigError, DataError

TEXTS = [f"document {number} " * (number % 7) for number in range(60)]
TYPED = ("data=local_jsonl", "data.paths=[a.jsonl]", "data.validation_fraction=0.1", "tokenizer=bytes")


@pytest.fixture(autouse=True)
def source(in_temporary_folder: None) -> None:
    write_source()


def write_source() -> None:
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))


def run(*typed: str) -> Any:
    typed = (*TYPED, "tokenize.target=corpus", "tokenize.workers=1", "tokenize.unit_mib=2e-4", *typed)
    result = tokenize(compose_job(typed, config_name="tokenize", schema=TokenizeJob), list(typed))
    assert not isinstance(result, int)
    return result


def documents(split: str) -> list[str]:
    found = []
    for shard in open_shards(Path("corpus"), split):
        ends = [*shard.starts[1:].tolist(), len(shard.tokens)]
        for begin, end in zip(shard.starts.tolist(), ends, strict=True):
            ids = shard.tokens[begin:end].tolist()
            assert (ids[0], ids[-1]) == (256, 257)
            found.append(bytes(ids[1:-1]).decode())
    return found


@pytest.mark.parametrize("shards", [1, 2, 7, 1000])
def test_documents_do_not_depend_on_the_shards(shards: int) -> None:
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


def test_a_split_without_documents() -> None:
    run("data.validation_fraction=0")
    with pytest.raises(DataError, match=r"corpus has no validation documents; would work: harness tokenize"):
        open_shards(Path("corpus"), "validation")


def test_a_corpus_of_another_job_is_not_overwritten() -> None:
    run("tokenize.shards=2")
    before = read_manifest(Path("corpus"))
    Path("b.jsonl").write_text('{"text": "b"}')
    for typed, says in {
        "data.validation_fraction=0.2": r"tokenize\.target=corpus: is a corpus of these files .* data field",
        "data.paths=[b.jsonl]": r"is a corpus of data\.paths=\[a\.jsonl\] by bytes, not of this job",
        "tokenizer=python_2k": "with another tokenizer",
        "tokenize.shards=3": r"tokenize\.shards=3: corpus is complete with 2 shards; would work: null, 2",
    }.items():
        with pytest.raises(ConfigError, match=says):
            run(typed)
    Path("other").mkdir()
    Path("other/file").touch()
    with pytest.raises(ConfigError, match=r"tokenize\.target=other: has other files; would work: a new"):
        run("tokenize.target=other")
    assert read_manifest(Path("corpus")) == before


def test_an_error_keeps_finished_units_and_the_same_command_continues() -> None:
    lines = Path("a.jsonl").read_text().splitlines()
    Path("b.jsonl").write_text("\n".join(lines))
    lines[50] = "no JSON"
    Path("a.jsonl").write_text("\n".join(lines))
    both = "data.paths=[a.jsonl,b.jsonl]"
    with pytest.raises(DataError, match=r"a\.jsonl, line 51: not a JSON object"):
        run(both)
    units = Path("corpus/.unfinished/units")
    assert len(list(units.glob("*.index"))) > 5
    with pytest.raises(ConfigError, match="an unfinished corpus with another value of tokenizer; would"):
        run(both, "tokenizer=python_2k")
    write_source()
    run(both)
    assert len(documents("train")) + len(documents("validation")) == 2 * len([text for text in TEXTS if text])
    assert not units.exists()


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("tokenize.target=null", r"tokenize\.target=null: must be given; would work: corpus/NAME"),
        ("tokenize.target=a.jsonl", r"tokenize\.target=a\.jsonl: is a file"),
        ("data=synthetic", r"data\.kind=synthetic: is no source of texts, which harness tokenize reads"),
        ("data=c4", r"data\.streaming=true: a stream cannot be cut into units"),
        ("data.validation_paths=[a.jsonl]", r"data\.validation_paths=.*a corpus has one source"),
    ],
)
def test_what_cannot_be_tokenized(typed: str, says: str) -> None:
    replaced = [each for each in TYPED if typed.startswith("data=") and each.startswith("data.")]
    own = [
        each for each in TYPED if each not in replaced and each.partition("=")[0] != typed.partition("=")[0]
    ]
    overrides = [*own, "tokenize.target=corpus", "data.validation_fraction=0", typed]
    with pytest.raises(ConfigError, match=says):
        tokenize(compose_job(overrides, config_name="tokenize", schema=TokenizeJob), [])


def rewrite(change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(MANIFEST.read_text())
    change(content)
    MANIFEST.write_text(json.dumps(content))


TOKENS = Path("corpus/shard-00001/train.tokens")
MANIFEST = Path("corpus/manifest.json")
DAMAGES = {
    "shard-00001 is damaged: train.tokens: bytes 0": lambda: damage(TOKENS, "last bit flipped"),
    "corpus is not a complete corpus of harness tokenize": lambda: MANIFEST.unlink(),
    "manifest.json is damaged: KeyError": lambda: MANIFEST.write_text('{"version": 1}'),
    "has format version 9; this": lambda: MANIFEST.write_text('{"version": 9}'),
    "has format version '1'; this": lambda: rewrite(lambda m: m.update(version="1")),
    "damaged: ValueError: '/etc' is no name": lambda: rewrite(lambda m: m["shards"][0].update(folder="/etc")),
    "damaged: ValueError: '../x' is no": lambda: rewrite(lambda m: m["shards"][1].update(folder="../x")),
    "damaged: ValueError: counts of tokens": lambda: rewrite(
        lambda m: m["counts"]["tokens"].update(train=2**70)
    ),
    "damaged: ValueError: 7 documents, and its shards have": lambda: rewrite(
        lambda m: m["counts"]["documents"].update(train=7)
    ),
    "damaged: ValueError: tokenizer": lambda: rewrite(lambda m: m["tokenizer"].update(vocab_size=-1)),
}


@pytest.mark.parametrize("says", DAMAGES)
def test_a_damaged_corpus_is_one_line(says: str) -> None:
    run("tokenize.shards=2")
    whole = documents("train")
    DAMAGES[says]()
    with pytest.raises(DataError, match=says) as raised:
        open_shards(Path("corpus"), "train")
    assert "\n" not in str(raised.value)
    if "shard-0000" in says:  # the remedy of the message
        MANIFEST.unlink()
        shard = Path("corpus") / says.split()[0]
        shutil.rmtree(shard)
        run("tokenize.shards=2")
        assert documents("train") == whole


def test_any_damaged_file_of_a_corpus_is_one_line_or_without_effect() -> None:
    run("tokenize.shards=2")
    whole, corpus = documents("train"), Path("corpus")
    for name, how in all_damages(corpus):
        content = (corpus / name).read_bytes()
        damage(corpus / name, how)
        try:
            assert documents("train") == whole, (name, how)
            assert "train" not in name and not name.endswith(("meta.json", "manifest.json")), (name, how)
        except DataError as error:
            assert "\n" not in str(error) and ("damaged" in str(error) or "not a complete" in str(error))
        (corpus / name).write_bytes(content)
    assert documents("train") == whole


def test_the_command_is_killed_with_its_processes_and_continued() -> None:
    Path("a.jsonl").write_text("".join(json.dumps({"text": text * 50}) + "\n" for text in TEXTS * 10))
    typed = [*TYPED, "tokenize.target=corpus", "tokenize.workers=2", "tokenize.unit_mib=1e-3"]
    command = [sys.executable, "-m", "harness", "tokenize", *typed]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    units = Path("corpus/.unfinished/units")
    while len(list(units.glob("*.index"))) < 3 and killed.poll() is None:
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    _, words = killed.communicate(timeout=60)  # the processes have the pipe, so they have ended too
    assert killed.returncode == -signal.SIGKILL, words
    kept = len(list(units.glob("*.index")))
    assert kept >= 3
    tokens = (index.with_suffix(".tokens") for index in units.glob("*.index"))
    damaged = next(file for file in tokens if file.stat().st_size)  # documents may be empty
    damage(damaged, "last bit flipped")
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count(f"WARNING {damaged} is damaged and is made again\n") == 1
    assert "next: python -m harness.train data=tokens 'data.paths=[corpus]'" in ended.stdout
    found = documents("train")
    held = {number for number in range(len(TEXTS) * 10) if is_held_out(number, 0.1)}
    texts = [text * 50 for text in TEXTS * 10]
    assert found == [text for number, text in enumerate(texts) if text and number not in held]


# -- as data=tokens ----


def tokens_of(*folders: str, **fields: Any) -> DataConfig:
    return DataConfig("tokens", paths=list(folders), **fields)


def read(data: DataConfig, split: str = "train", **settings: Any) -> list[list[torch.Tensor]]:
    return steps([loader(data, split=split, **settings)], 12)


@pytest.mark.parametrize("shards", [1, 3])
def test_its_samples_are_those_of_a_job_that_tokenizes(shards: int) -> None:
    """The same order, and the same held out."""
    run(f"tokenize.shards={shards}")
    local = DataConfig(paths=["a.jsonl"], validation_fraction=0.1, cache_dir="cache")
    for split in ("train", "validation") if shards == 1 else ("train",):
        assert_equal(read(tokens_of("corpus"), split), read(local, split))


def test_a_corpus_that_does_not_fit_and_several_of_them() -> None:
    """One of them is for training only, also in a mixture."""
    run()
    run("tokenize.target=plain", "data.validation_fraction=0")
    with pytest.raises(ConfigError, match="has held-out documents of its own; would work: 0"):
        loader(tokens_of("corpus", validation_fraction=0.1))
    other = build_tokenizer(TokenizerConfig("sentencepiece", "asset:python_2k.model"))
    with pytest.raises(
        DataError, match=r"corpus: was tokenized by bytes \(258 tokens\), and the job has ano"
    ):
        loader(tokens_of("corpus"), tokenizer=other, model_vocab_size=2048)
    loader(tokens_of("corpus"), tokenizer=build_tokenizer(TokenizerConfig("none")))
    assert_equal(read(tokens_of(".")), read(tokens_of("corpus", "plain")), "the folder of both corpora")
    with pytest.raises(ConfigError, match="no tokens are held out for validation"):
        loader(tokens_of("plain"), split="validation")
    own = read(tokens_of("corpus"), "validation")
    assert_equal(read(tokens_of("corpus", "plain"), "validation"), own)
    sources = {name: tokens_of(name) for name in ("corpus", "plain")}
    mixture = DataConfig("mixture", sources=sources, weights={"corpus": 1.0, "plain": 1.0})
    assert_equal([step[:2] for step in read(mixture, "validation")], own)
    alone = DataConfig("mixture", sources={"plain": sources["plain"]}, weights={"plain": 1.0})
    with pytest.raises(ConfigError, match=r"data\.sources\.plain\..*no tokens are held out for validation"):
        loader(alone, split="validation")
