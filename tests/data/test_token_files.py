"""Data kind ``tokens``: other programs' token files, against the documents that were written."""

import dataclasses
import os
import struct
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from cases import texts
from equal import assert_equal
from loaders import BOS, BYTES, CHANGES, EOS, B, T, loader, packed, ranks_of, scheduled, steps
from one_line import one_line
from plugins import add_extensions
from token_writers import (
    FORMATS,
    config,
    files_of_documents,
    write_datatrove,
    write_llmc,
    write_megatron,
    write_memmap,
    write_npy,
)

from harness.config.data import TOKEN_DTYPES, TokenizerConfig
from harness.contrib.formats.token_formats import smallest_dtype
from harness.data.tokenizer import build_tokenizer
from harness.tools.inference.tasks import Documents, Setting
from harness.util.errors import ConfigError, DataError
from harness.weights.tokenizer import export_tokenizer

NOTHING = build_tokenizer(TokenizerConfig("none"))


@pytest.fixture(scope="module", autouse=True)
def extensions():
    with pytest.MonkeyPatch.context() as patch:
        add_extensions(patch)
        yield


def rows_of(documents, number, **settings):
    return list(scheduled(packed(documents, **settings), CHANGES["none"], number))


@pytest.mark.parametrize("name", FORMATS)
def test_samples(name):
    """Samples cross files; labels and document numbers follow the documents; auto finds the format."""
    write, settings = FORMATS[name]
    files = files_of_documents()
    for number, documents in enumerate(files):
        write(f"web_{number}", documents)
    data = config(**settings, attend_across_documents=False)
    for ranks in (1, 2):
        assert_equal(steps(ranks_of(data, ranks), 5), rows_of(list(chain(*files)), 5))


@pytest.mark.parametrize("name", ["megatron", "datatrove", "npy"])
def test_the_end_of_each_file_is_held_out(name):
    write, settings = FORMATS[name]
    files = files_of_documents(2)
    for number, documents in enumerate(files):
        write(f"web_{number}", documents)
    data = config(**settings, validation_fraction=0.45, boundaries="none")
    # 45% of the first file's 165 tokens are 74; its last documents that fit have 4 and 19 tokens. The second
    # file has two documents of 7 tokens; 45% are 6 tokens.
    if name == "npy":  # without an index: cut anywhere
        ids = [[token for each in documents for token in each] for documents in files]
        cuts = [len(each) - round(0.45 * len(each)) for each in ids]
        train = [each[:cut] for each, cut in zip(ids, cuts, strict=True)]
        held_out = [each[cut:] for each, cut in zip(ids, cuts, strict=True)]
    else:
        train, held_out = [*files[0][:4], files[1][0]], [*files[0][4:], files[1][1]]
    for split, documents in (("train", train), ("validation", held_out)):
        [batch] = rows_of(documents, 1, masks=False)
        assert_equal(steps([loader(data, split=split)], 1), [batch[:2]], split)


def test_boundaries_at_the_first_token():
    """llm.c's documents begin with their separator: a label is masked where it is that token."""
    documents = [[EOS, *range(n)] for n in (20, 5, 40)]
    write_llmc("a", documents)
    gpt2 = build_tokenizer(TokenizerConfig("none", eos=str(EOS)))
    found = steps([loader(config(attend_across_documents=False), tokenizer=gpt2)], 1)
    assert_equal(found, rows_of(documents, 1))


def test_unknown_boundaries(capfd):
    """No label is masked; attention within documents is refused; a token that never occurs is reported."""
    documents = files_of_documents(1)[0]
    write_memmap("a", documents)
    for data, tokenizer in ((config(), NOTHING), (config(boundaries="none"), BYTES)):
        [batch] = rows_of(documents, 1, masks=False)
        assert_equal(steps([loader(data, tokenizer=tokenizer)], 1), [batch[:2]])
        with one_line(ConfigError, "boundaries of documents are unknown"):
            loader(dataclasses.replace(data, attend_across_documents=False), tokenizer=tokenizer)
    with one_line(ConfigError, r"data\.boundaries=eos: the tokenizer has no such token"):
        loader(config(boundaries="eos"), tokenizer=NOTHING)
    assert capfd.readouterr().err == ""
    loader(config(), tokenizer=build_tokenizer(TokenizerConfig("none", eos="299")))
    assert "tokens have no document boundary (id 299)" in capfd.readouterr().err


