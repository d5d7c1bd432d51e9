"""Mixtures: which source a sample comes from, its tokens on any layout, and resuming."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from equal import assert_equal
from loaders import BYTES, B, T, loader, split_rows

from harness.config.data import DataConfig
from harness.config.training import Sizes
from harness.data.loader import Batch, Loader, merge_states
from harness.util.errors import ConfigError, DataError

WEIGHTS = {"code": 0.2, "math": 0.1, "web": 0.7}


def shares(weights: dict[str, float]) -> dict[str, Fraction]:
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    return {name: weight / sum(exact.values()) for name, weight in exact.items()}


@pytest.fixture(autouse=True)
def files(in_temporary_folder: None) -> None:
    for name, count in (("web", 30), ("code", 9), ("math", 5)):
        Path(name).mkdir()
        for i in range(count):
            Path(name, f"{i:02}.txt").write_text(f"{name}{i:02} " * (1 + i * i % 13))


def mixture(**changed: object) -> DataConfig:
    sources = {name: DataConfig(paths=[f"{name}/*.txt"]) for name in WEIGHTS}
    return dataclasses.replace(
        DataConfig(kind="mixture", sources=sources, weights=WEIGHTS, cache_dir="cache"), **changed
    )


def steps(loaders: list[Loader], count: int) -> list[Batch]:
    """Global batches, from the batches of all ranks."""
    batches = [[each.next() for each in loaders] for _ in range(count)]
    return [
        Batch(*(None if parts[0] is None else torch.cat(parts) for parts in zip(*ranks, strict=True)))
        for ranks in batches
    ]


def assert_same(left: list[Batch], right: list[Batch]) -> None:
    assert len(left) == len(right)
    for one, two in zip(left, right, strict=True):
        assert_equal([t for t in one if t is not None], [t for t in two if t is not None])


def numbers_of(purpose: str, index: int, count: int) -> list[int]:
    digest = hashlib.sha256(f"{purpose}/0/{index}".encode()).digest()
    bits = np.random.MT19937(np.random.SeedSequence(int.from_bytes(digest, "little")))
    return np.random.RandomState(bits).permutation(count).tolist()


def samples_of(name: str) -> Iterator[tuple[list[int], list[int]]]:
    """Independent of the harness: documents packed into samples of T tokens, shuffled by epoch."""
    tokens, first = [], set()
    for file in sorted(Path(name).iterdir()):
        first.add(len(tokens))
        tokens += [BYTES.bos_id, *file.read_bytes(), BYTES.eos_id]
    count, epoch = (len(tokens) - 1) // T, 0
    while True:
        for index in numbers_of("order", epoch, count):
            at = range(index * T, index * T + T)
            yield [tokens[i] for i in at], [-100 if i + 1 in first else tokens[i + 1] for i in at]
        epoch += 1


def mixed(count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Independent of the harness: sources by Tijdeman's rule, shuffled within every global batch."""
    share, streams = shares(WEIGHTS), {name: samples_of(name) for name in WEIGHTS}
    drawn, slack, block = dict.fromkeys(WEIGHTS, 0), Fraction(1, 2 * len(WEIGHTS) - 2), []
    for n in range(1, count + 1):

        def must_be_drawn(name: str, n: int = n) -> int:
            return next(m for m in range(n, n + 99) if share[name] * m - drawn[name] > 1 - slack)

        name = min((x for x in sorted(WEIGHTS) if share[x] * n - drawn[x] >= slack), key=must_be_drawn)
        drawn[name] += 1
        block.append(name)
        if len(block) == B:
            for place in numbers_of("mixture", n - B, B):
                yield next(streams[block[place]])
            block = []


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_tokens_equal_an_independent_implementation(ranks: int) -> None:
    """Token by token, over several epochs of each source, and after a resume on another number of ranks."""
    count = 60
    expected = torch.tensor(list(mixed(count * B))).unflatten(0, (count, B)).unbind()
    loaders = [loader(mixture(), rows) for rows in split_rows(ranks)]
    found = steps(loaders, 35)
    states = [each.state_dict() for each in loaders]
    assert states == states[:1] * ranks
    resumed = [loader(mixture(), rows) for rows in split_rows(8 // ranks)]
    for each in resumed:
        each.load_state_dict(json.loads(json.dumps(states[-1])))
    found += steps(resumed, count - 35)
    for one, samples in zip(found, expected, strict=True):
        assert_equal(torch.stack([one.inputs_BT, one.labels_BT], dim=1), samples)
    assert (
        min(
            each / per
            for each, per in zip(
                loaders[0].state_dict()["mixture"]["counts"].values(),
                loaders[0].samples_per_epoch_of.values(),
                strict=True,
            )
        )
        > 1
    )


def test_each_source_is_read_as_if_alone() -> None:
    data = mixture(weight_changes=[{"step": 6, "math": 1}, {"step": 9, "web": 1, "code": 1}])
    batches = steps([loader(data)], 20)
    rows = [
        (int(source), row)
        for batch in batches
        for source, row in zip(batch.sources_B, batch.inputs_BT, strict=True)
    ]
    for index, name in enumerate(sorted(WEIGHTS)):
        own = [row for source, row in rows if source == index]
        alone = steps([loader(dataclasses.replace(data.sources[name], cache_dir="cache"))], 20)
        assert_equal(torch.stack(own), torch.cat([batch.inputs_BT for batch in alone])[: len(own)])
    math = sorted(WEIGHTS).index("math")
    assert all((batch.sources_B == math).all() for batch in batches[5:8])
    assert not any((batch.sources_B == math).any() for batch in batches[9:])


def test_epochs_are_weights_by_size() -> None:
    data = mixture(weights={}, epochs={"code": 4.0, "math": 1.5, "web": 1.0})
    read = loader(data)
    sizes = read.samples_per_epoch_of
    total = sum(epochs * sizes[name] for name, epochs in data.epochs.items())
    steps([read], int(total) // B)
    counts = read.state_dict()["mixture"]["counts"]
    for name, epochs in data.epochs.items():
        assert abs(counts[name] - epochs * sizes[name]) <= 1 + B, name


def test_documents_are_numbered_within_samples_of_one_source() -> None:
    plain, numbered = loader(mixture()), loader(mixture(attend_across_documents=False))
    for _ in range(5):
        expected, batch = plain.next(), numbered.next()
        assert_equal(batch.sources_B, expected.sources_B)
        begins = (expected.labels_BT == -100).roll(1, 1)
        begins[:, 0] = False
        assert_equal(batch.documents_BT, begins.long().cumsum(1))


def test_validation_takes_equally_many_samples_of_every_source() -> None:
    """Sources without held-out documents are left out; the weights do not matter."""
    files = {name: [f"{name}/*.txt"] for name in ("web", "code")}
    sources = {name: DataConfig(paths=own, validation_paths=own) for name, own in files.items()}
    sources["math"] = DataConfig(paths=["math/*.txt"])
    first = loader(mixture(sources=sources), split="validation")
    other = loader(
        mixture(sources=sources, weights={"web": 1.0, "code": 9.0, "math": 1.0}), split="validation"
    )
    batches = steps([first], 6)
    assert_same(steps([other], 6), batches)
    names = sorted(sources)
    for batch in batches:
        drawn = torch.bincount(batch.sources_B, minlength=3)
        assert drawn.tolist() == [4, 0, 4] and names[1] == "math"
    first.reset()
    assert_same(steps([first], 6), batches)


def streamed() -> DataConfig:
    Path("c4").mkdir(exist_ok=True)
    for shard in range(B):
        lines = [json.dumps({"text": f"stream {shard} {i} " * (1 + i % 4)}) for i in range(12)]
        Path("c4", f"train-{shard}.jsonl").write_text("\n".join(lines) + "\n")
    c4 = DataConfig(kind="hub", dataset=str(Path("c4").absolute()), streaming=True, shuffle=False, workers=0)
    web = DataConfig(paths=["web/*.txt"])
    return mixture(sources={"web": web, "c4": c4}, weights={"web": 1.0, "c4": 1.0})


def test_a_stream_advances_in_rows_that_draw_it() -> None:
    data = streamed()
    batches = steps([loader(data)], 30)
    alone = steps([loader(data.sources["c4"])], 30)
    for row in range(B):
        own = [batch.inputs_BT[row] for batch in batches if batch.sources_B[row] == 0]
        assert 5 < len(own) < 25
        assert_equal(torch.stack(own), torch.stack([batch.inputs_BT[row] for batch in alone[: len(own)]]))


@pytest.mark.parametrize("ranks", [1, 4])
def test_streams_resume_on_another_number_of_ranks(ranks: int) -> None:
    data = streamed()
    expected = steps([loader(data)], 12)
    halves = [loader(data, rows) for rows in split_rows(2)]
    steps(halves, 5)
    state = json.loads(json.dumps(merge_states([half.state_dict() for half in halves])))
    resumed = [loader(data, rows) for rows in split_rows(ranks)]
    for each in resumed:
        each.load_state_dict(state)
    assert_same(steps(resumed, 7), expected[5:])
    resumed[0].reset()
    assert_same([resumed[0].next()], [Batch(*(None if t is None else t[: B // ranks] for t in expected[0]))])
    with pytest.raises(DataError, match=r"no c4/4 \(source/row\); merge the states"):
        loader(data).load_state_dict(halves[0].state_dict())


def scheduled(data: DataConfig, rows: range = range(B)) -> Loader:
    """One row of half a sample, then two, then four of T, then all B of T."""
    sizes = Sizes(B, T, [(4, 2), (8, 4)], [(5, T // 2)])
    return loader(data, rows, sizes=sizes)


@pytest.mark.parametrize("resumed_after", [3, 7, 9])
def test_scheduled_sizes_cut_the_same_samples(resumed_after: int) -> None:
    """On two ranks, and across a resume, also inside of a sample."""
    data = mixture(weight_changes=[{"step": 99, "math": 1}])
    plain = torch.cat([batch.inputs_BT for batch in steps([loader(mixture())], 4)]).flatten()
    read = [scheduled(data, rows) for rows in split_rows(2)]
    found = steps(read, resumed_after)
    state = json.loads(json.dumps(read[0].state_dict()))
    read = [scheduled(data, rows) for rows in split_rows(2)]
    for each in read:
        each.load_state_dict(state)
    found += steps(read, 14 - resumed_after)
    # 4 steps of 2 x 8 and 1 of 4 x 8 are 6 samples, 3 steps of 4 are 12 more; step 9 has the full size.
    before = torch.cat([batch.inputs_BT.flatten() for batch in found[:9]])
    assert_equal(before, plain[: 26 * T])
    assert [tuple(batch.inputs_BT.shape) for batch in found[3:9:4]] == [(2, T // 2), (4, T)]
    assert_same(found, steps([scheduled(data)], 14))


def test_weights_change_at_a_step_of_scheduled_sizes() -> None:
    data = mixture(
        sources={"a": DataConfig(kind="synthetic"), "b": DataConfig(kind="synthetic")}, weights={"a": 1.0}
    )
    batches = steps([scheduled(dataclasses.replace(data, weight_changes=[{"step": 7, "b": 1}]))], 12)
    assert [batch.sources_B.float().mean() for batch in batches] == [0] * 6 + [1] * 6


def test_streams_of_a_mixture_advance_by_scheduled_lengths() -> None:
    data = streamed()
    one = steps([scheduled(data)], 12)
    assert_same(steps([scheduled(data, rows) for rows in split_rows(2)], 12), one)
    alone = steps([loader(data.sources["c4"])], 12)
    row = torch.cat([batch.inputs_BT[0] for batch in one if batch.sources_B[0] == 0])
    assert_equal(row, torch.cat([batch.inputs_BT[0] for batch in alone])[: len(row)])


def test_positions_of_other_kinds_are_refused() -> None:
    mixed, alone = loader(mixture()), loader(DataConfig(paths=["web/*.txt"], cache_dir="cache"))
    with pytest.raises(DataError, match="is in one source, and data"):
        mixed.load_state_dict(alone.state_dict())
    with pytest.raises(DataError, match="is in a mixture, and data"):
        alone.load_state_dict(mixed.state_dict())


def test_mistakes_in_files_name_the_source() -> None:
    missing = mixture(sources={"web": DataConfig(paths=["web/*.md"])}, weights={"web": 1.0})
    with pytest.raises(DataError, match=r"no file matches data.sources.web.paths=\[web/\*.md\]"):
        loader(missing)
    with pytest.raises(
        ConfigError, match=r"data.sources.code.validation_fraction=0.0: .* no documents are held out"
    ):
        loader(mixture(), split="validation")
