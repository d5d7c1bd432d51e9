"""Conversations for supervised fine-tuning: files of messages, their tokens, and which of these are learned.

Conversations are cached as documents are (``cache.py``). A cached id is twice the token, plus 1 if the
assistant wrote it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.config.data import DataConfig
from harness.data.cache import open_documents
from harness.data.chat_template import ASSISTANT, HALF_PAIR, ChatTemplate, message_of, template_of
from harness.data.corpus import TokenizedSplit
from harness.data.documents import LocalFiles, Span, file_stats, list_names, read_columns
from harness.data.samples import IGNORE_INDEX, EpochOrder, Reading, random_stream
from harness.data.tokenizer import Marked, Tokenizer
from harness.util.errors import DataError

if TYPE_CHECKING:
    from harness.data.loader import Loader

_VERSION = 1
_TOOLS = "tools"


def load_conversations(reading: Reading) -> Loader:
    from harness.data.loader import load_numbered  # torch; composing a job imports this file without it

    tokenized = open_documents(reading)
    samples = PackedConversations(tokenized, reading)
    loader = load_numbered(reading, samples)
    loader.damaged_documents = tokenized.damaged
    loader.note = f"data of {reading.split}: {describe(samples, reading.data, reading.seq_len)}"
    return loader


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
        rows = read_columns(file, span, self.config.messages_field, _TOOLS, setting="data.messages_field")
        group = f" from row group {span.begin} on" if span.begin else ""
        for number, row in enumerate(rows, start=1):
            yield self.document_of(row, f"{file}, row {number}{group}")

    def document_of(self, row: dict[str, Any], where: object) -> str:
        field = self.config.messages_field
        if field not in row:
            raise DataError(f"{where}: no field {field!r} among {list_names(row)}; set data.messages_field")
        messages, tools = row[field], row.get(_TOOLS)
        for name, value in ((field, messages), (_TOOLS, tools or [])):
            if not isinstance(value, list):
                raise DataError(f"{where}: field {name!r} holds {type(value).__name__}, not a list")
        messages = [message_of(each, f"{where}, message {i}") for i, each in enumerate(messages, start=1)]
        text = json.dumps([str(where), messages, tools], ensure_ascii=False)
        if bad := HALF_PAIR.search(text):
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

    @classmethod
    def of_job(cls, data: DataConfig, tokenizer: Tokenizer) -> ConversationTokenizer:
        return cls(tokenizer, template_of(data, tokenizer))

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


class PackedConversations:
    """Samples of as many complete conversations as fit into T inputs, and padding.

    The conversations are packed once, in an order given by the seed. Every epoch has the same samples in
    another order, so the number of samples is fixed.

    Labels are the assistant's tokens. Conversations in a sample, and its padding, have different document
    numbers.

    A conversation with more than T inputs is left out, or cut at T (``data.long_conversations``). Without
    ``shuffles`` conversations and samples are in stored order.

    Args:
        split: conversations as ``ConversationTokenizer`` encodes them.

    Raises:
        DataError: no conversation can be used.
    """

    def __init__(self, split: TokenizedSplit, reading: Reading) -> None:
        seq_len, seed, shuffle = reading.seq_len, reading.seed, reading.shuffles
        self._split, self._seq_len, self._pad_id = split, seq_len, reading.tokenizer.eos_id or 0
        cut = reading.data.long_conversations == "cut"
        self._ends = np.append(np.asarray(split.starts)[1:], len(split.tokens)).astype(np.int64)
        inputs = self._ends - split.starts - 1
        usable, too_long = inputs > 0, np.flatnonzero(inputs > seq_len)
        usable[too_long] = [
            cut and bool(self._read(conversation)[1][1:].any()) for conversation in too_long.tolist()
        ]
        self.num_conversations, self.num_too_long = int(usable.sum()), len(too_long)
        self.num_without_labels = int((inputs <= 0).sum())
        self.num_cut_off = int(too_long.size - usable[too_long].sum()) if cut else 0
        if not self.num_conversations:
            raise DataError(
                f"{split.name}: none of {len(inputs)} conversations can be used: {self.num_without_labels} "
                f"have no turn of the assistant, {len(too_long)} are longer than training.seq_len={seq_len}"
            )
        chosen = np.flatnonzero(usable)
        if shuffle:
            chosen = chosen[random_stream("conversations", seed, 0).permutation(len(chosen))]
        sizes = np.minimum(inputs[chosen], seq_len)
        sample_of = first_fit(sizes, seq_len)
        in_samples = np.argsort(sample_of, kind="stable")
        self._conversations = chosen[in_samples]
        count = int(sample_of.max()) + 1
        self.num_per_epoch: int | None = count
        self._order = EpochOrder(count, seed, shuffle=shuffle)
        self._bounds = np.searchsorted(sample_of[in_samples], np.arange(count + 1))
        self.fill = float(sizes.sum() / (count * seq_len))

    def sample(self, number: int) -> tuple[np.ndarray, ...]:
        index, T = self._order.at(number), self._seq_len
        inputs_T = np.full(T, self._pad_id, dtype=np.int64)
        labels_T = np.full(T, IGNORE_INDEX, dtype=np.int64)
        conversations = self._conversations[self._bounds[index] : self._bounds[index + 1]]
        documents_T = np.full(T, len(conversations), dtype=np.int64)
        begin = 0
        for document, conversation in enumerate(conversations):
            tokens, learned = self._read(conversation)
            end = begin + len(tokens) - 1
            inputs_T[begin:end], documents_T[begin:end] = tokens[:-1], document
            labels_T[begin:end] = np.where(learned[1:], tokens[1:], IGNORE_INDEX)
            begin = end
        return inputs_T, labels_T, documents_T

    def _read(self, conversation: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a conversation, at most T + 1, and which of them are learned."""
        begin = int(self._split.starts[conversation])
        end = min(int(self._ends[conversation]), begin + self._seq_len + 1)
        encoded = self._split.tokens[begin:end].astype(np.int64)
        return encoded >> 1, (encoded & 1).astype(bool)


def first_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Put each item into the first bin that has room for it, in order; return the bins of the items."""
    # All bins but one are more than half full, so there are fewer than this. Inner node i of the tree has the
    # largest room of its children 2 i and 2 i + 1. Bins are leaves.
    bins = min(len(sizes), 2 * int(sizes.sum()) // capacity + 1)
    leaves = 1 << (bins - 1).bit_length()
    room = [capacity] * (2 * leaves)
    found = np.empty(len(sizes), dtype=np.int64)
    for item, size in enumerate(sizes.tolist()):
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < size:
                node += 1
        found[item] = node - leaves
        room[node] -= size
        while node > 1:
            node //= 2
            largest = max(room[2 * node], room[2 * node + 1])
            if room[node] == largest:
                break
            room[node] = largest
    return found
