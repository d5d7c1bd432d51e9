"""Rows and metrics of documents, and a line for each mistake of a user."""

import math
import sys

import numpy as np
import pytest
import torch

from harness.compose.composer import compose_job
from harness.config.data import DataConfig
from harness.data.tokenizer import BytesTokenizer
from harness.tools.inference.evaluate import EvaluateJob, evaluate
from harness.tools.inference.scoring import evaluate as on_rank
from harness.tools.inference.tasks import Documents, Setting, encode_pair, windows
from harness.util.errors import UserError


def setting(window=64, data=None, split="all", **options):
    data = data or DataConfig(paths=["none"])
    return Setting(BytesTokenizer(), data, split, window, **options)


@pytest.mark.parametrize("length", [1, 2, 9, 10, 11, 25, 40])
@pytest.mark.parametrize("stride", [None, 1, 3, 10])
def test_windows_score_each_token_once(length, stride):
    rows = list(windows(range(length), 10, stride))
    scored = [token for row in rows for token in row.tokens[row.start :]]
    assert scored == list(range(1, length))
    assert all(len(row.tokens) - 1 <= 10 for row in rows)
    if stride is not None:
        later = rows[1:]
        assert all(row.start - 1 >= min(10 - stride, row.tokens[0] + 10) for row in later), (
            "context"
        )


def test_documents(tmp_path):
    (tmp_path / "a.txt").write_text("a\N{EURO SIGN}c")
    (tmp_path / "b.txt").write_text("d" * 100)
    (tmp_path / "c.txt").write_text("")
    task = Documents(setting(data=DataConfig(paths=[f"{tmp_path}/*.txt"])))
    # A byte is a token, and each document has one that ends it.
    scores = np.asarray([[-(len(row.tokens) - row.start) * 2.0, 0] for row in task.rows])
    metrics = task.metrics(scores)
    assert (metrics["documents"], metrics["bytes"], metrics["tokens"]) == (2, 105, 107)
    assert metrics["loss"] == pytest.approx(2.0)
    assert metrics["perplexity"] == pytest.approx(math.exp(2))
    assert metrics["bits_per_byte"] == pytest.approx(2 * 107 / math.log(2) / 105)
    assert len(Documents(setting(data=DataConfig(paths=[f"{tmp_path}/*.txt"]), limit=1)).rows) == 1


def test_splits_are_disjoint(tmp_path):
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text(str(number))
    data = DataConfig(paths=[f"{tmp_path}/*.txt"], validation_fraction=0.3)
    read = {}
    for split in ("train", "validation", "all"):
        rows = Documents(setting(8, data, split)).rows
        read[split] = {bytes(row.tokens[1:-1].astype(np.uint8)) for row in rows}
    assert read["train"] | read["validation"] == read["all"]
    assert not read["train"] & read["validation"]
    assert len(read["all"]) == 30
    assert 0 < len(read["validation"]) < 30


def test_trailing_spaces_are_scored():
    row = encode_pair("a  ", "b", setting())
    assert bytes(row.tokens[row.start :].tolist()) == b"  b"


def test_special_tokens():
    """In questions they are parsed, as in transformers, and a begin token in the text is not doubled."""
    for each, context, tokens, start in (
        (setting(), "<s>a</s>", [256, 97, 257, 98], 3),
        (setting(), "", [256, 98], 1),
    ):
        row = encode_pair(context, "b", each)
        assert (row.tokens.tolist(), row.start) == (tokens, start)
    assert encode_pair("", "<s>b", setting()).tokens.tolist() == [256, 98]
    with pytest.raises(UserError, match="the continuation '' has no token of its own"):
        encode_pair("a", "", setting())


def compose(*overrides):
    return compose_job(
        ["model=llama3_tiny", "cluster.device=cpu", *overrides],
        config_name="evaluate",
        schema=EvaluateJob,
    )


def test_an_incomplete_library(tmp_path, monkeypatch):
    """lm_eval is there, and a package that it needs is not."""
    (tmp_path / "lm_eval.py").write_text("import a_package_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("lm_eval", "harness.tools.inference.library"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    message = r"^evaluate.tasks=lm_eval:x: .*No module named 'a_package_that_is_not_there'.*pip install -e"
    with pytest.raises(UserError, match=message):
        on_rank(compose("evaluate.tasks=[lm_eval:x]"), torch.device("cpu"), None, None)


def test_no_tokenizer_no_weights(tmp_path):
    with pytest.raises(UserError, match="checkpoint=null: must be given"):
        evaluate(compose(), [])
    (tmp_path / "model.safetensors").write_bytes(b"")
    overrides = [f"evaluate.checkpoint={tmp_path}", "model=llama3_tiny"]
    with pytest.raises(UserError, match="has no tokenizer, and records none"):
        evaluate(compose(*overrides), overrides)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="records no data; would work: data=NAME"):
        evaluate(compose(*overrides), overrides)
