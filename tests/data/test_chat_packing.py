"""Conversations are packed first-fit, against a plain implementation; and the rows of all layouts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.config.data import DataConfig, TokenizerConfig
from harness.data.chat import first_fit
from harness.data.loader import IGNORE_INDEX, Loader, build_loader, merge_states
from harness.data.samples import random_stream
from harness.data.tokenizer import build_tokenizer
from harness.util.errors import ConfigError, DataError

BYTES = build_tokenizer(TokenizerConfig("bytes"))
T, B = 96, 8
Row = tuple[list[int], list[int], list[int]]


def text_of(generator: random.Random) -> str:
    return "".join(generator.choices("abcdef ", k=generator.randint(1, 30)))


def a_conversation(generator: random.Random) -> list[dict[str, str]]:
    turns = generator.randint(1, 3)
    roles = ("user", "assistant") * turns if generator.random() < 0.9 else ("user",)
    return [{"role": role, "content": text_of(generator)} for role in roles]


GENERATOR = random.Random(1)
CONVERSATIONS = [a_conversation(GENERATOR) for _ in range(120)]
CONFIG = DataConfig(
    kind="chat",
    paths=["*.jsonl"],
    chat_template="plain",
    attend_across_documents=False,
    cache_dir="cache",
)


@pytest.fixture(autouse=True)
def files(in_temporary_folder: None) -> None:
    for name, part in (("a", CONVERSATIONS[:50]), ("b", CONVERSATIONS[50:])):
        lines = [json.dumps({"messages": messages}) for messages in part]
        Path(f"{name}.jsonl").write_text("\n".join(lines))


def loader(config: DataConfig = CONFIG, rows: range = range(B), **settings: Any) -> Loader:
    config.validate()
    defaults = {"seq_len": T, "global_batch_size": B, "seed": 3, "model_vocab_size": 300}
    return build_loader(config, BYTES, rows=rows, **{**defaults, **settings})


def rows_of(loaders: list[Loader], steps: int) -> list[Row]:
    """The rows of some steps: inputs, labels and documents."""
    found = []
    for _ in range(steps):
        for batch in [each.next() for each in loaders]:
            assert batch.documents_BT is not None
            found += zip(
                batch.inputs_BT.tolist(), batch.labels_BT.tolist(), batch.documents_BT.tolist(), strict=True
            )
    return found


# -- an implementation of its own ----


def tokens_of(messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
    """Tokens of the plain template, and whether the assistant wrote each."""
    tokens, written = [BYTES.bos_id], [False]
    for message in messages:
        own = message["role"] == "assistant"
        for text, learned in ((f"{message['role']}:", False), (f" {message['content']}", own)):
            tokens += list(text.encode())
            written += [learned] * len(text)
        tokens += [BYTES.eos_id, ord("\n")] if own else [ord("\n")]
        written += [True, False] if own else [False]
    return tokens, written  # type: ignore[return-value]


def packed(config: DataConfig, epochs: int) -> list[Row]:
    """The rows of some epochs."""
    usable = []
    for messages in CONVERSATIONS:
        tokens, written = tokens_of(messages)
        if config.long_conversations == "cut":
            tokens, written = tokens[: T + 1], written[: T + 1]
        if any(written[1:]) and len(tokens) <= T + 1:
            usable.append((tokens, written))
    if config.shuffle:
        usable = [usable[i] for i in random_stream("conversations", 3, 0).permutation(len(usable))]
    bins: list[list[tuple[list[int], list[bool]]]] = []
    for one in usable:
        fits = [b for b in bins if sum(len(t) - 1 for t, _ in b) + len(one[0]) - 1 <= T]
        if not fits:
            bins.append([])
        (fits or bins[-1:])[0].append(one)
    rows = []
    for content in bins:
        row: Row = ([], [], [])
        for number, (tokens, written) in enumerate(content):
            row[0].extend(tokens[:-1])
            row[1].extend(t if w else IGNORE_INDEX for t, w in zip(tokens[1:], written[1:], strict=True))
            row[2].extend([number] * (len(tokens) - 1))
        padding = T - len(row[0])
        row[0].extend([BYTES.eos_id or 0] * padding)
        row[1].extend([IGNORE_INDEX] * padding)
        row[2].extend([len(content)] * padding)
        rows.append(row)
    orders = [random_stream("order", 3, epoch).permutation(len(rows)) for epoch in range(epochs)]
    return [rows[i] for order in orders for i in (order if config.shuffle else range(len(rows)))]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("long", ["drop", "cut"])
def test_rows_are_those_of_a_plain_implementation(long: str, shuffle: bool) -> None:
    config = dataclasses.replace(CONFIG, long_conversations=long, shuffle=shuffle)
    expected = packed(config, 3)
    one = loader(config)
    assert one.samples_per_epoch == len(expected) // 3
    steps = len(expected) // B
    assert rows_of([one], steps) == expected[: steps * B]
    num_long = sum(len(tokens_of(messages)[0]) > T + 1 for messages in CONVERSATIONS)
    assert num_long > 5
    assert one.note and f"{num_long} {'cut' if long == 'cut' else 'left out'}: longer than" in one.note


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_layouts_read_the_same_rows_and_resume_on_each_other(ranks: int) -> None:
    expected = packed(CONFIG, 4)
    size = B // ranks
    split = [range(rank * size, (rank + 1) * size) for rank in range(ranks)]
    loaders = [loader(rows=rows) for rows in split]
    assert rows_of(loaders, 3) == expected[: 3 * B]
    state = json.loads(json.dumps(merge_states([each.state_dict() for each in loaders])))
    for resumed in ([loader()], [loader(rows=rows) for rows in split]):
        for each in resumed:
            each.load_state_dict(state)
        # The epoch ends in between.
        assert rows_of(resumed, 9) == expected[3 * B : 12 * B]
    assert 12 * B > (loaders[0].samples_per_epoch or 0) > 3 * B


def test_every_epoch_has_every_conversation_once() -> None:
    one = loader(rows=range(1), global_batch_size=1)
    epochs = []
    for _ in range(2):
        rows = rows_of([one], one.samples_per_epoch or 0)
        epochs.append(sorted(label for _, labels, _ in rows for label in labels if label != IGNORE_INDEX))
    learned = [
        token
        for messages in CONVERSATIONS
        for tokens, written in [tokens_of(messages)]
        if len(tokens) <= T + 1
        for token, own in zip(tokens, written, strict=True)
        if own
    ]
    assert epochs == [sorted(learned)] * 2


def test_held_out_conversations_are_not_trained_on() -> None:
    config = dataclasses.replace(CONFIG, validation_fraction=0.3)
    parts = []
    for split in ("train", "validation"):
        one = loader(config, range(1), global_batch_size=1, split=split)
        rows = rows_of([one], one.samples_per_epoch or 0)
        assert [row for row in rows if set(row[1]) == {IGNORE_INDEX}] == []
        parts.append({tuple(g) for row in rows for g in grouped(row)})
    own = {tuple(tokens_of(messages)[0][:-1]) for messages in CONVERSATIONS if len(messages) > 1}
    train, validation = parts
    assert train and validation and not train & validation
    assert train | validation == {tokens for tokens in own if len(tokens) <= T}
    with pytest.raises(ConfigError, match=r"data.validation_fraction=0.0.*or data.validation_paths"):
        loader(split="validation")


def grouped(row: Row) -> list[list[int]]:
    """Inputs of each conversation of a row."""
    pairs = zip(row[2], row[0], strict=True)
    parts = [[token for _, token in part] for _, part in itertools.groupby(pairs, key=lambda pair: pair[0])]
    return [part for part in parts if set(part) != {BYTES.eos_id}]


def test_a_file_without_conversations_that_fit() -> None:
    with pytest.raises(DataError, match=r"none of 120 conversations can be used: .* are longer than"):
        loader(seq_len=8)


@pytest.mark.parametrize("seed", range(5))
def test_first_fit(seed: int) -> None:
    generator = np.random.default_rng(seed)
    capacity = int(generator.integers(1, 200))
    sizes = generator.integers(1, capacity + 1, int(generator.integers(1, 400)))
    rooms: list[int] = []
    expected = []
    for size in sizes:
        fits = [bin for bin, room in enumerate(rooms) if room >= size]
        if not fits:
            fits = [len(rooms)]
            rooms.append(capacity)
        rooms[fits[0]] -= size
        expected.append(fits[0])
    assert first_fit(sizes, capacity).tolist() == expected
