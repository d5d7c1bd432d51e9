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

from harness.config.data import DataConfig
from harness.data.sources import LocalFiles, find_files, open_dataset
from harness.util.errors import DataError


def write(name, content):
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)


def write_parquet(name, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), name)


def documents(*paths, **settings):
    config = DataConfig(paths=list(paths), **settings)
    config.validate()
    return list(LocalFiles(config, "paths").documents())


def names(patterns, exclude=()):
    return [str(file.relative_to(Path.cwd())) for file in find_files(list(patterns), list(exclude))]


def test_links_to_a_folder_on_the_path_are_not_followed():
    for name in ("a/x.txt", "a/sub/y.txt", "a/.hidden/z.txt", "b/[c]/x.txt"):
        write(name, "x")
    for link, target in {
        "a/loop": ".",
        "a/sub/up": "../..",
        "b/over": "../a",
        "a/sub/back": "../../b",
    }.items():
        Path(link).symlink_to(target)
    assert names(["a/**/*.txt"]) == [
        "a/sub/back/[c]/x.txt",
        "a/sub/up/b/[c]/x.txt",
        "a/sub/y.txt",
        "a/x.txt",
    ]
    assert names(["b/**/x.txt"]) == ["b/[c]/x.txt", "b/over/x.txt"]


def test_globs():
    for name in ["a.py", "b.txt", "s/c.py", "s/t/d.py", "s/test/e.py"]:
        write(name, "x")
    assert names(["*.py"]) == ["a.py"]
    assert names(["**/*.py"]) == ["a.py", "s/c.py", "s/t/d.py", "s/test/e.py"]
    assert names(["**/*.py", "a.*", "./s/c.py"]) == names(["**/*.py"]), "each file once"
    assert names(["**/*.py"], ["s/*.py"]) == ["a.py", "s/t/d.py", "s/test/e.py"], "* stops at a slash"
    assert names(["**/*.py"], ["s/**"]) == ["a.py"]
    assert names(["**/*.py"], ["**/test/**"]) == ["a.py", "s/c.py", "s/t/d.py"]
    assert names(["**/*.py"], ["**/?.py"]) == []


def test_stdlib_is_the_standard_library():
    files = find_files(["{stdlib}/json/*.py"], ["{stdlib}/**/tool.py"])
    assert {"__init__.py", "decoder.py"} <= {file.name for file in files}
    assert "tool.py" not in {file.name for file in files}


def test_text_is_read_byte_by_byte():
    write("a.txt", b"one\r\n\ttwo\r \xef\xbb\xbf")
    write("b.txt", "")
    write("c", "three")
    assert documents("*") == ["one\r\n\ttwo\r \ufeff", "", "three"]


def test_jsonl():
    lines = '{"text": "a\\nb", "n": 1}\n\n{"text": ""}\n{"text": null}\n{"text": "c"}'
    write("a.jsonl", lines)
    write("b.jsonl.gz", gzip.compress(lines.encode()))
    write("c.json", lines)
    assert documents("*") == 3 * ["a\nb", "", "", "c"]
    write("d.dat", '{"body": "d"}')
    assert documents("d.dat", format="jsonl", text_field="body") == ["d"]
    assert documents("d.dat") == ['{"body": "d"}'], "an unknown extension is text"


def test_parquet():
    texts = [f"document {i}" for i in range(1000)]
    write_parquet("a.parquet", text=[*texts, None, ""], other=list(range(1002)))
    assert documents("*") == [*texts, "", ""]


