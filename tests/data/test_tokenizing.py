"""Tokenizing in units: the result of any number of processes, kills and resumes is that of a plain loop."""

import gzip
import json
import os
import random
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from one_line import one_line
from processes import workers_of_this_process

import harness.data.cache as cache
import harness.data.documents as documents
import harness.data.tokenizing as tokenizing
from harness.config.data import DataConfig, TokenizerConfig
from harness.data.cache import open_documents
from harness.data.documents import LocalFiles
from harness.data.tokenizer import build_tokenizer
from harness.data.tokenizing import TokenizingProgress, is_held_out, units_of
from harness.util.errors import DataError, MachineError

HELD_OUT = 0.2
PYTHON = TokenizerConfig("sentencepiece", "asset:python_2k.model")
PLAIN = TokenizerConfig("bytes")


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)  # for thousands of small units


def texts(number):
    chosen = random.Random(number)
    return [
        "".join(chosen.choices("ab é\n\u2603", k=chosen.choice([0, 5, 60]))) for _ in range(number)
    ]


def write_corpus():
    """Write files of all formats; return their documents in the order of the sorted paths."""
    lines = [
        json.dumps({"text": text}, ensure_ascii=bool(i % 2)) for i, text in enumerate(texts(120))
    ]
    lines[40:40] = ["", "  "]
    Path("a.jsonl").write_text("\ufeff" + "\n".join(lines))
    with gzip.open("b.jsonl.gz", "wt") as file:
        file.writelines(f"{json.dumps({'text': text})}\n" for text in texts(30))
    pyarrow.parquet.write_table(
        pyarrow.table({"text": [*texts(70), None]}), "c.parquet", row_group_size=7
    )
    Path("d.txt").write_text(texts(300)[-1] * 20)
    return [*texts(120), *texts(30), *texts(70), "", texts(300)[-1] * 20]


