"""Documents from files: matching files, their texts, and errors of unreadable files."""

import bz2
import gzip
import itertools
import json
import lzma
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from one_line import one_line

from harness.config.data import DataConfig
from harness.data.documents import LocalFiles, find_files, open_dataset
from harness.util.errors import DataError


def write(name, content):
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)


def parquet(**columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), "new.parquet")
    return Path("new.parquet").rename("written").read_bytes()


def documents(*paths, **settings):
    config = DataConfig(paths=list(paths), **settings)
    config.validate()
    return list(LocalFiles(config, "train").documents())


def names(patterns, exclude=()):
    return [str(file.relative_to(Path.cwd())) for file in find_files(list(patterns), list(exclude))]


def test_links_to_a_folder_on_the_path_are_not_followed():
    for name in ("a/x.txt", "a/sub/y.txt", "a/.hidden/z.txt", "b/[c]/x.txt"):
        write(name, "x")
    links = {"a/loop": ".", "a/sub/up": "../..", "b/over": "../a", "a/sub/back": "../../b"}
    for link, target in links.items():
        Path(link).symlink_to(target)
    found = ["a/sub/back/[c]/x.txt", "a/sub/up/b/[c]/x.txt", "a/sub/y.txt", "a/x.txt"]
    assert names(["a/**/*.txt"]) == found
    assert names(["b/**/x.txt"]) == ["b/[c]/x.txt", "b/over/x.txt"]


def test_globs():
    for name in ["a.py", "b.txt", "s/c.py", "s/t/d.py", "s/test/e.py"]:
        write(name, "x")
    assert names(["*.py"]) == ["a.py"]
    assert names(["**/*.py"]) == ["a.py", "s/c.py", "s/t/d.py", "s/test/e.py"]
    assert names(["**/*.py", "a.*", "./s/c.py"]) == names(["**/*.py"]), "each file once"
    assert names(["**/*.py"], ["s/*.py"]) == ["a.py", "s/t/d.py", "s/test/e.py"], (
        "* stops at a slash"
    )
    assert names(["**/*.py"], ["s/**"]) == ["a.py"]
    assert names(["**/*.py"], ["**/test/**"]) == ["a.py", "s/c.py", "s/t/d.py"]
    assert names(["**/*.py"], ["**/?.py"]) == []
    library = {file.name for file in find_files(["{stdlib}/json/*.py"], ["{stdlib}/**/tool.py"])}
    assert {"__init__.py", "decoder.py"} <= library and "tool.py" not in library


LINES = b'{"text": "a\\nb", "n": 1}\n\n{"text": ""}\n{"text": null}\n{"text": "c"}'
COMPRESSED = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, "zstd", asbytes=True),
}


@pytest.mark.parametrize(
    ("name", "content", "settings", "expected"),
    [
        ("a.txt", b"one\r\n\ttwo\r \xef\xbb\xbf", {}, ["one\r\n\ttwo\r \ufeff"]),
        ("a.txt", b"", {}, [""]),
        ("a.jsonl", LINES, {}, ["a\nb", "", "", "c"]),
        ("a.NDJSON.gz", gzip.compress(LINES), {}, ["a\nb", "", "", "c"]),
        ("a.txt", b'{"n": 1}\nx', {"format": "text"}, ['{"n": 1}\nx']),
        ("a.jl", b"{a}\n[1, 2]", {}, ["{a}\n[1, 2]"]),
        ("a[1].txt", b"in brackets", {}, ["in brackets"]),
        ("a.dat", b'{"body": "d"}', {"format": "text"}, ['{"body": "d"}']),
        ("a.dat", b'{"body": "d"}', {"format": "jsonl", "text_field": "body"}, ["d"]),
        # A byte order mark is not part of the first line.
        ("a.jsonl", b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}\n', {}, ["one", "two"]),
        (
            "a.jsonl",
            json.dumps({"text": "long " * 1_000_000}) + '\n{"text": "short"}',
            {},
            ["long " * 1_000_000, "short"],
        ),
        *(
            (f"a.jsonl{end}", pack(LINES), {}, ["a\nb", "", "", "c"])
            for end, pack in COMPRESSED.items()
        ),
        # As parallel compressors write them.
        *(
            (f"a.txt{end}", pack(b"one\n") + pack(b"two"), {}, ["one\ntwo"])
            for end, pack in COMPRESSED.items()
        ),
    ],
    ids=itertools.count(),
)
def test_texts(name, content, settings, expected):
    write(name, content)
    assert documents("*", **settings) == expected


