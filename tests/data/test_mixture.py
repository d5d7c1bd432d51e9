"""Mixtures: which source a sample comes from, its tokens, and the fields of a source."""

import dataclasses
import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from equal import assert_equal
from loaders import (
    CHANGES,
    WEIGHTS,
    B,
    ids_of,
    loader,
    mixture,
    packed,
    permutation,
    ranks_of,
    resumed,
    scheduled,
    steps,
    with_stream,
)
from one_line import one_line

from harness.compose.composer import compose_job
from harness.config.data import DataConfig
from harness.config.data_kinds import errors_of_source
from harness.config.training import Sizes
from harness.data.mixture import SourceOrder
from harness.util.errors import ConfigError, DataError

STEPS = 60


def shares(weights):
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    return {name: weight / sum(exact.values()) for name, weight in exact.items()}


def mixed(count):
    """Independent of the harness: sources by Tijdeman's rule, shuffled within every global batch."""
    texts = {name: [file.read_text() for file in sorted(Path(name).iterdir())] for name in WEIGHTS}
    share, streams = (
        shares(WEIGHTS),
        {name: packed(ids_of(own), seed=0) for name, own in texts.items()},
    )
    drawn, slack, block = dict.fromkeys(WEIGHTS, 0), Fraction(1, 2 * len(WEIGHTS) - 2), []
    for n in range(1, count + 1):

        def must_be_drawn(name, n=n):
            return next(m for m in range(n, n + 99) if share[name] * m - drawn[name] > 1 - slack)

        name = min(
            (x for x in sorted(WEIGHTS) if share[x] * n - drawn[x] >= slack), key=must_be_drawn
        )
        drawn[name] += 1
        block.append(name)
        if len(block) == B:
            for place in permutation("mixture", 0, n - B, B):
                yield next(streams[block[place]])
            block = []


@pytest.mark.parametrize("changes", CHANGES)
def test_tokens_equal_an_independent_implementation(changes):
    """Token by token, over several epochs of each source, and after a resume on another number of ranks."""
    data, sizes = mixture(attend_across_documents=False), {"sizes": Sizes(B, 16, *CHANGES[changes])}
    expected = list(scheduled(mixed(STEPS * B), CHANGES[changes], STEPS))
    before = ranks_of(data, 2, **sizes)
    found = steps(before, 35)
    states = [each.state_dict() for each in before]
    assert states == states[:1] * 2, "every rank counts all samples"
    found += steps(resumed(before, ranks_of(data, 1, **sizes)), STEPS - 35)
    assert_equal([step[:3] for step in found], expected)
    epochs = before[0].samples_per_epoch_of
    counts = states[0]["mixture"]["counts"]
    assert (
        min(counts[name] / (samples or 1) for name, samples in epochs.items()) > 1
        or changes != "none"
    )


def test_each_source_is_read_as_if_alone_also_where_weights_change():
    data = mixture(weight_changes=[{"step": 6, "math": 1}, {"step": 9, "web": 1, "code": 1}])
    batches = steps([loader(data)], 20)
    for index, name in enumerate(sorted(WEIGHTS)):
        own = torch.cat([inputs[sources == index] for inputs, _, sources in batches])
        alone = steps([loader(dataclasses.replace(data.sources[name], cache_dir="cache"))], 20)
        assert_equal(own, torch.cat([inputs for inputs, _ in alone])[: len(own)])
    drawn = [set(sources.tolist()) for *_, sources in batches]
    math = sorted(WEIGHTS).index("math")
    assert drawn[5:8] == [{math}] * 3
    assert not any(math in each for each in drawn[9:])


def test_weights_change_at_a_step_of_scheduled_sizes():
    sources = {name: DataConfig(kind="synthetic") for name in "ab"}
    data = mixture(sources=sources, weights={"a": 1.0}, weight_changes=[{"step": 7, "b": 1}])
    batches = steps([loader(data, sizes=Sizes(B, 16, [(4, 2), (8, 4)], [(5, 8)]))], 12)
    assert [sources.float().mean() for *_, sources in batches] == [0] * 6 + [1] * 6


@pytest.mark.usefixtures("opened_once")
@pytest.mark.parametrize("changes", CHANGES)
def test_a_stream_advances_in_rows_that_draw_it(changes):
    data = with_stream(B)
    batches = steps([loader(data, sizes=Sizes(B, 16, *CHANGES[changes]))], 30)
    alone = steps([loader(data.sources["c4"])], 30)
    for stream in range(B):
        own = []
        for inputs, _, sources in batches:
            row, between = divmod(stream * len(inputs), B)
            own += [inputs[row]] if not between and sources[row] == 0 else []
        assert 5 < len(own) < 30
        tokens = torch.cat(own)
        assert_equal(tokens, torch.cat([inputs[stream] for inputs, _ in alone])[: len(tokens)])


