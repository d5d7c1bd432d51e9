"""Loaders of small samples, what the ranks of a layout read, and the same without the code under test."""

import dataclasses
import hashlib
import json
from itertools import accumulate, count, islice
from pathlib import Path

import numpy as np
import torch
import yaml

from harness.config.data import DataConfig, TokenizerConfig
from harness.config.training import Sizes
from harness.data.batch import IGNORE_INDEX
from harness.data.kinds import build_loader
from harness.data.loader import merge_states
from harness.data.samples import Reading
from harness.data.tokenizer import build_tokenizer

BYTES = build_tokenizer(TokenizerConfig("bytes"))
BOS, EOS = 256, 257
T, B = 16, 8
# (last step, size) of batches, and of sequences. In the last case steps of 8 tokens end inside a sample.
CHANGES = yaml.safe_load("""
none: [[], []]
batch: [[[3, 4], [7, 2]], []]
length: [[], [[2, 4], [5, 8]]]
both: [[[3, 4], [7, 2]], [[2, 4], [5, 8]]]
inside a sample: [[[3, 2]], [[1, 4], [6, 8]]]
""")
WEIGHTS = {"code": 0.2, "math": 0.1, "web": 0.7}


def loader(data, rows=None, *, tokenizer=BYTES, **settings):
    data.validate()
    settings = {
        "seq_len": T,
        "global_batch_size": B,
        "seed": 0,
        "model_vocab_size": 300,
        **settings,
    }
    sizes = Sizes(settings["global_batch_size"], settings["seq_len"])
    settings = {"split": "train", "sizes": sizes, **settings}
    rows = range(settings["global_batch_size"]) if rows is None else rows
    return build_loader(Reading(data, tokenizer, rows=rows, **settings))


def split_rows(ranks, batch_size=B):
    return [
        range(rank * batch_size // ranks, (rank + 1) * batch_size // ranks) for rank in range(ranks)
    ]


def ranks_of(data, ranks, **settings):
    rows = split_rows(ranks, settings.get("global_batch_size", B))
    return [loader(data, each, **settings) for each in rows]


def steps(loaders, number):
    """Global batches, each inputs, labels, and document numbers and sources where they are."""
    batches = [[each.next() for each in loaders] for _ in range(number)]
    return [
        [torch.cat(parts) for parts in zip(*ranks, strict=True) if parts[0] is not None]
        for ranks in batches
    ]


def resumed(before, after):
    """Loaders that continue where those of another number of ranks were."""
    state = json.loads(json.dumps(merge_states([each.state_dict() for each in before])))
    for each in after:
        each.load_state_dict(state)
    return after


def write_texts():
    """Forty documents of uneven length, one of them longer than many samples."""
    texts = [f"{i:02}" * (1 + i * i % 11) if i != 7 else "long " * 40 for i in range(40)]
    for i, text in enumerate(texts):
        Path(f"{i:02}.txt").write_text(text)
    return texts


def local(**changed):
    write_texts()
    return DataConfig(
        **{"paths": ["*.txt"], "cache_dir": "cache", "attend_across_documents": False, **changed}
    )


def streamed(files, **changed):
    """120 documents, some empty, one long, in as many files as rows (read by file) or fewer (by example)."""
    texts = [f"<{i:03}>" + "abcdefghij"[i % 10] * (i * i % 23) if i % 6 else "" for i in range(120)]
    texts[50] = "long" * 60
    folder = Path(f"stream-{files}")
    folder.mkdir(exist_ok=True)
    for shard in range(files):
        write_jsonl(folder / f"train-{shard}.jsonl", texts[shard::files])
    write_jsonl(folder / "validation-0.jsonl", [f"validation {i}" for i in range(40)])
    settings = {
        "validation_split": "validation",
        "streaming": True,
        "shuffle": False,
        "workers": 0,
        **changed,
    }
    return DataConfig(kind="hub", dataset=str(folder.absolute()), **settings)


def mixture(**changed):
    for name, files in (("web", 30), ("code", 9), ("math", 5)):
        Path(name).mkdir(exist_ok=True)
        for i in range(files):
            Path(name, f"{i:02}.txt").write_text(f"{name}{i:02} " * (1 + i * i % 13))
    sources = {name: DataConfig(paths=[f"{name}/*.txt"]) for name in WEIGHTS}
    data = DataConfig(kind="mixture", sources=sources, weights=WEIGHTS, cache_dir="cache")
    return dataclasses.replace(data, **changed)


def with_stream(files):
    sources = {"web": DataConfig(paths=["web/*.txt"]), "c4": streamed(files)}
    return mixture(sources=sources, weights={"web": 1.0, "c4": 1.0})


def write_jsonl(file, texts, field="text"):
    lines = (json.dumps({field: text, "n": i}) + "\n" for i, text in enumerate(texts))
    Path(file).write_text("".join(lines))


def permutation(purpose, seed, number, length):
    """The numbers that numpy keeps for all its versions (NEP 19)."""
    digest = hashlib.sha256(f"{purpose}/{seed}/{number}".encode()).digest()
    words = np.random.SeedSequence(int.from_bytes(digest, "little"))
    order = np.random.RandomState(np.random.MT19937(words)).permutation(length).tolist()
    return order


def ids_of(texts):
    return [[BOS, *text.encode(), EOS] for text in texts if text]


def packed(documents, seed=None, *, masks=True):
    """Samples without end: documents cut every T tokens, with a seed in another order in every epoch."""
    tokens = [token for each in documents for token in each]
    first = [position == 0 for each in documents for position in range(len(each))]
    samples = (len(tokens) - 1) // T
    for epoch in count():
        for index in range(samples) if seed is None else permutation("order", seed, epoch, samples):
            at = range(index * T, index * T + T)
            labels = [IGNORE_INDEX if masks and first[i + 1] else tokens[i + 1] for i in at]
            numbers = accumulate([0, *(int(first[i]) for i in at[1:])])
            yield [tokens[i] for i in at], labels, list(numbers)


def scheduled(samples, changes, number):
    """Steps that read samples from left to right, with sizes that change."""
    batch_sizes, lengths = changes
    read, position = list(islice(samples, number * B)), 0
    for step in range(1, number + 1):
        rows = next((size for last, size in batch_sizes if step <= last), B)
        length = next((size for last, size in lengths if step <= last), T)
        position += -position % length
        pieces = []
        for begin in range(position, position + rows * length, length):
            inputs, labels, owners = (
                part[begin % T : begin % T + length] for part in read[begin // T]
            )
            pieces.append((inputs, labels, [owner - owners[0] for owner in owners]))
        position += rows * length
        yield [torch.tensor(column) for column in zip(*pieces, strict=True)]
