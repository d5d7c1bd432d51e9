"""The data and tokenizer groups: invalid settings are refused, shipped files are valid."""

import dataclasses
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.compose.hydra import with_types
from harness.config.data import DataConfig, TokenizerConfig
from harness.config.data_kinds import DATA_KINDS, OWNED
from harness.config.fields import check_rules, from_dict, leaves
from harness.util.errors import ConfigError

CONF = Path(__file__).parents[2] / "conf"
DATA_FILES = sorted((CONF / "data").glob("*.yaml"))
TOKENIZER_FILES = sorted((CONF / "tokenizer").glob("*.yaml"))

STREAMED = {"kind": "hub", "dataset": "d", "streaming": True, "shuffle": False}


def load(config_class, file):
    return from_dict(config_class, with_types(OmegaConf.to_container(OmegaConf.load(file)), config_class))


@pytest.mark.parametrize("config", [DataConfig(), TokenizerConfig()])
def test_every_field_has_a_role(config):
    assert {role for _, role, _ in leaves(config)} <= {"numerics", "execution", "label"}


@pytest.mark.parametrize("file", DATA_FILES, ids=lambda file: file.stem)
def test_shipped_data(file):
    assert file.read_text().startswith("# ")
    config = load(DataConfig, file)
    if file.stem.startswith(("local_", "tokens", "chat")):
        with pytest.raises(ConfigError, match=r"^data.paths=\[\]: .*would work: 'data.paths="):
            config.validate()
        config = dataclasses.replace(config, paths=["corpus/*"])
    if config.options.get("text") == "t5_clip":
        with pytest.raises(ConfigError, match=r"^data.options.t5=null"):
            config.validate()
        config = dataclasses.replace(config, options={**config.options, "t5": "t5", "clip": "clip"})
    if config.kind in ("pictures", "latents"):
        config = dataclasses.replace(config, paths=["photos/*"])
    if config.kind == "hub_pictures":
        config = dataclasses.replace(config, dataset="photos")
    if file.stem == "mixture":
        config = dataclasses.replace(config, sources={"a": DataConfig(kind="synthetic")}, weights={"a": 1})
    config.validate()


@pytest.mark.parametrize("file", TOKENIZER_FILES, ids=lambda file: file.stem)
def test_shipped_tokenizer(file):
    assert file.read_text().startswith("# ")
    load(TokenizerConfig, file).validate()


