"""Data kind ``tokens``: other programs' token files, compared with their own readers and with numpy."""

import dataclasses
import json
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiers import THOROUGH

from harness.compose import compose_job
from harness.data import DataConfig, TokenizerConfig
from harness.data.cache import open_cache
from harness.data.corpus import Counts, Manifest, describe_shard, write_manifest
from harness.data.loader import IGNORE_INDEX, build_loader, merge_states
from harness.data.sources import LocalFiles
from harness.data.tokenizer import build_tokenizer
from harness.errors import ConfigError, DataError
from harness.evaluate.tasks import Setting, open_task
from harness.exchange.tokenizer import export_tokenizer

BOS, EOS = 256, 257
BYTES = build_tokenizer(TokenizerConfig("bytes"))
T, B = 16, 8


@pytest.fixture(autouse=True)
def in_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def files_of_documents(count=3):
    """Documents of ``count`` files, uneven, some shorter and some longer than a sample, none empty."""
    random = np.random.RandomState(7)
    lengths = [[40, 1, 3, 90, 2, 17], [5, 5], [64, 30, 1, 1, 200]]
    return [[[BOS, *random.randint(0, 256, n), EOS] for n in lengths[file % 3]] for file in range(count)]


# Writers of each format, by its published description. Each writes the documents of one file.


