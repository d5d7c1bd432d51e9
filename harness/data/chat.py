"""Conversations for supervised fine-tuning: files of messages, their tokens, and which of these are learned.

Conversations are cached as documents are (``cache.py``). A cached id is twice the token, plus 1 if the
assistant wrote it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.config.data import DataConfig
from harness.data.cache import open_cache
from harness.data.chat_packing import PackedConversations
from harness.data.chat_sandbox import MARKS
from harness.data.chat_template import ASSISTANT, ChatTemplate, message_of, template_of
from harness.data.corpus import TokenizedSplit
from harness.data.documents import Span
from harness.data.parquet_files import read_columns
from harness.data.sources import LocalFiles, file_stats
from harness.data.tokenizer_base import Marked, Tokenizer
from harness.util.errors import DataError

_VERSION = 1
_TOOLS = "tools"
# JSON can spell half a surrogate pair, which no tokenizer can read. The marks are noncharacters of Unicode.
_NO_TEXT = re.compile(f"[\ud800-\udfff{MARKS}]")


def open_conversations(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    seed: int,
    split: str,
    wait_for_all: Callable[[], None] | None,
    is_builder: bool,
) -> tuple[PackedConversations, TokenizedSplit]:
    """Return the samples of a split, and its tokens.

    Raises:
        ConfigError: no conversations are held out for validation.
        DataError: the data is missing, unreadable or has no turn of the assistant, or the tokenizer has no
            chat template.
    """
    source, held_out = conversations_of(data, split)
    tokenized = open_cache(
        source,
        ConversationTokenizer(tokenizer, template_of(data, tokenizer)),
        split=split,
        held_out=held_out,
        cache_dir=data.cache_dir,
        wait_for_all=wait_for_all,
        is_builder=is_builder,
    )
    samples = PackedConversations(
        tokenized,
        seq_len=seq_len,
        seed=seed,
        shuffle=data.shuffle and split == "train",
        cut=data.long_conversations == "cut",
        pad_id=tokenizer.eos_id or 0,
    )
    return samples, tokenized


def conversations_of(data: DataConfig, split: str) -> tuple[Conversations, float]:
    """Return the conversations of a split, and its held-out fraction.

    Raises:
        ConfigError: no conversations are held out for validation.
    """
    if split == "validation":
        data.require_validation()
        if data.validation_paths:
            return Conversations(data, "validation_paths"), 0.0
    return Conversations(data, "paths"), data.validation_fraction


def describe(samples: PackedConversations, data: DataConfig, seq_len: int) -> str:
    """Return the numbers of conversations that were packed, cut and left out, in one line."""
    packed = f"{samples.num_conversations} conversations in {samples.num_per_epoch} samples"
    long = "cut" if data.long_conversations == "cut" else "left out"
    counts = (
        (samples.num_without_labels, "left out: without a turn of the assistant"),
        (samples.num_too_long, f"{long}: longer than training.seq_len={seq_len}"),
        (samples.num_cut_off, "left out: every turn of the assistant is cut off"),
    )
    notes = [f"{count} {what}" for count, what in counts if count]
    return "; ".join([f"{packed}, {samples.fill:.1%} full", *notes])


class Conversations(LocalFiles):
    """Conversations of JSON lines and parquet files; a document is the JSON of where, messages and tools."""

    without_tokens = f"has no message with the role {ASSISTANT}, or all are empty"

    @property
    def identity(self) -> Any:
        return ["chat", file_stats(self.files), *self.reading[1:]]

    @property
    def reading(self) -> list[Any]:
        errors = self.config.encoding_errors
        reading = ["chat", self.config.format, self.config.messages_field]
        return reading if errors == "strict" else [*reading, errors]

    def format_of(self, file: Path) -> str:
        return "parquet" if super().format_of(file) == "parquet" else "jsonl"

    def read_parquet(self, file: Path, span: Span) -> Iterator[str]:
        """Yield the conversation of each row."""
        rows = read_columns(file, span, self.config.messages_field, _TOOLS, setting="data.messages_field")
        group = f" from row group {span.begin} on" if span.begin else ""
        for number, row in enumerate(rows, start=1):
            yield self.document_of(row, f"{file}, row {number}{group}")

    def document_of(self, row: dict[str, Any], where: object) -> str:
        """The conversation of a row.

        Raises:
            DataError: the row has no list of messages, a message has no role, or a text is not Unicode.
        """
        field = self.config.messages_field
        if field not in row:
            names = ", ".join(sorted(row)) or "none"
            raise DataError(f"{where}: no field {field!r} among {names}; set data.messages_field")
        messages, tools = row[field], row.get(_TOOLS)
        for name, value in ((field, messages), (_TOOLS, tools or [])):
            if not isinstance(value, list):
                raise DataError(f"{where}: field {name!r} holds {type(value).__name__}, not a list")
        messages = [message_of(each, f"{where}, message {i}") for i, each in enumerate(messages, start=1)]
        text = json.dumps([str(where), messages, tools], ensure_ascii=False)
        if bad := _NO_TEXT.search(text):
            raise DataError(f"{where}: has U+{ord(bad[0]):04X}, which is not a character")
        return text


class ConversationTokenizer(Tokenizer):
    """Encodes a document of ``Conversations``: each id is twice the token, plus 1 if the token is learned.

    A conversation in which nothing is learned has no ids.
    """

    bos_id = eos_id = None

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template
        self.vocab_size = 2 * tokenizer.vocab_size
        self.special_ids, self.file = tokenizer.special_ids, tokenizer.file
        key = json.dumps([_VERSION, tokenizer.fingerprint, template.identity], sort_keys=True)
        self.fingerprint = f"chat/{hashlib.sha256(key.encode()).hexdigest()}"

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        rendered = [self._render(text) for text in texts]
        marked = self._tokenizer.encode_marked([text for text, _ in rendered])
        return [_labelled(each, learned) for each, (_, learned) in zip(marked, rendered, strict=True)]

    def encode_in_pieces(self, parts: Iterable[str]) -> Iterator[Sequence[int]]:
        yield self.encode("".join(parts))

    def encode_marked(self, texts: Sequence[str]) -> list[Marked]:
        return self._tokenizer.encode_marked(texts)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([id >> 1 for id in ids])

    def _render(self, document: str) -> tuple[str, list[tuple[int, int]]]:
        where, messages, tools = json.loads(document)
        try:
            return self._template.learned(messages, tools)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error


def _labelled(marked: Marked, learned: list[tuple[int, int]]) -> list[int]:
    """Twice each id, plus 1 where it has a character that is learned; no ids if none has."""
    begins, ends = np.asarray(marked.ranges, dtype=np.int64).reshape(-1, 2).T
    labels = np.zeros(len(begins), dtype=np.int64)
    for begin, end in learned:
        labels[(begins < end) & (ends > begin)] = 1
    return (2 * np.asarray(marked.ids) + labels).tolist() if labels.any() else []