def test_epochs_are_weights_by_size():
    data = mixture(weights={}, epochs={"code": 4.0, "math": 1.5, "web": 1.0})
    read = loader(data)
    sizes = {name: samples or 0 for name, samples in read.samples_per_epoch_of.items()}
    steps([read], int(sum(epochs * sizes[name] for name, epochs in data.epochs.items())) // B)
    counts = read.state_dict()["mixture"]["counts"]
    for name, epochs in data.epochs.items():
        assert abs(counts[name] - epochs * sizes[name]) <= 1 + B, name


def test_validation_takes_equally_many_samples_of_every_source():
    """Sources without held-out documents are left out; the weights do not matter."""
    files = {name: [f"{name}/*.txt"] for name in ("web", "code")}
    sources = {name: DataConfig(paths=own, validation_paths=own) for name, own in files.items()}
    sources["math"] = DataConfig(paths=["math/*.txt"])
    first = loader(mixture(sources=sources), split="validation")
    weights = {"web": 1.0, "code": 9.0, "math": 1.0}
    batches = steps([first], 6)
    assert_equal(
        steps([loader(mixture(sources=sources, weights=weights), split="validation")], 6), batches
    )
    for *_, drawn in batches:
        assert (
            torch.bincount(drawn, minlength=3).tolist() == [4, 0, 4]
            and sorted(sources)[1] == "math"
        )
    first.reset()
    assert_equal(steps([first], 6), batches)


def test_mistakes_in_files_name_the_source():
    missing = mixture(sources={"web": DataConfig(paths=["web/*.md"])}, weights={"web": 1.0})
    with one_line(
        DataError, r"^data.sources.web: no file matches data.sources.web.paths=\[web/\*.md\]"
    ):
        loader(missing)
    says = r"data.sources.code.validation_fraction=0.0: .* no documents are held out"
    with one_line(ConfigError, says):
        loader(mixture(), split="validation")


# -- fields of sources ----


def test_a_source_can_be_an_option():
    """And its fields can be set on top, in any order of the command line."""
    options = ("data=mixture", "data.sources.a.paths=[web/*.txt]", "data@data.sources.a=local_text")
    weights = ("data.weights.a=3", "data.weight_changes=[{step: 9, a: 1}]")
    typed = ["cluster.device=cpu", *options, "data.sources.a.text_field=body", *weights]
    job = compose_job(typed)
    assert job.data.sources["a"] == DataConfig(
        paths=["web/*.txt"], format="text", validation_fraction=0.01, text_field="body"
    )
    assert job.data.weights == {"a": 3} and job.data.weight_changes == [{"step": 9, "a": 1}]
    assert type(job).from_json(job.to_json()) == job
    assert job.numerics_id != compose_job([*typed, "data.sources.a.shuffle=false"]).numerics_id
    assert job.id == compose_job([*typed, "data.cache_dir=elsewhere"]).id


def test_errors_of_a_source_name_its_fields():
    """Shared fields stay."""
    for error, said in (
        (
            ConfigError("data.dtype", 0, "no", "data=a data.dtype=b data.prefetch=1"),
            r"data.sources.web.dtype=0: no; "
            r"would work: data.sources.web.kind=a data.sources.web.dtype=b data.prefetch=1",
        ),
        (
            ConfigError("data.prefetch", 0, "too few"),
            r"data\.prefetch=0: data\.sources\.web: too few",
        ),
        (
            DataError("data.jsonl, line 3: bad; set data.text_field"),
            r"data\.sources\.web: data\.jsonl, line 3: bad; set data\.sources\.web\.text_field",
        ),
    ):
        with pytest.raises(type(error), match=f"^{said}$"), errors_of_source("web"):
            raise error


# -- the order of sources; each rule is of (first sample, weights) ----

RULES = [
    [(0, {"a": 1})],
    [(0, {"a": 0.999, "b": 0.001})],
    [(0, WEIGHTS)],
    [
        (0, {"a": 0.9, "b": 0.1, "c": 0}),
        (4000, {"a": 0.1, "b": 0.1, "c": 0.8}),
        (4100, {"a": 1, "b": 0, "c": 0}),
    ],
    [(100 * i, {"a": 40 - i, "b": i, "c": 3}) for i in range(40)],
]


@pytest.mark.parametrize("rule", RULES)
def test_counts_are_as_close_to_the_shares_as_the_rule_promises(rule):
    """After every block, exactly: by at most 1 - 1/(2k - 2), Tijdeman's bound."""
    names, block = sorted(rule[0][1]), 20
    order = SourceOrder([(first, shares(weights)) for first, weights in rule], block=block, seed=3)
    bound = 1 - Fraction(1, 2 * len(names) - 2) if len(names) > 1 else 0
    targets, counts = dict.fromkeys(names, Fraction(0)), dict.fromkeys(names, 0)
    current = {}
    for number in range(5_000):
        current = next((shares(weights) for first, weights in rule if first == number), current)
        source, own = order.which(number)
        name = order.names[source]
        assert own == counts[name], "every source is read in its own order"
        counts[name] += 1
        targets = {each: target + current[each] for each, target in targets.items()}
        if (number + 1) % block == 0:
            assert all(abs(counts[each] - target) <= bound for each, target in targets.items()), (
                number
            )
            assert order.counts(number + 1) == counts


def order_of(*rule, seed=2):
    return SourceOrder([(first, shares(weights)) for first, weights in rule], block=B, seed=seed)


@pytest.mark.parametrize("number", [0, 5, B, 3 * B + 1, 41 * B])
def test_the_order_resumes_anywhere(number):
    rule = (0, WEIGHTS), (40 * B, dict.fromkeys(WEIGHTS, 1.0))
    first, second = order_of(*rule), order_of(*rule)
    for before in range(number):
        first.which(before)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(number))))
    assert second.counts(number) == first.counts(number)
    expected = [first.which(each) for each in range(number, number + 50)]
    assert [second.which(each) for each in range(number, number + 50)] == expected
