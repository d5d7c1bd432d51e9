"""Conversations are packed first-fit, against a plain implementation; and the rows of all layouts."""

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
from equal import assert_equal
from loaders import BYTES, EOS, B, loader, permutation, ranks_of, resumed, steps
from one_line import one_line

from harness.config.data import DataConfig
from harness.data.batch import IGNORE_INDEX, PADDING
from harness.data.chat import ConversationTokenizer
from harness.data.tokenizing import is_held_out
from harness.util.errors import ConfigError, DataError

T = 96
SIZES = {"seq_len": T, "seed": 3}


def a_conversation(generator):
    turns = generator.randint(1, 3)
    roles = ("user", "assistant") * turns if generator.random() < 0.9 else ("user",)
    texts = ("".join(generator.choices("abcdef ", k=generator.randint(1, 30))) for _ in roles)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


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
def files(in_temporary_folder):
    for name, part in (("a", CONVERSATIONS[:50]), ("b", CONVERSATIONS[50:])):
        lines = [json.dumps({"messages": messages}) for messages in part]
        Path(f"{name}.jsonl").write_text("\n".join(lines))


def tokens_of(messages):
    """Tokens, and whether the assistant wrote each; test_chat.py has the proof."""
    tokenizer = ConversationTokenizer(CONFIG, BYTES)
    both = tokenizer.encode(json.dumps(["file", messages, None]))
    return [id >> 1 for id in both], [bool(id & 1) for id in both]


def packed(config, epochs, split="train"):
    """The rows of some epochs, without the code under test."""
    usable = []
    for number, messages in enumerate(CONVERSATIONS):
        tokens, written = tokens_of(messages)
        is_of_split = is_held_out(number, config.validation_fraction) == (split == "validation")
        if any(written[1:]) and len(tokens) <= T + 1 and is_of_split:
            usable.append((tokens, written))
    shuffles = config.shuffle and split == "train"
    if shuffles:
        usable = [usable[i] for i in permutation("conversations", 3, 0, len(usable))]
    bins = []
    for one in usable:
        fits = [b for b in bins if sum(len(t) - 1 for t, _ in b) + len(one[0]) - 1 <= T]
        if not fits:
            bins.append([])
        (fits or bins[-1:])[0].append(one)
    rows = []
    for content in bins:
        row = ([], [], [])
        for number, (tokens, written) in enumerate(content):
            row[0].extend(tokens[:-1])
            row[1].extend(
                t if w else IGNORE_INDEX for t, w in zip(tokens[1:], written[1:], strict=True)
            )
            row[2].extend([number] * (len(tokens) - 1))
        padding = T - len(row[0])
        for part, value in zip(row, (EOS, IGNORE_INDEX, PADDING), strict=True):
            part.extend([value] * padding)
        rows.append(row)
    orders = [
        permutation("order", 3, epoch, len(rows)) if shuffles else range(len(rows))
        for epoch in range(epochs)
    ]
    return [rows[i] for order in orders for i in order]


def in_batches(rows):
    batches = [rows[begin : begin + B] for begin in range(0, len(rows) - B + 1, B)]
    return [[torch.tensor(column) for column in zip(*batch, strict=True)] for batch in batches]


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_are_those_of_a_plain_implementation(shuffle, split):
    fraction = 0.3 if split == "validation" else 0.0
    config = dataclasses.replace(CONFIG, shuffle=shuffle, validation_fraction=fraction)
    for each in {split, "train"}:
        expected, one = packed(config, 3, each), loader(config, split=each, **SIZES)
        assert one.samples_per_epoch == len(expected) // 3
        batches = in_batches(expected)
        assert_equal(steps([one], len(batches)), batches)
    if not fraction:
        num_long = sum(len(tokens_of(messages)[0]) > T + 1 for messages in CONVERSATIONS)
        assert num_long > 5
        assert one.note and f"{num_long} left out: longer than" in one.note


@pytest.mark.parametrize("ranks", [2, 8])
def test_layouts_read_the_same_rows_and_resume_on_each_other(ranks):
    expected, reading = in_batches(packed(CONFIG, 4)), ranks_of(CONFIG, ranks, **SIZES)
    assert_equal(steps(reading, 3), expected[:3])
    for other in (1, ranks):
        after = resumed(reading, ranks_of(CONFIG, other, **SIZES))
        # The epoch ends in between.
        assert_equal(steps(after, 9), expected[3:12])
    assert 12 * B > (reading[0].samples_per_epoch or 0) > 3 * B


def test_conversations_that_do_not_fit_and_none_held_out():
    with one_line(DataError, r"none of 120 conversations can be used: .* are longer than"):
        loader(CONFIG, seq_len=8)
    with one_line(ConfigError, r"data.validation_fraction=0.0.*or data.validation_paths"):
        loader(CONFIG, split="validation")
