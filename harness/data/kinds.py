"""The loader of a job's data, of any kind; a mixture has a loader of each of its sources.

It stands above the files of the kinds (``config/data_kinds.py`` names their functions).
"""

import dataclasses
from contextlib import AbstractContextManager
from fractions import Fraction

from harness.config.data import DataConfig
from harness.config.data_kinds import (
    DATA_KINDS,
    errors_of_source,
    source_config,
    sources_of,
    weights_by_step,
)
from harness.config.registry import load_attribute
from harness.config.training import Sizes
from harness.data.loader import Loader, SampleLoader
from harness.data.mixture import Shares, SourceOrder
from harness.data.samples import Reading
from harness.data.token_files import holds_out as corpora_hold_out
from harness.data.tokenizer import check_vocab_size


def build_loader(reading: Reading) -> Loader:
    """Build the loader of a job's data.

    Raises:
        ConfigError: no documents are held out for validation, or the tokenizer has more tokens than
            the model's vocabulary.
        DataError: the data is missing, unreadable, or too small.
    """
    kind = DATA_KINDS[reading.data.kind]
    if kind.has_vocabulary:
        check_vocab_size(reading.tokenizer.vocab_size, reading.model_vocab_size)
    loader: Loader = load_attribute(kind.load)(reading)
    return loader


def load_mixture(reading: Reading) -> Loader:
    """Return the loader of a mixture.

    Validation takes equally many samples of every source that holds out documents, whatever the
    weights.
    """
    data = reading.data
    sizes = reading.sizes
    validating = reading.split == "validation"
    if validating:
        data.require_validation()
    names = data.source_names
    if validating:
        held_out = zip(names, sources_of(data), strict=True)
        names = [name for name, source in held_out if _holds_out(*source)]
    names = names or data.source_names[:1]  # whose error says so
    loaders: dict[str, SampleLoader] = {}
    for name in names:
        with errors_of_source(name):
            source = source_config(data, name)
            final = Sizes(reading.global_batch_size, reading.seq_len)
            loader = build_loader(dataclasses.replace(reading, data=source, sizes=final))
        assert isinstance(loader, SampleLoader)
        loaders[name] = loader
    shares: Shares = [(0, dict.fromkeys(names, Fraction(1, len(names))))]
    if not validating:
        per_epoch = {name: loader.samples_per_epoch for name, loader in loaders.items()}
        by_step = weights_by_step(data, per_epoch)
        # A step that begins inside of a sample has other weights from the next sample on.
        shares = [
            (-(-sizes.position(step - 1) // sizes.seq_len), weights) for step, weights in by_step
        ]
    order = SourceOrder(shares, block=sizes.batch_size, seed=reading.seed)
    sources = {}
    for name, loader in loaders.items():
        (sources[name],) = loader.sources.values()
    mixture = SampleLoader(reading, sources, order)
    mixture.note = (
        "\n".join(f"{name}: {each.note}" for name, each in loaders.items() if each.note) or None
    )
    return mixture


def holds_out(data: DataConfig) -> bool:
    """Whether there are samples for validation; reads the manifests of corpora."""
    return any(_holds_out(*source) for source in sources_of(data))


def _holds_out(source: DataConfig, errors: AbstractContextManager[None]) -> bool:
    if not (source.holds_out and source.may_be_corpus):
        return source.holds_out
    with errors:
        return corpora_hold_out(source)