def write_megatron(stem, documents, code=8, dtype="<u2", modes=False, head=b"MMIDIDX\0\0", version=1):
    """As Megatron-Core: int32 lengths, int64 pointers, int64 first sequences; two sequences in a document."""
    sequences = [half for each in documents for half in (each[:2], each[2:])]
    sizes = np.array([len(each) for each in sequences], "<i4")
    pointers = (np.cumsum(sizes, dtype="<i8") - sizes) * np.dtype(dtype).itemsize
    firsts = np.arange(0, len(sequences) + 1, 2, dtype="<i8")
    header = head + struct.pack("<QBQQ", version, code, len(sizes), len(firsts))
    arrays = [sizes, pointers, firsts, *([np.zeros(len(sizes), "i1")] if modes else [])]
    Path(f"{stem}.idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    np.concatenate(documents).astype(dtype).tofile(f"{stem}.bin")


def write_datatrove(stem, documents, dtype="<u2", metadata="org/name|2"):
    np.concatenate(documents).astype(dtype).tofile(f"{stem}.ds")
    np.cumsum([len(each) for each in documents]).astype("<u8").tofile(f"{stem}.ds.index")
    Path(f"{stem}.ds.metadata").write_text(f"{metadata}\n{sum(map(len, documents))}\n1 T")


def write_llmc(stem, documents, magic=20240520, version=1, dtype="<u2", count=None):
    ids = np.concatenate(documents).astype(dtype)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    Path(f"{stem}.bin").write_bytes(header.tobytes() + ids.tobytes())


def write_memmap(stem, documents, dtype="<u2"):
    np.concatenate(documents).astype(dtype).tofile(f"{stem}.bin")


def write_npy(stem, documents, dtype="<u2"):
    np.save(f"{stem}.npy", np.concatenate(documents).astype(dtype))


def lists(documents, kind=None):
    return pa.table(
        {"id": range(len(documents)), "input_ids": pa.array(documents, kind or pa.list_(pa.int32()))}
    )


def write_stream(stem, documents, kind=None):
    """As `datasets`: the stream format, in several record batches."""
    table = lists(documents, kind)
    with pa.OSFile(f"{stem}.arrow", "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_arrow(stem, documents, kind=None, compression=None):
    table = lists(documents, kind)
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(f"{stem}.arrow", table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=3)


def write_parquet(stem, documents, kind=None):
    pq.write_table(lists(documents, kind), f"{stem}.parquet", row_group_size=2)


def with_int32(write, **settings):
    return lambda stem, documents: write(stem, documents, dtype="<i4", **settings)


def of_kind(write, kind):
    return lambda stem, documents: write(stem, documents, kind)


FORMATS = {
    "megatron": (write_megatron, {}),
    "megatron int32 with modes": (with_int32(write_megatron, code=4, modes=True), {}),
    "datatrove": (write_datatrove, {}),
    "datatrove, 4 bytes": (lambda s, d: write_datatrove(s, d, "<u4", "org/name|4"), {}),
    "memmap": (write_memmap, {}),
    "memmap, 4 bytes": (with_int32(write_memmap), {"dtype": "int32"}),
    "npy": (write_npy, {}),
    "llmc": (write_llmc, {"boundaries": "eos"}),
    "llmc for llama 3": (lambda s, d: write_llmc(s, d, 20240801, 7, "<u4"), {}),
    "arrow": (write_arrow, {}),
    "arrow, large lists of int64": (of_kind(write_arrow, pa.large_list(pa.int64())), {}),
    "arrow stream": (write_stream, {}),
    "parquet": (write_parquet, {}),
}


def config(**settings):
    data = DataConfig(kind="tokens", shuffle=False, cache_dir="cache", **{"paths": ["*.*"], **settings})
    data.validate()
    return data


def loader(data, rows=range(B), split="train", tokenizer=BYTES, vocab_size=300):
    settings = {"seq_len": T, "global_batch_size": B, "seed": 0, "model_vocab_size": vocab_size}
    return build_loader(data, tokenizer, rows=rows, split=split, **settings)


def expected_rows(documents, num_rows):
    """Reference: rows of inputs, labels and document numbers, from lists of documents."""
    ids = [token for each in documents for token in each]
    owners = [number for number, each in enumerate(documents) for _ in each]
    rows = []
    for sample in range(num_rows):
        begin = sample % ((len(ids) - 1) // T) * T
        inputs, after = ids[begin : begin + T], ids[begin + 1 : begin + T + 1]
        numbers = owners[begin : begin + T + 1]
        labels = [a if m == n else IGNORE_INDEX for a, m, n in zip(after, numbers, numbers[1:], strict=False)]
        rows.append((inputs, labels, [number - numbers[0] for number in numbers[:-1]]))
    return [torch.tensor(column) for column in zip(*rows, strict=True)]


def read_rows(loaders, steps):
    """Rows of ``steps`` global steps that loaders of consecutive rows read."""
    batches = [[each.next() for each in loaders] for _ in range(steps)]
    return [torch.cat([batch[i] for step in batches for batch in step]) for i in range(3)]


def assert_rows(found, documents):
    for a, b in zip(found, expected_rows(documents, len(found[0])), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", FORMATS)
def test_samples(name):
    """Samples cross files; labels and document numbers follow the documents; auto finds the format."""
    write, settings = FORMATS[name]
    files = files_of_documents()
    for number, documents in enumerate(files):
        write(f"web_{number}", documents)
    data = config(**settings, attend_across_documents=False)
    assert_rows(read_rows([loader(data)], 5), [each for documents in files for each in documents])


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_and_resuming(ranks):
    files = files_of_documents()
    for number, documents in enumerate(files):
        write_megatron(f"web_{number}", documents)
    data = config(attend_across_documents=False)
    parts = [range(rank * B // ranks, (rank + 1) * B // ranks) for rank in range(ranks)]
    before = [loader(data, rows) for rows in parts]
    first = read_rows(before, 2)
    state = merge_states([json.loads(json.dumps(each.state_dict())) for each in before])
    after = [loader(data, range(row, row + 2)) for row in range(0, B, 2)]
    for each in after:
        each.load_state_dict(state)
    rows = [torch.cat(pair) for pair in zip(first, read_rows(after, 3), strict=True)]
    assert_rows(rows, [each for documents in files for each in documents])


@pytest.mark.parametrize("name", ["megatron", "datatrove", "arrow", "npy", "parquet"])
def test_the_end_of_each_file_is_held_out(name):
    write, settings = FORMATS[name]
    files = files_of_documents(2)
    for number, documents in enumerate(files):
        write(f"web_{number}", documents)
    data = config(**settings, validation_fraction=0.45, boundaries="none")
    # 45% of the first file's 165 tokens are 74; its last documents that fit have 4 and 19 tokens. The second
    # file has two documents of 7 tokens; 45% are 6 tokens.
    if name == "parquet":  # one cache of all files
        train, held_out = files[0][:4], [*files[0][4:], *files[1]]
    else:
        train, held_out = [*files[0][:4], files[1][0]], [*files[0][4:], files[1][1]]
    if name == "npy":  # without an index: cut anywhere
        ids = [[token for each in documents for token in each] for documents in files]
        cuts = [len(each) - round(0.45 * len(each)) for each in ids]
        train = [each[:cut] for each, cut in zip(ids, cuts, strict=True)]
        held_out = [each[cut:] for each, cut in zip(ids, cuts, strict=True)]
    for split, documents in (("train", train), ("validation", held_out)):
        ids = [token for each in documents for token in each]
        rows = loader(data, split=split).next()
        found = torch.stack([rows.inputs_BT, rows.labels_BT])
        for row in range(B):
            begin = row % ((len(ids) - 1) // T) * T
            assert found[0, row].tolist() == ids[begin : begin + T], split
            assert found[1, row].tolist() == ids[begin + 1 : begin + T + 1], split


def test_boundaries_at_the_first_token():
    """llm.c's documents begin with their separator: a label is masked where it is that token."""
    write_llmc("a", [[EOS, *range(n)] for n in (20, 5, 40)])
    gpt2 = build_tokenizer(TokenizerConfig("none", eos=str(EOS)))
    batch = loader(config(), tokenizer=gpt2).next()
    ids = torch.tensor([EOS, *range(20), EOS, *range(5), EOS, *range(40)])
    assert torch.equal(batch.inputs_BT[0], ids[:T])
    assert torch.equal(batch.labels_BT[1], torch.where(ids == EOS, IGNORE_INDEX, ids)[T + 1 : 2 * T + 1])


def test_unknown_boundaries(capfd):
    """No label is masked; attention within documents is refused; a token that never occurs is reported."""
    documents = files_of_documents(1)[0]
    write_memmap("a", documents)
    nothing = build_tokenizer(TokenizerConfig("none"))
    for data, tokenizer in ((config(), nothing), (config(boundaries="none"), BYTES)):
        ids = np.concatenate(documents)
        assert loader(data, tokenizer=tokenizer).next().labels_BT[0].tolist() == ids[1 : T + 1].tolist()
        with pytest.raises(ConfigError, match="boundaries of documents are unknown"):
            loader(dataclasses.replace(data, attend_across_documents=False), tokenizer=tokenizer)
    with pytest.raises(ConfigError, match=r"data\.boundaries=eos: the tokenizer has no such token"):
        loader(config(boundaries="eos"), tokenizer=nothing)
    assert capfd.readouterr().err == ""
    loader(config(), tokenizer=build_tokenizer(TokenizerConfig("none", eos="299")))
    assert "tokens have no document boundary (id 299)" in capfd.readouterr().err


def test_lists_with_null_and_empty_rows():
    documents = [[BOS, 1, 2], [], None, [3, EOS], [7] * 40]
    for kind, write in (("arrow", write_arrow), ("parquet", write_parquet)):
        write("a", documents)
        ids = [1, 2, 3, EOS, *[7] * 40][:T]
        batch = loader(config(paths=[f"a.{kind}"])).next()
        expected = [IGNORE_INDEX if position in (2, 4) else token for position, token in enumerate(ids)]
        assert batch.labels_BT[0].tolist() == expected, kind


def test_lists_of_one_length():
    write_arrow("a", [list(range(10)) for _ in range(20)], pa.list_(pa.uint16(), 10))
    labels = loader(config()).next().labels_BT[0].tolist()
    assert labels == [*range(1, 10), IGNORE_INDEX, *range(1, 7)]


def test_a_saved_dataset():
    """A tokenized dataset of `datasets`, saved in two files beside a file that is not part of it."""
    datasets = pytest.importorskip("datasets")
    documents = files_of_documents(1)[0]
    saved = datasets.Dataset.from_dict({"ids": documents})
    saved.save_to_disk("saved", num_shards=2)
    write_stream("saved/cache-1", [[1, 2, 3]])
    assert_rows(
        read_rows([loader(config(paths=["saved"], tokens_field="ids", attend_across_documents=False))], 3),
        datasets.load_from_disk("saved")["ids"],
    )
    datasets.DatasetDict(train=saved, test=saved).save_to_disk("splits")
    with pytest.raises(DataError, match=r"has the splits train, test; would work: the folder of one"):
        loader(config(paths=["splits"]))


def write_corpus(folder, shards, validation_fraction=0.0):
    """A corpus, each shard a token cache of its texts."""
    entries, totals = [], {"train": 0, "validation": 0}
    for number, texts in enumerate(shards):
        for index, text in enumerate(texts):
            file = Path(f"text/{folder}-{number}-{index:02}.txt")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        source = LocalFiles(DataConfig(paths=[f"text/{folder}-{number}-*.txt"]), "paths")
        settings = {"wait_for_all": None, "is_builder": True, "held_out": validation_fraction}
        open_cache(source, BYTES, split="train", cache_dir=f"{folder}/{number}", **settings)
        (built,) = Path(f"{folder}/{number}").glob("tokens-*")
        shard = built.rename(f"{folder}/shard-{number:05}")
        meta = json.loads((shard / "meta.json").read_text())
        for split in totals:
            totals[split] += meta["tokens"][split]
        entries.append(describe_shard(shard, Counts(meta["tokens"], {"train": 0, "validation": 0})))
    tokenizer = {"name": "bytes", "fingerprint": BYTES.fingerprint, "vocab_size": 258}
    counts = Counts(totals, {"train": 0, "validation": 0})
    write_manifest(Path(folder), Manifest(1, tokenizer, {}, validation_fraction, counts, entries, "key"))


def test_a_corpus_in_shards_has_the_samples_of_one_cache():
    """Its samples are those of data=local_text on the same documents: the same order, the same held out."""
    texts = [f"{number:02}" * (1 + number * number % 11) for number in range(40)]
    write_corpus("whole", [texts], validation_fraction=0.2)
    local = DataConfig(paths=["text/whole-*.txt"], validation_fraction=0.2, cache_dir="cache")
    for split in ("train", "validation"):
        rows = read_rows_of(loader(local, split=split))
        assert torch.equal(rows, read_rows_of(loader(DataConfig("tokens", ["whole"]), split=split)))
    write_corpus("cut", [texts[:7], texts[7:8], texts[8:]])
    local = dataclasses.replace(local, validation_fraction=0.0)
    assert torch.equal(read_rows_of(loader(local)), read_rows_of(loader(DataConfig("tokens", ["cut"]))))


def read_rows_of(a_loader):
    return torch.stack([torch.stack([*a_loader.next()[:2]]) for _ in range(12)])


def test_a_corpus_that_does_not_fit():
    write_corpus("corpus", [["some text " * 40, "more " * 40, "text " * 40]], validation_fraction=0.5)
    with pytest.raises(ConfigError, match="has held-out documents of its own; would work: 0"):
        loader(config(paths=["corpus"], validation_fraction=0.1))
    other = build_tokenizer(TokenizerConfig("sentencepiece", "asset:python_2k.model"))
    with pytest.raises(DataError, match=r"corpus: was tokenized by bytes \(258 tokens\)"):
        loader(config(paths=["corpus"]), tokenizer=other, vocab_size=2048)
    loader(config(paths=["corpus"]), tokenizer=build_tokenizer(TokenizerConfig("none")))
    write_corpus("plain", [["some text " * 40]])
    rows = read_rows_of(loader(config(paths=["."])))  # the folder of both corpora
    assert torch.equal(rows, read_rows_of(loader(config(paths=["corpus", "plain"]))))
    with pytest.raises(ConfigError, match="no tokens are held out for validation"):
        loader(config(paths=["plain"]), split="validation")


def test_validation_paths():
    documents = files_of_documents(2)
    for name, written in zip(("train", "val"), documents, strict=True):
        Path(name).mkdir()
        write_datatrove(f"{name}/a", [*written, *written])
    data = config(paths=["train"], validation_paths=["val/*.ds"], attend_across_documents=False)
    assert_rows(read_rows([loader(data, split="validation")], 1), [*documents[1], *documents[1]])


def test_paths():
    """A prefix of Megatron, its two files, a glob and a folder name the same tokens, each once."""
    Path("web").mkdir()
    write_megatron("web/a_text_document", files_of_documents(1)[0])
    expected = read_rows_of(loader(config(paths=["web"])))
    for paths in (["web/a_text_document"], ["web/*"], ["web/a_text_document.idx"], ["web/*.bin", "web"]):
        assert torch.equal(read_rows_of(loader(config(paths=paths))), expected), paths
    Path("data").mkdir()
    for name in ("train", "val"):
        write_memmap(f"data/{name}", files_of_documents(1)[0])
    with pytest.raises(DataError, match=r"several splits, such as train\.bin and val\.bin; would work"):
        loader(config(paths=["data"]))
    with pytest.raises(DataError, match=r"several formats: .*web.*\(megatron\).*; would work: data\.format"):
        loader(config(paths=["web", "data/train.bin"]))
    with pytest.raises(DataError, match=r"no token file matches data\.paths=\[nothing\]"):
        loader(config(paths=["nothing"]))
    Path("a.tokens").write_bytes(b"12345678")
    with pytest.raises(DataError, match=r"a\.tokens: the format of its tokens is unknown"):
        loader(config(paths=["a.tokens"]))


def change(name, at, content):
    def damage():
        with open(name, "r+b") as file:
            file.seek(at)
            file.write(content)

    return damage


def append(name, content=b"\0"):
    return lambda: Path(name).open("ab").write(content)


# 6 sequences: their lengths are at byte 34, pointers at 34 + 24, documents at 34 + 72.
DAMAGED = [
    (write_megatron, change("a.idx", 0, b"MMIDIDY"), "does not begin with Megatron's MMIDIDX"),
    (write_megatron, change("a.idx", 0, b"TNTIDX\0\0"), "older lazy or cached format"),
    (write_megatron, change("a.idx", 9, b"\2"), "has version 2 of Megatron's index"),
    (write_megatron, change("a.idx", 17, b"\7"), "has type code 7"),
    (write_megatron, append("a.idx"), "has 139 bytes, which are not 6 sequences and 4 document boundaries"),
    (write_megatron, change("a.idx", 34, b"\4"), "sequences do not follow each other without gaps"),
    (write_megatron, change("a.idx", 34 + 24, b"\2"), "sequences do not follow each other without gaps"),
    (
        write_megatron,
        change("a.idx", 34 + 72 + 8, b"\5"),
        "first sequences of its documents are not ascending",
    ),
    (write_megatron, change("a.idx", 34 + 72 + 24, b"\7"), "do not begin with sequence 0 and end with 6"),
    (write_megatron, append("a.bin"), r"a\.bin: has 135 bytes, which are not 67 tokens of uint16"),
    (write_megatron, lambda: Path("a.bin").unlink(), r"a\.bin: No such file"),
    (write_datatrove, append("a.ds"), r"a\.ds: has 135 bytes, which are not 67 tokens of uint16"),
    (write_datatrove, append("a.ds.index"), "has 25 bytes, which are no complete offsets"),
    (write_datatrove, change("a.ds.index", 0, b"\x3f"), "documents' ends are not ascending"),
    (write_datatrove, change("a.ds.index", 7, b"\xff"), "documents' ends are not ascending"),
    (write_datatrove, lambda: Path("a.ds.metadata").write_text("gpt2"), "first line is not NAME"),
    (write_datatrove, lambda: Path("a.ds.loss").touch(), "has a loss mask"),
    (write_llmc, change("a.bin", 4, b"\2"), "has version 2; llm.c's files of magic 20240520 have version 1"),
    (write_llmc, append("a.bin"), "are not 67 tokens of uint16 after a header of 1024 bytes"),
    (write_llmc, change("a.bin", 0, struct.pack("<i", 20240522)), "multiple-choice examples"),
    (write_llmc, lambda: Path("a.bin").write_bytes(struct.pack("<i", 20240520)), "shorter than the header"),
    (write_memmap, append("a.bin"), r"has 135 bytes, which are not 67 tokens of uint16"),
    (with_int32(write_memmap), lambda: None, "every second id is 0.*would work: data.dtype=uint32"),
    (write_npy, lambda: Path("a.npy").write_bytes(b"\x93NUMPY"), "is not a readable .npy file"),
    (write_npy, lambda: np.save("a.npy", np.zeros((2, 2), "u2")), "has uint16 in 2 dimensions"),
    (write_npy, lambda: np.save("a.npy", np.zeros(99)), "has float64 in 1 dimensions"),
    (write_stream, change("a.arrow", 8, b"\xff" * 64), r"a\.arrow: is no readable Arrow file"),
    (write_stream, lambda: Path("a.arrow").write_bytes(b""), r"a\.arrow: "),
    (write_arrow, lambda: write_arrow("a", [[1.5]], pa.list_(pa.float32())), "has values of type list<"),
    (write_arrow, lambda: write_arrow("a", [[1, None, 2]]), "has null among its token ids"),
    (write_arrow, lambda: write_arrow("a", [[7] * 9999], compression="lz4"), "is compressed"),
    (write_parquet, lambda: write_parquet("a", [[1, None, 2]]), "row 0 of column 'input_ids' is no list of"),
    (write_parquet, change("a.parquet", 0, b"\xff" * 600), r"a\.parquet cannot be read"),
    (
        write_parquet,
        lambda: write_parquet("a", [[1, 70000]]),
        "row 0: token 1 has id 70000, but the tokenizer has 258",
    ),
]


@pytest.mark.parametrize(("write", "damage", "says"), DAMAGED, ids=[says[:40] for *_, says in DAMAGED])
def test_a_damaged_file_is_one_line(write, damage, says):
    write("a", [[BOS, *range(20), EOS] for _ in range(2)] + [[BOS, *range(21), EOS]])
    damage()
    with pytest.raises(DataError, match=says) as caught:
        loader(config(paths=["a.*"]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["megatron", "datatrove", "llmc", "npy", "arrow", "arrow stream", "parquet"])
def test_random_damage_is_one_line(name):
    """Bytes of the index (or of a file without one) are changed or cut off: samples or one line, no crash."""
    write, settings = FORMATS[name]
    for seed in range(300 if THOROUGH else 20):
        folder, random = Path(str(seed)), np.random.RandomState(seed)
        folder.mkdir()
        write(folder / "a", files_of_documents(1)[0])
        file = max(
            folder.iterdir(), key=lambda file: (file.suffix in (".idx", ".index"), file.suffix != ".metadata")
        )
        content = bytearray(file.read_bytes())
        for at in random.randint(0, len(content), random.randint(1, 4)):
            content[at] = random.randint(0, 256)
        file.write_bytes(content[: random.randint(len(content)) if random.rand() < 0.3 else None])
        try:
            read_rows([loader(config(**settings, paths=[f"{folder}/a.*"], attend_across_documents=False))], 3)
        except DataError as error:
            assert "\n" not in str(error)


def test_settings_of_another_format():
    write_megatron("a", files_of_documents(1)[0])
    for name, value in (("dtype", "uint16"), ("tokens_field", "ids")):
        with pytest.raises(ConfigError, match=rf"data\.{name}={value}: is read only from .* is megatron"):
            loader(config(**{name: value}))


def test_another_tokenizer_by_name(capfd):
    write_datatrove("a", files_of_documents(1)[0])
    loader(config())
    assert "a.ds was made by the tokenizer org/name; tokenizer.path is None" in capfd.readouterr().err
    loader(config(), tokenizer=build_tokenizer(TokenizerConfig("none")))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("tokenizer=none", "tokenizer.kind=none: cannot encode text, and data.kind=local reads text"),
        (
            "data=tokens data.paths=[a] evaluation.interval=1",
            "evaluation.tasks=data: data.kind=tokens has no text",
        ),
    ],
)
def test_jobs_that_need_text(typed, says):
    with pytest.raises(ConfigError, match=says):
        compose_job(typed.split())


def test_without_a_tokenizer():
    """It encodes nothing, and a checkpoint that records it names no tokenizer."""
    nothing = build_tokenizer(TokenizerConfig("none"))
    for use in (
        lambda: nothing.encode("a"),
        lambda: nothing.encode_batch(["a"]),
        lambda: nothing.decode([1]),
    ):
        with pytest.raises(DataError, match="tokenizer=none has token ids but no text"):
            use()
    export_tokenizer(TokenizerConfig("none"), Path("exported"))
    assert not Path("exported").exists()
    setting = Setting(BYTES, 300, config(paths=["a"]), "all", 16, "", None, None)
    with pytest.raises(ConfigError, match=r"data\.kind=tokens: has no text to evaluate"):
        open_task("data", setting)


def test_ids_of_another_tokenizer():
    """A wrong id is found when the files are opened; one that is not read then, in its batch."""
    ids = np.zeros(200_000, "<u2")
    ids[150_000] = 258
    ids.tofile("a.bin")
    data = config(paths=["a.bin"], boundaries="none")
    read = loader(data)
    says = (
        r"a\.bin: token 150000 has id 258, but the tokenizer has 258 tokens; would work: the tokenizer that"
    )
    for _ in range(150_000 // (B * T)):
        read.next()
    with pytest.raises(DataError, match=says):
        read.next()
    ids[5] = 299
    ids.tofile("b.bin")
    with pytest.raises(DataError, match=r"b\.bin: token 5 has id 299, but the tokenizer has 258"):
        loader(config(paths=["b.bin"]))
    nothing = build_tokenizer(TokenizerConfig("none"))
    loader(config(paths=["b.bin"]), tokenizer=nothing)
    with pytest.raises(DataError, match=r"token 5 has id 299, but model\.vocab_size is 299"):
        loader(config(paths=["b.bin"]), tokenizer=nothing, vocab_size=299)
    np.full(100, -1, "<i4").tofile("c.bin")
    with pytest.raises(DataError, match=r"c\.bin: token 0 has id -1"):
        loader(config(paths=["c.bin"], dtype="int32"))


def test_ids_of_two_bytes_read_as_four():
    write_memmap("a", [range(80)])
    with pytest.raises(DataError, match=r"most ids are outside.*would work: data\.dtype=uint16"):
        loader(config(), tokenizer=build_tokenizer(TokenizerConfig("none")), vocab_size=128_256)


def test_many_files_need_few_descriptors():
    for number in range(300):
        write_datatrove(f"{number:03}", [[BOS, *range(20), EOS]])
    read = loader(config(paths=["*.ds"]))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        read.next()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1


def test_megatron_reads_the_same():
    """Judged by Megatron-Core's own writer and reader."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    files = files_of_documents()
    for number, (documents, dtype) in enumerate(zip(files, (np.uint16, np.int32, np.int64), strict=True)):
        builder = IndexedDatasetBuilder(f"{number}.bin", dtype=dtype)
        for each in documents:
            builder.add_document(torch.tensor(each), [2, len(each) - 2])
        builder.finalize(f"{number}.idx")
    theirs = [IndexedDataset(str(number)) for number in range(3)]
    found = [
        np.concatenate(each[first:last]).tolist()
        for each in theirs
        for first, last in zip(each.document_indices, each.document_indices[1:], strict=False)
    ]
    assert found == [each for documents in files for each in map(list, documents)]
    assert_rows(read_rows([loader(config(attend_across_documents=False))], 5), found)
    for number, documents in enumerate(files):
        write_megatron(f"ours_{number}", documents)
        theirs = IndexedDataset(f"ours_{number}")
        assert np.concatenate(theirs[0 : len(theirs)]).tolist() == np.concatenate(documents).tolist()


def test_datatrove_reads_the_same():
    """Judged by datatrove's own writer and reader, whose samples of T + 1 tokens do not overlap."""
    pytest.importorskip("datatrove", reason="datatrove is not installed")
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile
    from datatrove.utils.dataset import DatatroveFileDataset

    documents = files_of_documents(1)[0]
    for size in (2, 4):
        settings = {"tokenizer_name_or_path": "org/name", "save_final_metadata": True, "token_size": size}
        file = TokenizedFile(str(Path.cwd()), f"{size}.ds", **settings)
        for each in documents:
            file.write([int(token) for token in each], None)
        file.close()
        data = config(paths=[f"{size}.ds"], attend_across_documents=False)
        rows = read_rows([loader(data)], 2)
        assert_rows(rows, documents)
        theirs = DatatroveFileDataset(f"{size}.ds", seq_len=T, token_size=size)
        found = torch.cat([theirs[index]["input_ids"] for index in range(len(theirs))])
        ours = torch.cat(list(rows[0][: len(found) // T]))
        assert torch.equal(found[: len(ours)], ours[: len(found)])
