"""Samples of complete conversations, packed first-fit.

T is the sequence length. A conversation of n tokens has n - 1 inputs: the last token is a label only.
"""

from __future__ import annotations

import numpy as np

from harness.data.corpus import TokenizedSplit
from harness.data.samples import IGNORE_INDEX, random_stream
from harness.util.errors import DataError


class PackedConversations:
    """Samples of as many complete conversations as fit into T inputs, and padding.

    The conversations are packed once, in an order given by the seed. Every epoch has the same samples in
    another order, so the number of samples is fixed.

    Labels are the assistant's tokens. Conversations in a sample, and its padding, have different document
    numbers.

    Args:
        split: conversations as ``ConversationTokenizer`` encodes them.
        pad_id: the token of padding.
        shuffle: whether the order is random; otherwise conversations and samples are in stored order.
        cut: whether a conversation with more than T inputs is cut at T; otherwise it is left out.

    Raises:
        DataError: no conversation can be used.
    """

    def __init__(
        self, split: TokenizedSplit, *, seq_len: int, seed: int, shuffle: bool, cut: bool, pad_id: int
    ) -> None:
        self._split, self._seq_len, self._seed, self._shuffle = split, seq_len, seed, shuffle
        self._pad_id = pad_id
        self._order: tuple[int, np.ndarray] | None = None
        self._ends = np.append(np.asarray(split.starts)[1:], len(split.tokens)).astype(np.int64)
        inputs = self._ends - split.starts - 1
        usable, too_long = inputs > 0, np.flatnonzero(inputs > seq_len)
        usable[too_long] = [cut and self._has_labels(conversation) for conversation in too_long.tolist()]
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
        self.num_per_epoch: int | None = int(sample_of.max()) + 1
        self._num_samples = self.num_per_epoch
        self._bounds = np.searchsorted(sample_of[in_samples], np.arange(self._num_samples + 1))
        self.fill = float(sizes.sum() / (self._num_samples * seq_len))

    def sample(self, number: int) -> tuple[np.ndarray, ...]:
        epoch, index = divmod(number, self._num_samples)
        if self._shuffle:
            if self._order is None or self._order[0] != epoch:
                order = random_stream("order", self._seed, epoch).permutation(self._num_samples)
                self._order = (epoch, order)
            index = int(self._order[1][index])
        T = self._seq_len
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

    def _has_labels(self, conversation: int) -> bool:
        return bool(self._read(conversation)[1][1:].any())


def first_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Put each item into the first bin that has room for it, in order; return the bins of the items.

    Args:
        sizes: sizes of the items, each at most ``capacity``.
        capacity: size of a bin.
    """
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