def test_validation_paths():
    documents = files_of_documents(2)
    for name, written in zip(("train", "val"), documents, strict=True):
        Path(name).mkdir()
        write_datatrove(f"{name}/a", [*written, *written])
    data = config(paths=["train"], validation_paths=["val/*.ds"], attend_across_documents=False)
    assert_equal(steps([loader(data, split="validation")], 1), rows_of(documents[1] * 2, 1))


def test_paths():
    """A prefix of Megatron, its two files, a glob and a folder name the same tokens, each once."""
    Path("web").mkdir()
    documents = files_of_documents(1)[0]
    write_megatron("web/a_text_document", documents)
    expected = rows_of(documents, 12)
    for path in ("web", "web/a_text_document", "web/*", "web/a_text_document.idx", "web/*.bin,web"):
        data = config(paths=path.split(","), attend_across_documents=False)
        assert_equal(steps([loader(data)], 12), expected, path)
    Path("data").mkdir()
    for name in ("data/train", "data/val"):
        write_memmap(name, documents)
    Path("a.tokens").write_bytes(b"12345678")
    for paths, says in texts(r"""
        data                several splits, such as train\.bin and val\.bin; would work
        web,data/train.bin  several formats: .*web.*\(megatron\).*; would work: data\.format
        nothing             no token file matches data\.paths=\[nothing\]
        a.tokens            a\.tokens: the format of its tokens is unknown
    """):
        with one_line(DataError, says):
            loader(config(paths=paths.split(",")))


def test_settings_of_another_format():
    write_megatron("a", files_of_documents(1)[0])
    with one_line(ConfigError, r"data\.dtype=uint16: is read only from .* is megatron"):
        loader(config(dtype="uint16"))


def test_llmc_files_are_not_read_as_ids():
    write_llmc("a", files_of_documents(1)[0])
    with one_line(DataError, r"a\.bin: has llm\.c's header; would work: data\.format=llmc"):
        loader(config(format="memmap"))


def test_another_tokenizer_by_name(capfd):
    write_datatrove("a", files_of_documents(1)[0])
    loader(config(), tokenizer=NOTHING)
    assert capfd.readouterr().err == ""
    loader(config())
    assert (
        "a.ds was made by the tokenizer org/name; tokenizer.path is None" in capfd.readouterr().err
    )


def test_without_a_tokenizer():
    """It encodes nothing, and a checkpoint that records it names no tokenizer."""
    for use in (NOTHING.encode, NOTHING.encode_batch, NOTHING.decode):
        with one_line(DataError, "tokenizer=none has token ids but no text"):
            use("a")
    export_tokenizer(TokenizerConfig("none"), Path("exported"))
    assert not Path("exported").exists()
    setting = Setting(BYTES, config(paths=["a"]), "all", 16)
    with one_line(ConfigError, r"data\.kind=tokens: has no text to evaluate"):
        Documents(setting)


def test_many_files_need_few_descriptors():
    for number in range(300):
        write_datatrove(f"{number:03}", [[BOS, *range(20), EOS]])
    read = loader(config(paths=["*.ds"]))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        read.next()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1


# -- damaged files and ids of another tokenizer are one line that names the file ----


END = 1 << 30


def change(name, at, new=b"\0"):
    def damage():
        content = Path(name).read_bytes()
        Path(name).write_bytes(content[:at] + new + content[at + len(new) :])

    return damage


def replaced(name):
    Path(name).unlink()
    return Path(name)


# 6 sequences: their lengths are at byte 34, pointers at 34 + 24, documents at 34 + 72.
DAMAGED = [
    (write_megatron, change("a.idx", 0, b"MMIDIDY"), "does not begin with MMIDIDX"),
    (write_megatron, change("a.idx", 0, b"TNTIDX\0\0"), "does not begin with MMIDIDX"),
    (
        write_megatron,
        change("a.idx", END),
        "has 139 bytes, which are not 6 sequences and 4 document boundaries",
    ),
    (write_megatron, change("a.idx", 34, b"\4"), "sequences do not follow each other without gaps"),
    (
        write_megatron,
        change("a.idx", 34 + 72 + 8, b"\5"),
        "sequences of its documents are not ascending",
    ),
    (
        write_megatron,
        change("a.bin", END),
        r"a\.bin: has 135 bytes, which are not 67 tokens of uint16",
    ),
    (write_megatron, lambda: Path("a.bin").unlink(), r"a\.bin: No such file"),
    (write_datatrove, change("a.ds.index", END), "has 25 bytes, which are no complete offsets"),
    (write_datatrove, change("a.ds.index", 0, b"\x3f"), "documents' ends are not ascending"),
    (write_datatrove, lambda: Path("a.ds.metadata").write_text("gpt2"), "first line is not NAME"),
    (
        write_llmc,
        change("a.bin", 4, b"\2"),
        "has version 2; llm.c's files of magic 20240520 have version 1",
    ),
    (
        write_llmc,
        change("a.bin", 0, struct.pack("<i", 20240522)),
        "has magic 20240522; llm.c writes",
    ),
    (write_npy, lambda: Path("a.npy").write_bytes(b"\x93NUMPY"), "is not a readable .npy file"),
    (
        write_npy,
        lambda: replaced("a.npy").symlink_to("/dev/zero"),
        r"a\.npy: it is no regular file",
    ),
    (write_megatron, lambda: os.mkfifo(replaced("a.idx")), r"a\.idx: it is no regular file"),
]


