"""Samples of complete conversations, packed first-fit. T is the sequence length."""

from __future__ import annotations

import numpy as np

from harness.data.batch import IGNORE_INDEX, PADDING
from harness.data.cache import open_documents
from harness.data.corpus import TokenizedSplit
from harness.data.loader import Loader, load_numbered
from harness.data.samples import EpochOrder, Reading, random_stream
from harness.util.errors import DataError
from harness.util.words import plural


def load_conversations(reading: Reading) -> Loader:
    tokenized = open_documents(reading)
    samples = PackedConversations(tokenized, reading)
    loader = load_numbered(reading, samples)
    loader.note = f"data of {reading.split}: {describe(samples, reading.seq_len)}"
    return loader


def describe(samples: PackedConversations, seq_len: int) -> str:
    """Return the numbers of conversations that were packed and left out, in one line."""
    packed = (
        plural(samples.num_conversations, "conversation"),
        plural(samples.num_per_epoch or 0, "sample"),
    )
    counts = (
        (samples.num_without_labels, "without a turn of the assistant"),
        (samples.num_too_long, f"longer than training.seq_len={seq_len}"),
    )
    notes = [f"{count} left out: {what}" for count, what in counts if count]
    return "; ".join([f"{' in '.join(packed)}, {samples.fill:.1%} full", *notes])


class PackedConversations:
    """Samples of as many complete conversations as fit into T inputs, and padding.

    The conversations are packed once, in an order given by the seed. Every epoch has the same
    samples in another order, so the number of samples is fixed.

    Labels are the assistant's tokens. Conversations in a sample have different document numbers;
    its padding has PADDING.

    A conversation with more than T inputs is left out.
    Without ``shuffles`` conversations and samples are in stored order.

    Args:
        split: conversations as ``ConversationTokenizer`` encodes them.

    Raises:
        DataError: no conversation can be used.
    """

    def __init__(self, split: TokenizedSplit, reading: Reading) -> None:
        seq_len = reading.seq_len
        seed = reading.seed
        shuffle = reading.shuffles
        self._split = split
        self._seq_len = seq_len
        self._pad_id = reading.tokenizer.eos_id or 0
        self._ends = np.append(np.asarray(split.starts)[1:], len(split.tokens)).astype(np.int64)
        inputs = self._ends - split.starts - 1
        usable = (inputs > 0) & (inputs <= seq_len)
        self.num_conversations = int(usable.sum())
        self.num_too_long = int((inputs > seq_len).sum())
        self.num_without_labels = int((inputs <= 0).sum())
        if not self.num_conversations:
            raise DataError(
                f"{split.name}: none of {len(inputs)} conversations can be used: {self.num_without_labels} "
                f"have no turn of the assistant, {self.num_too_long} are longer than "
                f"training.seq_len={seq_len}"
            )
        chosen = np.flatnonzero(usable)
        if shuffle:
            chosen = chosen[random_stream("conversations", seed, 0).permutation(len(chosen))]
        sizes = inputs[chosen]
        sample_of = first_fit(sizes, seq_len)
        in_samples = np.argsort(sample_of, kind="stable")
        self._conversations = chosen[in_samples]
        count = int(sample_of.max()) + 1
        self.num_per_epoch: int | None = count
        self._order = EpochOrder(count, seed, shuffle=shuffle)
        self._bounds = np.searchsorted(sample_of[in_samples], np.arange(count + 1))
        self.fill = float(sizes.sum() / (count * seq_len))

    def sample(self, number: int) -> tuple[np.ndarray, ...]:
        index = self._order.at(number)
        T = self._seq_len
        inputs_T = np.full(T, self._pad_id, dtype=np.int64)
        labels_T = np.full(T, IGNORE_INDEX, dtype=np.int64)
        conversations = self._conversations[self._bounds[index] : self._bounds[index + 1]]
        documents_T = np.full(T, PADDING, dtype=np.int64)
        begin = 0
        for document, conversation in enumerate(conversations):
            start = self._split.starts[conversation]
            encoded = self._split.tokens[start : self._ends[conversation]].astype(np.int64)
            tokens = encoded >> 1
            learned = (encoded & 1).astype(bool)
            end = begin + len(tokens) - 1
            inputs_T[begin:end] = tokens[:-1]
            documents_T[begin:end] = document
            labels_T[begin:end] = np.where(learned[1:], tokens[1:], IGNORE_INDEX)
            begin = end
        return inputs_T, labels_T, documents_T


def first_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Put each item into the first bin that has room for it, in order; return the bins of the items."""
    # All bins but one are more than half full, so there are fewer than this. Inner node i of the
    # tree has the largest room of its children 2 i and 2 i + 1. Bins are leaves.
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
