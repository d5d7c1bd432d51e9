"""The fields of a mixture: mistakes, and options as sources."""

from __future__ import annotations

from typing import Any

import pytest

from harness.compose.composer import compose_job
from harness.config.data import DataConfig
from harness.config.fields import check_rules, from_dict
from harness.config.mixture import errors_of_source
from harness.launch.begin import require_vocabulary
from harness.util.errors import ConfigError, DataError, UserError

SOURCES = {"a": {"kind": "synthetic"}, "b": {"kind": "local", "paths": ["web/*.txt"]}}
MIXTURE = {"kind": "mixture", "sources": SOURCES, "weights": {"a": 1.0, "b": 1.0}}


def with_b(**fields: Any) -> dict[str, Any]:
    return {"sources": SOURCES | {"b": SOURCES["b"] | fields}}


# Fields that differ from MIXTURE, and a part of the message.
MISTAKES: list[tuple[dict[str, Any], str]] = [
    (
        {"sources": {}},
        "data.sources={}: data.kind=mixture needs named sources; would work: 'data.sources={web",
    ),
    (
        {"weights": {}},
        "data.weights={}: data.kind=mixture needs either data.weights or data.epochs; would work",
    ),
    ({"weights": {"a": 1, "cc": 2}}, "data.weights.cc=2: data.sources has no such source; would work: a, b"),
    ({"weights": {"a": 1}}, "has no weight above 0 for data.sources.b; would work: data.weights.b=0.1"),
    ({"weights": {"a": -1, "b": 1}}, "data.weights=-1: must be at least 0"),
    ({"weights": {"a": 0, "b": 0}}, "at least one weight must be above 0"),
    ({"weights": {"a": "x"}}, "data.weights={a:x}: must be a mapping, like {a: b}"),
    (
        {"weights": {}, "epochs": {"a": 1, "b": 1}},
        "data.epochs.a=1: the number of samples of data.sources.a is",
    ),
    ({"weights": {}, "epochs": {"b": 1}}, "has no source a; would work: data.epochs.a=1"),
    ({"epochs": {"a": 1, "b": 1}}, "needs either data.weights or data.epochs"),
    (
        {"sources": {"b": None}},
        "data.sources={b:null}: must be a mapping of names to fields, like {a: {kind: b}}",
    ),
    (with_b(pahts=["x"]), "data.sources.b.pahts=[x]: no such field; did you mean data.sources.b.paths?"),
    (with_b(format="csv"), "data.sources.b.format=csv: no such choice; would work: auto"),
    (with_b(paths=[]), "data.sources.b.paths=[]: data.sources.b.kind=local needs at least one file"),
    (
        with_b(streaming=True),
        "has no effect with data.sources.b.kind=local; only data.sources.b.kind=hub or hub_pictures uses it",
    ),
    (
        with_b(prefetch=0),
        "data.sources.b.prefetch=0: is set once, for all sources; would work: data.prefetch",
    ),
    (with_b(kind="mixture"), "data.sources.b.kind=mixture: a source is not a mixture itself"),
    ({"sources": SOURCES | {"step": SOURCES["a"]}}, "data.sources=step: a name has letters, digits"),
    ({"shuffle": False}, "is a field of each source; would work: data.sources.NAME.shuffle"),
    ({"weight_changes": [{"a": 1}]}, "each change needs a whole number `step` above 1"),
    ({"weight_changes": [{"step": 9, "a": 1}, {"step": 9, "b": 1}]}, "`step` above 9"),
    ({"weight_changes": [{"step": 9.5, "a": 1}]}, "`step` above 1"),
    ({"weight_changes": [{"step": 9, "c": 1}]}, "data.weight_changes.c=1: data.sources has no such source"),
    ({"weight_changes": [{"step": 9, "a": "x"}]}, "must be a list of mappings, like [{a:1,b:2}]"),
]