@pytest.mark.parametrize(
    ("write", "damage", "says"), DAMAGED, ids=[says[:40] for *_, says in DAMAGED]
)
def test_a_damaged_file_is_one_line(write, damage, says):
    write("a", [[BOS, *range(20), EOS] for _ in range(2)] + [[BOS, *range(21), EOS]])
    damage()
    with one_line(DataError, says):
        loader(config(paths=["a.*"]))


@pytest.mark.parametrize("name", ["megatron", "datatrove", "llmc", "npy"])
def test_random_damage_is_one_line(name):
    """Bytes of the index (or of a file without one) are changed or cut off: samples or one line, no crash."""
    write, settings = FORMATS[name]
    for seed in range(20):
        folder, random = Path(str(seed)), np.random.RandomState(seed)
        folder.mkdir()
        write(folder / "a", files_of_documents(1)[0])
        file = max(
            folder.iterdir(),
            key=lambda file: (file.suffix in (".idx", ".index"), file.suffix != ".metadata"),
        )
        content = bytearray(file.read_bytes())
        for at in random.randint(0, len(content), random.randint(1, 4)):
            content[at] = random.randint(0, 256)
        file.write_bytes(content[: random.randint(len(content)) if random.rand() < 0.3 else None])
        try:
            steps(
                [
                    loader(
                        config(**settings, paths=[f"{folder}/a.*"], attend_across_documents=False)
                    )
                ],
                3,
            )
        except DataError as error:
            assert "\n" not in str(error)


def test_ids_of_another_tokenizer():
    """A wrong id is found when the files are opened; one that is not read then, in its batch."""
    ids = np.zeros(200_000, "<u2")
    ids[150_000] = 258
    ids.tofile("a.bin")
    data = config(paths=["a.bin"], boundaries="none")
    read = loader(data)
    says = r"a\.bin: token 150000 has id 258, but the tokenizer has 258 tokens; would work: the tokenizer"
    for _ in range(150_000 // (B * T)):
        read.next()
    with one_line(DataError, says):
        read.next()
    ids[5] = 299
    ids.tofile("b.bin")
    with one_line(DataError, r"b\.bin: token 5 has id 299, but the tokenizer has 258"):
        loader(config(paths=["b.bin"]))
    loader(config(paths=["b.bin"]), tokenizer=NOTHING)
    with one_line(DataError, r"token 5 has id 299, but model\.vocab_size is 299"):
        loader(config(paths=["b.bin"]), tokenizer=NOTHING, model_vocab_size=299)
    np.full(100, -1, "<i4").tofile("c.bin")
    with one_line(DataError, r"c\.bin: token 0 has id -1"):
        loader(config(paths=["c.bin"], dtype="int32"))


@pytest.mark.parametrize("vocab_size", [300, 128_256])
@pytest.mark.parametrize("typed", [None, *TOKEN_DTYPES])
@pytest.mark.parametrize("stored", [np.uint16, np.int32, np.int64])
def test_bytes_of_ids_without_a_header(stored, typed, vocab_size):
    """Another number of bytes than the file's is refused, and what the message advises reads the ids."""
    ids = np.arange(1, 161) % 299 * (1 if stored == np.uint16 else vocab_size // 300)
    ids.astype(stored).tofile("a.bin")
    settings = {"tokenizer": NOTHING, "model_vocab_size": vocab_size}
    right = {2: "uint16", 4: "uint32", 8: "int64"}[np.dtype(stored).itemsize]
    if np.dtype(typed or smallest_dtype(vocab_size)).itemsize != np.dtype(stored).itemsize:
        with one_line(DataError, rf"a\.bin: its ids seem .*; would work: data\.dtype={right}$"):
            loader(config(dtype=typed), **settings)
        typed = right
    assert loader(config(dtype=typed), **settings).next().inputs_BT[0].tolist() == ids[:T].tolist()