def test_shipped_files_are_found():
    assert {"python_stdlib", "local_text", "local_jsonl", "local_parquet", "chat", "c4", "synthetic"} <= {
        file.stem for file in DATA_FILES
    }
    assert {"python_2k", "bytes", "llama2", "llama3", "qwen3", "deepseek_v3", "gpt_oss", "llama4"} <= {
        file.stem for file in TOKENIZER_FILES
    }


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"kind": "files"}, "data.kind"),
        ({"kind": "local"}, "data.paths"),
        ({"kind": "local", "paths": ["a", ""]}, "data.paths"),
        ({"kind": "local", "paths": ["a"], "format": "csv"}, "data.format"),
        ({"kind": "local", "paths": ["a"], "text_field": ""}, "data.text_field"),
        ({"kind": "local", "paths": ["a"], "cache_dir": ""}, "data.cache_dir"),
        ({"kind": "local", "paths": ["a"], "validation_fraction": 1.0}, "data.validation_fraction"),
        ({"kind": "local", "paths": ["a"], "validation_fraction": -0.1}, "data.validation_fraction"),
        (
            {"kind": "local", "paths": ["a"], "validation_paths": ["b"], "validation_fraction": 0.1},
            "data.validation_fraction",
        ),
        ({"kind": "tokens"}, "data.paths"),
        ({"kind": "tokens", "paths": ["a"], "format": "jsonl"}, "data.format"),
        ({"kind": "local", "paths": ["a"], "format": "megatron"}, "data.format"),
        ({"kind": "tokens", "paths": ["a"], "dtype": "uint8"}, "data.dtype"),
        (
            {"kind": "tokens", "paths": ["a"], "validation_paths": ["b"], "validation_fraction": 0.1},
            "data.validation_fraction",
        ),
        ({"kind": "hub"}, "data.dataset"),
        ({"kind": "hub", "dataset": "pandas", "data_files": ["a.pkl"]}, "data.dataset"),
        ({**STREAMED, "workers": -1}, "data.workers"),
        ({"kind": "hub", "dataset": "d", "workers": 2}, "data.workers"),
        ({**STREAMED, "shuffle": True, "shuffle_buffer": 0}, "data.shuffle_buffer"),
        ({**STREAMED, "shuffle_buffer": 10}, "data.shuffle_buffer"),
        ({"kind": "hub", "dataset": "d", "shuffle_buffer": 10}, "data.shuffle_buffer"),
        ({**STREAMED, "validation_fraction": 0.1}, "data.validation_fraction"),
        (
            {"kind": "hub", "dataset": "d", "validation_split": "v", "validation_fraction": 0.1},
            "data.validation_fraction",
        ),
        ({"kind": "synthetic", "mask_fraction": 0.6}, "data.mask_fraction"),
        ({"kind": "synthetic", "mask_fraction": -0.1}, "data.mask_fraction"),
        ({"kind": "synthetic", "validation_fraction": 0.1}, "data.validation_fraction"),
    ],
)
def test_refused_data(settings, field):
    config = DataConfig(**settings)
    with pytest.raises(ConfigError) as caught:
        check_rules(config, "data.")
        config.validate()
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["local", "tokens", "hub", "chat", "synthetic", "mixture"])
def test_fields_of_other_kinds_are_refused(kind):
    others = [name for name in vars(DataConfig()) if name in OWNED and name not in DATA_KINDS[kind].fields]
    assert others
    for name in others:
        default = getattr(DataConfig(), name)
        value = {list: ["x"], dict: {"x": 1}, bool: True, float: 0.1}.get(type(default), "x")
        readers = [each for each in DATA_KINDS if name in DATA_KINDS[each].fields]
        rule = f"has no effect with data.kind={kind}; only data.kind={' or '.join(readers)} uses it"
        works = f"would work: data.kind={readers[0]}, or leave it out"
        with pytest.raises(ConfigError, match=rf"^data\.{name}=.*: {re.escape(f'{rule}; {works}')}$"):
            DataConfig(kind, **{name: value}).validate()


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "local", "paths": ["a"], "validation_fraction": 0.1},
        {"kind": "local", "paths": ["a"], "validation_paths": ["b"]},
        STREAMED,
        {**STREAMED, "workers": 0, "shuffle": True, "shuffle_buffer": 10},
        {"kind": "hub", "dataset": "json", "data_files": ["a.jsonl"], "validation_fraction": 0.1},
        {"kind": "synthetic", "mask_fraction": 0.5},
        {"kind": "tokens", "paths": ["a"], "format": "memmap", "dtype": "uint32", "boundaries": "eos"},
    ],
)
def test_accepted_data(settings):
    check_rules(DataConfig(**settings))
    DataConfig(**settings).validate()


def test_validation_needs_held_out_documents():
    DataConfig(kind="synthetic").require_validation()
    DataConfig(paths=["a"], validation_fraction=0.1).require_validation()
    tokens = {"kind": "tokens", "paths": ["a"]}
    DataConfig(**tokens).require_validation()  # a corpus may hold out documents
    for settings in (
        {**tokens, "format": "llmc"},
        {"paths": ["a"]},
        {"kind": "hub", "dataset": "d"},
        STREAMED,
    ):
        with pytest.raises(ConfigError) as caught:
            DataConfig(**settings).require_validation()
        assert caught.value.field == "data.validation_fraction"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"kind": "bpe"}, "tokenizer.kind"),
        ({"kind": "bytes", "path": "x"}, "tokenizer.path"),
        ({"kind": "sentencepiece"}, "tokenizer.path"),
        ({"kind": "sentencepiece", "path": "asset:nothing.model"}, "tokenizer.path"),
        ({"kind": "sentencepiece", "path": "x", "special": "llama3"}, "tokenizer.special"),
        ({"kind": "tiktoken", "special": "llama3"}, "tokenizer.path"),
        ({"kind": "tiktoken", "path": "x"}, "tokenizer.special"),
        ({"kind": "tiktoken", "path": "x", "special": "gpt"}, "tokenizer.special"),
        ({"kind": "huggingface"}, "tokenizer.path"),
        ({"kind": "none", "path": "x"}, "tokenizer.path"),
        ({"kind": "none", "eos": "<|endoftext|>"}, "tokenizer.eos"),
        ({"kind": "tiktoken", "path": "x", "special": "llama4", "eos": "<|eot|>"}, "tokenizer.eos"),
    ],
)
def test_refused_tokenizer(settings, field):
    config = TokenizerConfig(**settings)
    with pytest.raises(ConfigError) as caught:
        check_rules(config, "tokenizer.")
        config.validate()
    assert caught.value.field == field


def test_a_missing_asset_names_the_shipped_ones():
    with pytest.raises(ConfigError, match=r"asset:python_2k\.model"):
        TokenizerConfig("sentencepiece", "asset:nothing.model").validate()