@pytest.mark.parametrize(("fields", "message"), MISTAKES)
def test_mistakes_get_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        config = from_dict(DataConfig, MIXTURE | fields, "data.")
        check_rules(config, "data.")
        config.validate()
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data@data.sources.c=local_txt", "no such option; did you mean local_text?"),
        ("data@model=local_text", "would work: data=OPTION, data@data.sources.NAME=OPTION"),
    ],
)
def test_mistakes_in_options_get_one_line(override: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        compose_job(["data=mixture", override])
    assert message in str(raised.value)


def test_a_source_can_be_an_option() -> None:
    """And its fields can be set on top, in any order of the command line."""
    options = ("data=mixture", "data.sources.a.paths=[web/*.txt]", "data@data.sources.a=local_text")
    weights = ("data.weights.a=3", "data.weight_changes=[{step: 9, a: 1}]")
    job = compose_job(["cluster.device=cpu", *options, "data.sources.a.text_field=body", *weights])
    assert job.data.sources["a"] == DataConfig(
        paths=["web/*.txt"], format="text", validation_fraction=0.01, text_field="body"
    )
    assert job.data.weights == {"a": 3} and job.data.weight_changes == [{"step": 9, "a": 1}]
    assert type(job).from_json(job.to_json()) == job


def test_fields_of_sources_are_part_of_the_numerics() -> None:
    fixed = ("cluster.device=cpu", "data=mixture", "data.sources.a.kind=synthetic", "data.weights.a=1")
    job = compose_job(fixed)
    other = compose_job([*fixed, "data.sources.a.mask_fraction=0.1"])
    assert job.numerics_id != other.numerics_id
    assert job.id == compose_job([*fixed, "data.cache_dir=elsewhere"]).id


def test_errors_of_a_source_name_its_fields() -> None:
    """Shared fields, file names and commands stay."""
    command = "harness tokenize data=local_text 'data.paths=[a b]' 'tokenize.target=corpus/NAME'"
    with pytest.raises(ConfigError) as raised, errors_of_source(DataConfig(), "web"):
        works = f"{command} and then data=tokens 'data.paths=[corpus/NAME]', or data.cache_dir"
        raise ConfigError("data.prefetch", 0, "data.paths=[/x/data.jsonl, data.txt]", works)
    assert str(raised.value) == (
        "data.prefetch=0: data.sources.web.paths=[/x/data.jsonl, data.txt]; would work: "
        f"{command} and then data.sources.web.kind=tokens 'data.sources.web.paths=[corpus/NAME]', "
        "or data.cache_dir"
    )
    said = r"^data\.prefetch=0: data\.sources\.web: too few$"
    with pytest.raises(ConfigError, match=said), errors_of_source(DataConfig(), "web"):
        raise ConfigError("data.prefetch", 0, "too few")
    said = r"^data\.sources\.web: data\.jsonl, line 3: bad$"
    with pytest.raises(DataError, match=said), errors_of_source(DataConfig(), "web"):
        raise DataError("data.jsonl, line 3: bad")


def test_a_source_with_text_needs_a_tokenizer() -> None:
    sources = "data.sources={a: {kind: synthetic}, b: {paths: [a.txt]}}"
    with pytest.raises(ConfigError, match=r"tokenizer\.kind=none: cannot encode text, and data\.kind=local"):
        compose_job(["data=mixture", sources, "data.weights={a: 1, b: 1}", "tokenizer=none"])


def test_a_source_of_conversations_needs_a_chat_template() -> None:
    typed = ["data=mixture", "data.sources={c: {kind: chat, paths: [a.jsonl], chat_template: chatml}}"]
    typed += ["data.weights.c=1", "data.attend_across_documents=false", "cluster.device=cpu"]
    job = compose_job([*typed, "model=llama3_tiny", "model.vocab_size=2048", "tokenizer=python_2k"])
    with pytest.raises(UserError, match=r"data\.sources\.c.*no token <\|im_start\|>"):
        require_vocabulary(job)
    shared = [each.replace("documents=false", "documents=true") for each in typed]
    with pytest.raises(ConfigError, match=r"^data\.attend_across_documents=true: .*would work: false$"):
        compose_job(shared)
