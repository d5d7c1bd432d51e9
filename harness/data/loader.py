"""The loader: the samples of every step, and resuming.

Row j of global step s is sample s * global_batch_size + j, a function of (data, tokenizer, seed) and that
number. A rank is assigned rows and reads only those, so neither the loss curve of a run nor its state depends
on the number of ranks. Scheduled sizes (``config/training.py``) change how many samples, or which pieces of
samples, a step reads; a rank has the same fraction of every batch.

B is the number of a rank's rows, T the sequence length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.config.data import DataConfig
from harness.config.data_kinds import DATA_KINDS
from harness.config.registry import load_attribute
from harness.config.training import Sizes
from harness.data.batch import Batch, Loader, NumberedLoader, Reading, load_packed
from harness.data.cache import open_documents
from harness.data.samples import IGNORE_INDEX, SyntheticSamples
from harness.data.tokenizer import Tokenizer, check_vocab_size
from harness.util.errors import DataError

__all__ = ["IGNORE_INDEX", "Batch", "Loader", "build_loader", "merge_states"]


def build_loader(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    global_batch_size: int,
    seed: int,
    rows: range,
    split: str = "train",
    model_vocab_size: int,
    wait_for_all: Callable[[], None] | None = None,
    is_builder: bool = True,
    sizes: Sizes | None = None,
) -> Loader:
    """Build the loader of ``rows``, a part of ``range(global_batch_size)``.

    Args:
        seq_len: tokens per sample (T).
        split: "train", or "validation": the same samples in the same order after every reset.
        model_vocab_size: number of rows of the model's embedding; every token id must be smaller.
        wait_for_all: a barrier over all ranks; called between building and opening the token cache, if any.
        is_builder: whether this rank builds the cache if it is missing.
        sizes: sizes of all steps, which end with these; default: every step has global_batch_size sequences
            of seq_len tokens.

    Raises:
        ConfigError: no documents are held out for validation, or the tokenizer has more tokens than the
            model's vocabulary.
        DataError: the data is missing, unreadable, or too small.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split is train or validation, not {split}")
    if rows.step != 1 or not 0 <= rows.start < rows.stop <= global_batch_size:
        raise ValueError(f"rows {rows} are not part of a global batch of {global_batch_size}")
    reading = Reading(
        data,
        tokenizer,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        seed=seed,
        rows=rows,
        split=split,
        model_vocab_size=model_vocab_size,
        wait_for_all=wait_for_all,
        is_builder=is_builder,
        sizes=sizes or Sizes(global_batch_size, seq_len),
    )
    return build_loader_of(reading)


def build_loader_of(reading: Reading) -> Loader:
    kind = DATA_KINDS[reading.data.kind]
    if kind.has_vocabulary:
        check_vocab_size(reading.tokenizer.vocab_size, reading.model_vocab_size)
    loader: Loader = load_attribute(kind.load)(reading)
    return loader


def load_documents(reading: Reading) -> Loader:
    """Return the loader of a source's documents, which are in the token cache."""
    tokens = open_documents(reading)
    loader = load_packed(reading, tokens)
    loader.damaged_documents = tokens.damaged
    return loader


def load_synthetic(reading: Reading) -> Loader:
    """Return the loader of random tokens."""
    samples = SyntheticSamples(
        split=reading.split,
        seq_len=reading.seq_len,
        seed=reading.seed,
        vocab_size=reading.model_vocab_size,
        mask_fraction=reading.data.mask_fraction,
    )
    return NumberedLoader(samples, reading.rows, reading.sizes)


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks into one state, which any number of ranks can load.

    Raises:
        DataError: the states are from different steps.
    """
    steps = sorted({state["step"] for state in states})
    if len(steps) != 1:
        raise DataError(f"the loader states to merge are of different steps: {', '.join(map(str, steps))}")
    merged = dict(states[0])
    if "slots" in merged:
        merged["slots"] = {row: stream for state in states for row, stream in state["slots"].items()}
    return merged
