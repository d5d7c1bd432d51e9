"""What is read for a job, and samples with random access: packed documents, or random tokens.

Sample g is a function of (data, tokenizer, seed, g) only, independent of ranks and steps. T is the
sequence length.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from harness.config.data import DataConfig
from harness.config.training import Sizes
from harness.data.batch import IGNORE_INDEX
from harness.data.tokenizer import Tokenizer
from harness.data.tokens import Tokens
from harness.util.errors import DataError


@dataclass(frozen=True)
class Reading:
    """What a loader reads.

    Attributes:
        seq_len: tokens per sample (T).
        rows: of every global batch, a part of ``range(global_batch_size)``.
        split: "train", or "validation": the same samples in the same order after every reset.
        model_vocab_size: number of rows of the model's embedding; every token id must be smaller.
        sizes: sizes of all steps, which end with global_batch_size sequences of seq_len tokens.
        wait_for_all: a barrier over all ranks; called between building and opening the token cache,
            if any.
        is_builder: whether this rank builds the cache if it is missing.
    """

    data: DataConfig
    tokenizer: Tokenizer
    seq_len: int
    global_batch_size: int
    seed: int
    rows: range
    split: str
    model_vocab_size: int
    sizes: Sizes
    wait_for_all: Callable[[], None] | None = None
    is_builder: bool = True

    @property
    def shuffles(self) -> bool:
        return self.data.shuffle and self.split == "train"

    @property
    def leave_out(self) -> list[int]:
        """Numbers of the batches that no step reads."""
        return self.data.leave_out if self.split == "train" else []


class Samples(Protocol):
    """An endless sequence of samples."""

    num_per_epoch: int | None
    """Samples per epoch; None if there are no epochs."""

    def sample(self, number: int) -> tuple[np.ndarray, ...]:
        """``(inputs_T, labels_T)``, int64; ``labels_T[t]`` follows ``inputs_T[t]``, or is IGNORE_INDEX.

        If documents do not attend to each other, a third array has the number of each input's
        document in the sample.
        """


@dataclass
class EpochOrder:
    """Order of ``num`` items, shuffled differently in every epoch.

    The order of an epoch is in memory: 8 bytes per item, 8 GB for a billion.
    """

    num: int
    seed: int
    shuffle: bool
    order: tuple[int, np.ndarray] | None = None
    """The last epoch, and its order."""

    def at(self, number: int) -> int:
        """Index of the item of sample ``number``, which may be in any epoch."""
        epoch, index = divmod(number, self.num)
        if not self.shuffle:
            return index
        order = self.order  # threads may be in different epochs
        if order is None or order[0] != epoch:
            order = epoch, random_stream("order", self.seed, epoch).permutation(self.num)
            self.order = order
        return int(order[1][index])


class PackedSamples:
    """Concatenated documents, cut every T tokens; samples are shuffled differently in every epoch.

    Neighbouring samples share one token: the last label of one is the first input of the next, so
    that every token but the very first is predicted once per epoch. Fewer than T tokens at the end
    are left out.
    """

    def __init__(self, split: Tokens, reading: Reading) -> None:
        self._split = split
        self._data = reading.data
        self._seq_len = reading.seq_len
        count = max(0, (split.num_tokens - 1) // reading.seq_len)
        self._order = EpochOrder(count, reading.seed, shuffle=reading.shuffles)
        self.num_per_epoch: int | None = count
        if not count:
            documents = (
                "" if split.num_documents is None else f" (documents: {split.num_documents})"
            )
            raise DataError(
                f"{split.name}: {split.num_tokens} tokens{documents} are fewer than "
                f"one sample of training.seq_len + 1 = {reading.seq_len + 1}"
            )

    def sample(self, number: int) -> tuple[np.ndarray, ...]:
        begin = self._order.at(number) * self._seq_len
        end = begin + self._seq_len + 1
        first_labels = self._split.starts_between(begin + 1, end) - begin - 1
        return sample_of(self._split.read(begin, end), first_labels, self._data)


@dataclass
class SyntheticSamples:
    """Uniform random tokens of the full vocabulary; samples have different numbers of masked labels."""

    reading: Reading
    num_per_epoch: int | None = None

    def sample(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        reading = self.reading
        random = random_stream(f"synthetic {reading.split}", reading.seed, number)
        tokens = random.randint(0, reading.model_vocab_size, reading.seq_len + 1, dtype=np.int64)
        inputs_T = tokens[:-1]
        labels_T = tokens[1:].copy()
        share = random.uniform(0, 2 * reading.data.mask_fraction)
        num_masked = min(round(share * reading.seq_len), reading.seq_len - 1)
        labels_T[random.permutation(reading.seq_len)[:num_masked]] = IGNORE_INDEX
        return inputs_T, labels_T


def sample_of(
    tokens: np.ndarray, first_labels: np.ndarray, data: DataConfig
) -> tuple[np.ndarray, ...]:
    """Make a sample of T + 1 tokens of packed documents (int64).

    Args:
        first_labels: positions of labels that are a document's first token; it is the next
            position's input.
    """
    inputs_T = tokens[:-1]
    labels_T = tokens[1:].copy()
    if data.mask_document_boundary:
        labels_T[first_labels] = IGNORE_INDEX
    if data.attend_across_documents:
        return inputs_T, labels_T
    begins = np.zeros(len(tokens), dtype=np.int64)
    begins[first_labels + 1] = 1
    return inputs_T, labels_T, begins[:-1].cumsum()


def random_stream(purpose: str, seed: int, index: int) -> np.random.RandomState:
    """Independent random stream for every (purpose, seed, index).

    RandomState instead of default_rng: numpy guarantees the same numbers in all future versions
    (NEP 19), so a run can be resumed or repeated with another numpy.
    """
    digest = hashlib.sha256(f"{purpose}/{seed}/{index}".encode()).digest()
    entropy = np.random.SeedSequence(int.from_bytes(digest, "little"))
    return np.random.RandomState(np.random.MT19937(entropy))