def test_parquet():
    texts = [f"document {i}" for i in range(1000)]
    write("a.parquet", parquet(text=[*texts, None, ""], other=list(range(1002))))
    assert documents("a.*") == [*texts, "", ""]
    write("a.parquet", parquet(body=["x"]))
    with one_line(DataError, r"a.parquet: no column 'text' among body; set data.text_field"):
        documents("a.*")
    write("a.parquet", parquet(text=[1, 2]))
    with one_line(DataError, "field 'text' holds int, not text"):
        documents("a.*")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"abc\xff", r"a.txt: not UTF-8 at byte 3"),
        ("a.jsonl", '{"text": "x"}\nnot json', r"a.jsonl, line 2: not a JSON object"),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": "\xff"}',
            r"line 2: not UTF-8 at byte 24 of the file; .* iconv",
        ),
        (
            "a.txt",
            LINES,
            r"a.txt: its first line is a JSON object, not text; would work: data.format=jsonl, or",
        ),
        (
            "a",
            '[\n {"text": "x"}]',
            r"a: it is a JSON array, not text; would work: data.format=jsonl with one",
        ),
        (
            "a.jsonl",
            '{"body": "x", "n": 1}',
            r"line 1: no field 'text' among body, n; set data.text",
        ),
        ("a.jsonl", '{"text": 5}', r"a.jsonl, line 1: field 'text' holds int, not text"),
        (
            "a.jsonl",
            '{"text": "a\\ud800"}',
            r"a.jsonl, line 1: field 'text' holds half a surrogate pair",
        ),
        (
            "a.jsonl",
            '{"text": "x", "n": ' + "[" * 90 + "]" * 90 + "}",
            r"line 1: .*nested deeper than 64",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(b" " * 100_000_001, 1, mtime=0),
            r"line 1: has more than 100000000 b",
        ),
        ("a.jsonl.gz", b"no gzip", r"a.jsonl.gz cannot be read"),
        *(
            (f"d.txt{e}", pack(b"t " * 1000)[:-9], rf"d.txt{e} cannot be read: \w")
            for e, pack in COMPRESSED.items()
        ),
        ("a.parquet", b"no parquet", r"a.parquet: not a readable parquet file"),
    ],
    ids=itertools.count(),
)
def test_unreadable(name, content, says):
    write(name, content)
    with one_line(DataError, says):
        documents("*")


def test_no_file():
    for path in ("nothing/*.txt", "a" * 300):
        with one_line(DataError, r"^no file matches data.paths=\[.*\], seen from"):
            documents(path)
    write("corpus/a.txt", "x")
    with one_line(DataError, r"corpus is a folder, write corpus/\*\*/\*"):
        documents("corpus")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_saved_to_disk(streaming):
    import datasets

    table = datasets.Dataset.from_dict({"text": ["one", "two"]})
    table.save_to_disk("alone")
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk("splits")

    def read(folder, split):
        config = DataConfig(kind="hub", dataset=folder, streaming=streaming)
        return [row["text"] for row in open_dataset(config, split)]

    assert read("alone", "train") == read("splits", "train") == ["one", "two"]
    assert read("splits", "test") == ["two"]
    with one_line(DataError, "dataset splits has no split none among test, train"):
        read("splits", "none")
    with one_line(DataError, r"write data=c4 data.dataset=\S+/alone data.subset=null"):
        documents("alone")


def test_identity_follows_the_files():
    def identity(**settings):
        return LocalFiles(DataConfig(paths=["*"], **settings), "train").identity

    write("a.txt", "x")
    found = [identity(), identity(format="jsonl"), identity(text_field="body")]
    assert identity() == found[0]
    write("a.txt", "xy")
    found.append(identity())
    write("b.txt", "x")
    found.append(identity())
    assert len({repr(each) for each in found}) == 5
    assert identity(exclude=["b.txt"]) == found[3]