def test_a_line_of_many_megabytes():
    text = "long " * 1_000_000
    write("a.jsonl", json.dumps({"text": text}) + "\n" + json.dumps({"text": "short"}))
    assert documents("*") == [text, "short"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"abc\xff", r"a.txt: not UTF-8 at byte 3"),
        ("a.jsonl", '{"text": "x"}\nnot json', r"a.jsonl, line 2: not a JSON object"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}', r"a.jsonl, line 2: not UTF-8 at byte 24 of the file"),
        ("a.jsonl", "[1]", r"a.jsonl, line 1: not a JSON object"),
        ("a.json", '[\n{"text": "x"}\n]', r"a.json, line 1: not a JSON object"),
        (
            "a.jsonl",
            '{"body": "x", "n": 1}',
            r"a.jsonl, line 1: no field 'text' among body, n; set data.text",
        ),
        ("a.jsonl", '{"text": 5}', r"a.jsonl, line 1: field 'text' holds int, not text"),
        ("a.jsonl", '{"text": "a\\ud800"}', r"a.jsonl, line 1: field 'text' holds half a surrogate pair"),
        ("a.jsonl", "[" * 100_000, r"a.jsonl, line 1: not a JSON object"),
        ("a.jsonl", '{"text": "x", "n": ' + "[" * 90 + "]" * 90 + "}", r"line 1: .*nested deeper than 64"),
        ("a.jsonl", f'{{"text": "x", "n": {"9" * 5000}}}', r"line 1: .*a number has more than 4300 digits"),
        ("a.jsonl.gz", gzip.compress(b" " * 100_000_001, 1, mtime=0), r"line 1: has more than 100000000 b"),
        ("a.jsonl.gz", b"no gzip", r"a.jsonl.gz cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}' * 99, mtime=0)[:-9], r"a.jsonl.gz cannot be read"),
        ("a.parquet", b"no parquet", r"a.parquet: not a readable parquet file"),
    ],
    ids=itertools.count(),
)
def test_unreadable(name, content, says):
    write(name, content)
    with pytest.raises(DataError, match=says) as caught:
        documents("*")
    assert "\n" not in str(caught.value)


def test_parquet_of_the_wrong_columns():
    write_parquet("a.parquet", body=["x"])
    with pytest.raises(DataError, match=r"a.parquet: no column 'text' among body; set data.text_field"):
        documents("*")
    write_parquet("a.parquet", text=[1, 2])
    with pytest.raises(DataError, match="field 'text' holds int, not text"):
        documents("*")


def test_no_file():
    with pytest.raises(DataError, match=r"no file matches data.paths=\[nothing/\*.txt\], seen from"):
        documents("nothing/*.txt")
    write("corpus/a.txt", "x")
    with pytest.raises(DataError, match=r"corpus is a folder, write corpus/\*\*/\*"):
        documents("corpus")
    with pytest.raises(DataError, match=r"^no file matches"):
        documents("a" * 300)


COMPRESSED = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, "zstd", asbytes=True),
}


@pytest.mark.parametrize("extension", COMPRESSED)
def test_compressed(extension):
    compress = COMPRESSED[extension]
    write(f"a.jsonl{extension}", compress(b'{"text": "one"}\n{"text": "two"}\n'))
    write(f"b.txt{extension}", compress(b"drei\n"))
    assert documents("*") == ["one", "two", "drei\n"]
    write(f"c.txt{extension}", compress(b"one\n") + compress(b"two\n"))
    assert documents("c*") == ["one\ntwo\n"], "as parallel compressors write them"
    write(f"d.txt{extension}", compress(b"text " * 1000)[:-9])
    with pytest.raises(DataError, match=rf"d.txt{extension} cannot be read: \w"):
        documents("d*")


def test_a_byte_order_mark_is_not_part_of_the_first_line():
    write("a.jsonl", b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}\n')
    assert documents("*") == ["one", "two"]


def test_text_that_is_not_utf8_is_replaced_or_left_out_and_counted():
    write("a.jsonl", b'{"text": "one"}\n{"text": "t\xffwo"}\n{"text": "three"}\n')
    write("b.txt", b"f\xfeour")

    def read(**settings):
        files = LocalFiles(DataConfig(paths=["*"], **settings), "paths")
        return list(files.documents()), files.damaged

    with pytest.raises(DataError, match=r"line 2: not UTF-8 at byte 27 of the file; would work: data.encod"):
        read()
    assert read(encoding_errors="replace") == (["one", "t\ufffdwo", "three", "f\ufffdour"], 2)
    assert read(encoding_errors="skip") == (["one", "", "three", ""], 2), "indices of documents stay"


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
    with pytest.raises(DataError, match="dataset splits has no split none among test, train"):
        read("splits", "none")
    with pytest.raises(DataError, match=r"write data=c4 data.dataset=\S+/alone data.subset=null"):
        documents("alone")


def test_identity_follows_the_files():
    write("a.txt", "x")

    def identity(**settings):
        return LocalFiles(DataConfig(paths=["*"], **settings), "paths").identity

    first = identity()
    assert identity() == first
    assert identity(format="jsonl") != first
    assert identity(text_field="body") != first
    write("a.txt", "xy")
    second = identity()
    assert second != first
    write("b.txt", "x")
    assert identity() != second
    assert identity(exclude=["b.txt"]) == second