def expected(documents, config):
    """Tokens and starts of each split, by a plain loop."""
    tokenizer = build_tokenizer(config)
    found = {"train": ([], []), "validation": ([], [])}
    for number, text in enumerate(documents):
        tokens, starts = found["validation" if is_held_out(number, HELD_OUT) else "train"]
        if text:
            starts.append(len(tokens))
            tokens += [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
    return found


def tokenized(config=PLAIN, **settings):
    read = {"paths": ["*.*"], "cache_dir": "cache", **settings}
    data = DataConfig(**read, validation_fraction=HELD_OUT)
    ranks = {"wait_for_all": None, "is_builder": True}
    found = {}
    for split in ("train", "validation"):
        read = {"data": data, "tokenizer": build_tokenizer(config), "split": split}
        opened = open_documents(SimpleNamespace(**read, **ranks))
        found[split] = opened.tokens.tolist(), opened.starts.tolist()
    assert [path.name.startswith("corpus-") for path in Path("cache").iterdir()] == [True]
    return found


@pytest.mark.parametrize(
    ("config", "unit_bytes", "processes"),
    [*((PLAIN, size, 1) for size in (60, 1000, 1 << 30)), (PYTHON, 60, 1), (PYTHON, 500, 2)],
)
def test_units_of_any_size_and_any_processes_give_the_same_cache(
    unit_bytes, config, processes, monkeypatch
):
    documents = write_corpus()
    monkeypatch.setattr(cache, "UNIT_MIB", unit_bytes / 2**20)
    monkeypatch.setattr(tokenizing, "CHARS_PER_BATCH", 100)
    assert tokenized(config, tokenize_workers=processes) == expected(documents, config)
    assert not workers_of_this_process()


@pytest.mark.parametrize("config", [PLAIN, PYTHON])
@pytest.mark.parametrize("opened", [gzip.open, open])
def test_a_text_file_that_is_long_is_read_in_parts(config, opened, monkeypatch):
    monkeypatch.setattr(documents, "LONG_FILE_BYTES", 3000)
    monkeypatch.setattr(documents, "_PART_BYTES", 1001)
    long = "".join(texts(300))
    name = "a.txt.gz" if opened is gzip.open else "a.txt"
    for content, damage in [(long, b""), (long, b"\xe2\x98"), (long, b"\xff" + 2000 * b"x")]:
        with opened(name, "wb") as file:
            file.write(content.encode() + damage)
        if damage:
            with one_line(DataError, f"not UTF-8 at byte {len(content.encode())} of the file"):
                tokenized(config)
        else:
            assert tokenized(config) == expected([long], config)
        shutil.rmtree("cache")


def test_a_larger_fraction_holds_out_the_same_documents_and_more():
    tenth, fifth = ({i for i in range(1000) if is_held_out(i, part)} for part in (0.1, 0.2))
    assert 70 < len(tenth) < 130 and 160 < len(fifth) < 240 and tenth < fifth
    assert not any(is_held_out(i, 0.0) for i in range(1000))


@pytest.mark.parametrize("wrong", [0, 1, 4, 8])
@pytest.mark.parametrize("unit_bytes", [1, 30, 1000])
def test_an_error_names_the_line_or_the_line_after_a_byte(wrong, unit_bytes):
    lines = [json.dumps({"text": "x" * i}).encode() for i in range(9)]
    for content, says in (
        (b"no JSON", "not a JSON object"),
        (b'{"text": "\xff"}', rf"not UTF-8 at byte {sum(map(len, lines[:wrong])) + wrong + 10}"),
    ):
        Path("a.jsonl").write_bytes(b"\n".join([*lines[:wrong], content, *lines[wrong + 1 :]]))
        source = LocalFiles(DataConfig(paths=["a.jsonl"]), "train")
        with one_line(DataError, rf"a\.jsonl, line .*: {says}") as raised:
            for span in source.spans(unit_bytes):
                list(source.read(span))
        place = re.search(r"line (\d+)(?: after byte (\d+))?:", str(raised.value))
        assert place is not None
        before = Path("a.jsonl").read_bytes()[: int(place[2] or 0)]
        assert before.count(b"\n") + int(place[1]) == wrong + 1


def test_the_first_of_several_errors_is_reported(monkeypatch):
    lines = [json.dumps({"text": "x" * (3000 if i == 0 else 10)}) for i in range(200)]
    lines[1] = lines[150] = lines[199] = "no JSON"
    Path("a.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(cache, "UNIT_MIB", 3020 / 2**20)
    with one_line(DataError, r"a\.jsonl, line 2: not a JSON object"):
        tokenized(tokenize_workers=2)
    assert not list(Path("cache").iterdir()) and not workers_of_this_process()


def test_a_killed_process_is_the_machines_error_and_its_work_is_continued(monkeypatch):
    documents = write_corpus()
    monkeypatch.setattr(cache, "UNIT_MIB", 500 / 2**20)

    def kill_first(*_):
        os.kill(workers_of_this_process()[0], signal.SIGKILL)

    message = r"a process that tokenized .* was killed by SIGKILL, from outside"
    with monkeypatch.context() as patched, one_line(MachineError, message):
        patched.setattr(TokenizingProgress, "advance", kill_first)
        tokenized(tokenize_workers=2)
    assert list(Path("cache").glob("*/.unfinished")) and not workers_of_this_process()
    assert tokenized(tokenize_workers=1) == expected(documents, PLAIN)


def test_units_do_not_depend_on_files_that_they_do_not_contain():
    write_corpus()

    def keys(*paths):
        source = LocalFiles(DataConfig(paths=list(paths)), "train")
        return {unit.key for unit in units_of(source, build_tokenizer(PLAIN), 500)}

    before = keys("*.*")
    assert keys("a.jsonl") < before
    os.utime("d.txt", (1, 1))
    assert 0 < len(before - keys("*.*")) <= 2
