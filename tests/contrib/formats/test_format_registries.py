"""Formats of other software, found by entry points."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch
from families_table import LLAMAS
from held import Held
from one_line import one_line

from harness.config.data import DataConfig, TokenizerConfig
from harness.config.fields import check_rules
from harness.config.registry import TOKEN_FORMATS, WEIGHT_FORMATS, load_attribute
from harness.config.training import Sizes
from harness.data.corpus import TokenizedSplit
from harness.data.samples import Reading
from harness.data.token_files import open_token_files
from harness.data.tokenizer import build_tokenizer
from harness.data.tokens import TokenFormat
from harness.model.spec import tensor_shapes
from harness.tools.convert import ConvertConfig
from harness.util.errors import ConfigError
from harness.weights.detect import WeightFolder, find_source, open_source
from harness.weights.format import WeightFormat

ROOT = Path(__file__).parents[3]


def open_lines(file, data, vocab_size):
    """Each line of numbers is a document."""
    documents = [[*map(int, line.split())] for line in file.read_text().splitlines()]
    ends = np.cumsum([len(each) for each in documents])
    ids = np.array([number for each in documents for number in each])
    return TokenizedSplit(ids, np.array([0, *ends[:-1]]), str(file))


LINES = TokenFormat(
    endings=(".ids",), open=open_lines, companions={".ids.txt": ".ids"}, needs_dtype=True
)


def read_twos(path, model):
    return Held({name: torch.full(shape, 2.0) for name, shape in tensor_shapes(model).items()})


TWOS = WeightFormat(
    files="twos.txt",
    recognizes=lambda path: (Path(path) / "twos.txt").exists(),
    read=f"{__name__}:read_twos",
)


@pytest.fixture
def added(monkeypatch):
    """The formats above, as an installed package would add them."""
    for registry, name, attribute in (
        (TOKEN_FORMATS, "lines", "LINES"),
        (WEIGHT_FORMATS, "twos", "TWOS"),
    ):
        entry = EntryPoint(name, f"{__name__}:{attribute}", f"harness.{registry.kind}")
        monkeypatch.setitem(vars(registry), "plugins", {**registry.plugins, name: entry})


@pytest.mark.parametrize("registry", [TOKEN_FORMATS, WEIGHT_FORMATS], ids=lambda each: each.kind)
def test_pyproject_has_the_formats_of_this_package(registry):
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    expected = load_attribute(registry._expects)
    for name, place in groups[f"harness.{registry.kind}"].items():
        assert registry[name] is load_attribute(place), "not installed: make dev"
        assert isinstance(registry[name], expected)


def test_token_files_of_another_package(added, tmp_path):
    (tmp_path / "a.ids").write_text("1 2 3\n4 5\n")
    (tmp_path / "a.ids.txt").touch()
    tokenizer, sizes = build_tokenizer(TokenizerConfig("none")), Sizes(1, 4)

    def opened(path, **options):
        data = DataConfig("tokens", paths=[str(path)], **options)
        return open_token_files(Reading(data, tokenizer, 4, 1, 0, range(1), "train", 9, sizes))

    for path in (tmp_path, tmp_path / "a.ids", tmp_path / "a.ids.txt"):
        tokens = opened(path, dtype="int32")
        assert tokens.read(0, 5).tolist() == [1, 2, 3, 4, 5]
        assert tokens.starts_between(0, 5).tolist() == [0, 3]
    check_rules(DataConfig("tokens", format="lines"))


def test_weights_of_another_package(added, tmp_path):
    (tmp_path / "twos.txt").touch()
    found = find_source(str(tmp_path))
    assert found == WeightFolder("twos", str(tmp_path), {})
    source = open_source(found, LLAMAS["llama"])
    assert all((source.read(name) == 2).all() for name in source.tensors)


def test_formats_that_are_only_read_are_no_choice_of_a_conversion(added):
    check_rules(ConvertConfig(format="torchtitan"), "convert.")
    for name in ("twos", "meta", "nothing"):
        works = "would work: dcp, hf, torch, torchtitan"
        with one_line(ConfigError, f"convert.format={name}: no such choice; {works}$"):
            check_rules(ConvertConfig(format=name), "convert.")
