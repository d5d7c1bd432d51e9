"""Data kind ``tokens``: other programs' token files, compared with their own readers and with numpy."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from token_writers import (
    BOS,
    BYTES,
    EOS,
    FORMATS,
    B,
    T,
    assert_rows,
    config,
    files_of_documents,
    loader,
    read_rows,
    write_arrow,
    write_datatrove,
    write_llmc,
    write_megatron,
    write_memmap,
    write_parquet,
    write_stream,
)

from harness.config.data import DataConfig, TokenizerConfig
from harness.data.cache import open_cache
from harness.data.corpus import SPLITS, Counts, read_manifest
from harness.data.loader import IGNORE_INDEX, merge_states
from harness.data.shards import write_manifest
from harness.data.sources import LocalFiles
from harness.data.tokenizer import build_tokenizer
from harness.tools.inference.tasks import Setting, open_task
from harness.util.errors import ConfigError, DataError
from harness.weights.tokenizer import export_tokenizer


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
    entries = []
    for number, texts in enumerate(shards):
        for index, text in enumerate(texts):
            file = Path(f"text/{folder}-{number}-{index:02}.txt")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        source = LocalFiles(DataConfig(paths=[f"text/{folder}-{number}-*.txt"]), "paths")
        settings = {"wait_for_all": None, "is_builder": True, "held_out": validation_fraction}
        open_cache(source, BYTES, split="train", cache_dir=f"{folder}/{number}", **settings)
        (built,) = Path(f"{folder}/{number}").glob("corpus-*")
        manifest = read_manifest(built)
        (built / "shard-00000").rename(f"{folder}/shard-{number:05}")
        entries.append(dataclasses.replace(manifest.shards[0], folder=f"shard-{number:05}"))
    counts = Counts(
        *(
            {split: sum(getattr(each.counts, kind)[split] for each in entries) for split in SPLITS}
            for kind in ("tokens", "documents")
        )
    )
    write_manifest(Path(folder), dataclasses.replace(manifest, counts=counts, shards=entries))


def test_a_corpus_in_shards_has_the_samples_of_one_cache():
    """Its samples are those of data=local_text on the same documents: the same order, the same held out."""
    texts = [f"{number:02}" * (1 + number * number % 11) for number in range(40)]
    write_corpus("whole", [texts], validation_fraction=0.2)
    local = DataConfig(paths=["text/whole-*.txt"], validation_fraction=0.2, cache_dir="cache")
    for split in ("train", "validation"):
        rows = read_rows_of(loader(local, split=split))
        assert torch.equal(rows, read_rows_of(loader(DataConfig("tokens", paths=["whole"]), split=split)))
    write_corpus("cut", [texts[:7], texts[7:8], texts[8:]])
    local = dataclasses.replace(local, validation_fraction=0.0)
    assert torch.equal(read_rows_of(loader(local)), read_rows_of(loader(DataConfig("tokens", paths=["cut"]))))


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


def test_validation_of_corpora_of_which_one_has_held_out_documents():
    """The other one is for training only, also in a mixture."""
    write_corpus("held", [["one " * 30, "two " * 30, "three " * 30, "four " * 30]], validation_fraction=0.5)
    write_corpus("plain", [["some text " * 40]])
    own = read_rows_of(loader(config(paths=["held"]), split="validation"))
    both = config(paths=["held", "plain"])
    assert torch.equal(read_rows_of(loader(both, split="validation")), own)
    sources = {name: DataConfig("tokens", paths=[name]) for name in ("held", "plain")}
    mixture = DataConfig("mixture", sources=sources, weights={"held": 1.0, "plain": 1.0})
    mixture.validate()
    assert torch.equal(read_rows_of(loader(mixture, split="validation")), own)
    alone = dataclasses.replace(mixture, sources={"plain": sources["plain"]}, weights={"plain": 1.0})
    with pytest.raises(ConfigError, match=r"data\.sources\.plain\..*no tokens are held out for validation"):
        loader(alone, split="validation")
