"""The loader: samples depend on the step, never on how the batch is split over ranks."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from equal import assert_equal
from loaders import BYTES, B, T, loader, split_rows, steps
from test_data_streaming import streamed

from harness.config.data import DataConfig
from harness.data.loader import IGNORE_INDEX, merge_states
from harness.util.errors import DataError, UserError


@pytest.fixture
def corpus():
    """Forty documents of uneven length, one of them longer than many samples."""
    for i in range(40):
        Path(f"{i:02}.txt").write_text(f"{i:02}" * (1 + i * i % 11) if i != 7 else "long " * 200)
    return DataConfig(paths=["*.txt"], validation_fraction=0.2, cache_dir="cache")


@pytest.fixture(params=["local", "synthetic"])
def numbered(request, corpus):
    return corpus if request.param == "local" else DataConfig(kind="synthetic", mask_fraction=0.3)


@pytest.fixture(params=["local", "synthetic", "a file per row", "files shared by rows"])
def data(request, corpus):
    if request.param in ("local", "synthetic"):
        return corpus if request.param == "local" else DataConfig(kind="synthetic", mask_fraction=0.3)
    return streamed(B if request.param == "a file per row" else 3)


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_shapes_and_shift(numbered):
    batch = loader(numbered).next()
    assert batch.inputs_BT.shape == batch.labels_BT.shape == (B, T)
    assert batch.inputs_BT.dtype == batch.labels_BT.dtype == torch.int64
    shifted, labels = batch.inputs_BT[:, 1:], batch.labels_BT[:, :-1]
    valid = labels != IGNORE_INDEX
    assert_equal(labels[valid], shifted[valid])
    assert valid.any()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_layouts_see_the_same_samples(data, ranks):
    one = steps(loader(data), 12)
    assert_equal(one, steps([loader(data, rows) for rows in split_rows(ranks)], 12))
    assert not torch.equal(one[0], one[1])


def test_the_batch_size_only_cuts_the_sequence_of_samples(numbered):
    eights = torch.cat(steps(loader(numbered), 6), dim=1)
    threes = torch.cat(steps(loader(numbered, range(3), global_batch_size=3), 16), dim=1)
    assert_equal(eights, threes)


def test_seeds_differ(numbered):
    assert not same(steps(loader(numbered), 2), steps(loader(numbered, seed=1), 2))
    assert_equal(steps(loader(numbered, seed=-1), 2), steps(loader(numbered, seed=-1), 2))


@pytest.mark.parametrize("ranks", [1, 4])
def test_resume_on_another_number_of_ranks_twice(data, ranks):
    expected = steps(loader(data), 15)
    halves = [loader(data, rows) for rows in split_rows(2)]
    steps(halves, 5)
    for _ in range(2):  # the second resume used to lose positions
        state = json.loads(json.dumps(merge_states([half.state_dict() for half in halves])))
        halves = [loader(data, rows) for rows in split_rows(ranks)]
        for half in halves:
            half.load_state_dict(state)
        position = state["step"]
        assert_equal(expected[position : position + 5], steps(halves, 5))


def test_reset(data):
    a_loader = loader(data)
    first = steps(a_loader, 3)
    a_loader.reset()
    assert_equal(first, steps(a_loader, 3))


def test_an_epoch_has_every_sample_once_and_the_next_epoch_another_order(corpus):
    a_loader = loader(corpus, range(1), global_batch_size=1)
    n = a_loader.samples_per_epoch
    first, second = steps(a_loader, n), steps(a_loader, n)
    in_order = steps(loader(in_file_order(corpus), range(1), global_batch_size=1), n)
    assert not same(first, second) and not same(first, in_order)

    def as_set(epoch):
        return sorted(tuple(sample.flatten().tolist()) for sample in epoch)

    assert as_set(first) == as_set(second) == as_set(in_order)


def test_documents_are_numbered(corpus):
    """All bytes of a document have the same number, which changes where the next document begins."""
    separate = dataclasses.replace(corpus, attend_across_documents=False)
    plain, numbered, found = loader(corpus), loader(separate), 0
    for _ in range(8):
        batch, expected = numbered.next(), plain.next()
        assert_equal(batch.inputs_BT, expected.inputs_BT)
        assert_equal(batch.labels_BT, expected.labels_BT)
        begins = torch.zeros_like(batch.inputs_BT)
        # A masked label is the first token of a document, which is the next input.
        begins[:, 1:] = (batch.labels_BT[:, :-1] == IGNORE_INDEX).long()
        found += int(begins.sum())
        assert_equal(batch.documents_BT, begins.cumsum(1))
    assert found > 10
    assert plain.next().documents_BT is None
    unmasked = loader(dataclasses.replace(separate, mask_document_boundary=False)).next()
    assert_equal(unmasked.documents_BT, loader(separate).next().documents_BT)


def test_every_token_is_predicted_once_per_epoch(corpus):
    a_loader = loader(in_file_order(corpus), range(1), global_batch_size=1)
    n = a_loader.samples_per_epoch
    samples = [a_loader.next() for _ in range(2 * n)]
    labels = torch.cat([sample.labels_BT[0] for sample in samples[:n]])
    inputs = torch.cat([sample.inputs_BT[0] for sample in samples[:n]])
    valid = labels[:-1] != IGNORE_INDEX
    assert_equal(labels[:-1][valid], inputs[1:][valid])
    pairs = [torch.stack([sample.inputs_BT, sample.labels_BT]) for sample in samples]
    assert_equal(pairs[:n], pairs[n:])


def in_file_order(data):
    return DataConfig(**{**vars(data), "shuffle": False})


def test_document_boundaries_are_masked(corpus):
    masked = loader(in_file_order(corpus), range(1), global_batch_size=1)
    open_ = DataConfig(**{**vars(corpus), "shuffle": False, "mask_document_boundary": False})
    unmasked = loader(open_, range(1), global_batch_size=1)
    num_boundaries = 0
    for _ in range(masked.samples_per_epoch):
        with_mask, without = masked.next(), unmasked.next()
        assert_equal(with_mask.inputs_BT, without.inputs_BT)
        boundary = without.labels_BT == BYTES.bos_id  # every document begins with bos
        assert_equal(with_mask.labels_BT == IGNORE_INDEX, boundary)
        assert_equal(with_mask.labels_BT[~boundary], without.labels_BT[~boundary])
        assert (without.inputs_BT[boundary] == BYTES.eos_id).all()
        num_boundaries += int(boundary.sum())
    assert num_boundaries > 20


def test_a_boundary_at_the_edge_of_a_sample():
    Path("a.txt").write_text("a" * 14)  # with bos and eos exactly 16 tokens: the next bos is the last label
    Path("b.txt").write_text("b" * 20)
    batch = loader(DataConfig(paths=["*.txt"], shuffle=False, cache_dir="cache"), range(2)).next()
    assert batch.labels_BT[0].tolist() == [97] * 14 + [BYTES.eos_id, IGNORE_INDEX]
    assert batch.inputs_BT[1].tolist() == [BYTES.bos_id] + [98] * 15
    assert batch.labels_BT[1].tolist() == [98] * 16


def test_validation_is_fixed_and_separate(corpus):
    a_loader = loader(corpus, split="validation")
    first = steps(a_loader, 3)
    assert_equal(first, steps(loader(corpus, split="validation", seed=5), 3))
    assert not same(first, steps(loader(corpus), 3))
    texts = BYTES.decode(torch.cat(first, dim=1)[0].flatten().tolist())
    held_out = BYTES.decode(torch.cat(steps(loader(corpus), 20), dim=1)[0].flatten().tolist())
    numbers = {f"{i:02}" * 3 for i in range(10, 40)}
    seen = {number for number in numbers if number in texts}
    assert seen and not {number for number in seen if number in held_out}


def test_validation_from_its_own_files(corpus):
    Path("held").mkdir()
    Path("held/v.txt").write_text("v" * 100)
    data = DataConfig(paths=["*.txt"], validation_paths=["held/*"], cache_dir="cache")
    batch = loader(data, split="validation").next()
    assert set(batch.inputs_BT.flatten().tolist()) == {BYTES.bos_id, ord("v")}
    assert ord("v") not in torch.cat(steps(loader(data), 20)).unique().tolist()


def test_synthetic_masks_unevenly_and_never_everything():
    data = DataConfig(kind="synthetic", mask_fraction=0.3)
    labels = loader(data, range(512), global_batch_size=512, seq_len=64).next().labels_BT
    share = (labels == IGNORE_INDEX).float().mean(dim=1)
    assert abs(share.mean().item() - 0.3) < 0.03
    assert share.min() < 0.05 and 0.55 < share.max() < 0.65 and share.std() > 0.1
    tiny = loader(
        DataConfig(kind="synthetic", mask_fraction=0.5), range(256), global_batch_size=256, seq_len=1
    )
    assert (tiny.next().labels_BT != IGNORE_INDEX).all()
    none = loader(DataConfig(kind="synthetic")).next()
    assert (none.labels_BT != IGNORE_INDEX).all()


def test_synthetic_covers_the_models_vocabulary():
    inputs = loader(DataConfig(kind="synthetic"), seq_len=2048, model_vocab_size=100).next().inputs_BT
    assert inputs.unique().tolist() == list(range(100))
    validation = loader(DataConfig(kind="synthetic"), split="validation", seq_len=2048).next()
    assert not torch.equal(validation.inputs_BT, loader(DataConfig(kind="synthetic"), seq_len=2048).next()[0])


def test_a_document_longer_than_a_batch():
    Path("a.txt").write_text("".join(chr(97 + i % 26) for i in range(5_000_000)))
    a_loader = loader(DataConfig(paths=["a.txt"], cache_dir="cache"), seq_len=1024)
    assert a_loader.samples_per_epoch == 5_000_001 // 1024
    inputs = a_loader.next().inputs_BT
    assert all((b - a) % 26 == 1 for row in inputs[:, 1:].tolist() for a, b in pairwise(row))


@pytest.mark.parametrize(
    ("text", "settings", "says"),
    [
        ("ab", {}, r"4 tokens in 1 documents are fewer than one sample of training.seq_len \+ 1 = 17"),
        ("a" * 14, {}, r"16 tokens in 1 documents are fewer than one sample"),
        ("a" * 99, {"model_vocab_size": 257}, "model.vocab_size=257: the tokenizer has 258 tokens"),
        ("", {}, "holds no text"),
    ],
)
def test_unusable_data(text, settings, says):
    Path("a.txt").write_text(text)
    with pytest.raises(UserError, match=says) as caught:
        loader(DataConfig(paths=["a.txt"], cache_dir="cache"), **settings)
    assert "\n" not in str(caught.value)


def test_one_sample_is_enough():
    Path("a.txt").write_text("a" * 15)
    assert loader(DataConfig(paths=["a.txt"], cache_dir="cache")).samples_per_epoch == 1


def test_nothing_held_out_of_few_documents():
    Path("a.txt").write_text("a" * 99)
    data = DataConfig(paths=["a.txt"], validation_fraction=0.01, cache_dir="cache")
    with pytest.raises(DataError, match=r"validation documents: 0 tokens in 0 documents"):
        loader(data, split="validation")


@pytest.mark.parametrize("rows", [range(0), range(9), range(-1, 2), range(0, 8, 2), range(8, 9)])
def test_rows_outside_the_batch(rows):
    with pytest.raises(ValueError, match="rows"):
        loader(DataConfig(kind="synthetic"), rows)


def test_states_of_different_steps_do_not_merge():
    with pytest.raises(DataError, match="different steps: 3, 4"):
        merge_states([{"step": 3}, {"step": 4}])


def test_a_streams_state_does_not_fit(numbered):
    with pytest.raises(DataError, match=r"data\.streaming is false"):
        loader(numbered).load_state_dict({"step": 3, "global_batch_size": 8, "slots": {}})
