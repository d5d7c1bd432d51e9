"""A job's input files are checked before it is submitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cluster import inputs
from harness.cluster.inputs import require_inputs
from harness.compose import compose_job
from harness.errors import ConfigError


@pytest.fixture(autouse=True)
def as_if_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat pytest's temporary folders as shared."""
    monkeypatch.setattr(inputs, "_NODE_LOCAL", ("/local",))
    monkeypatch.setattr(inputs.tempfile, "gettempdir", lambda: "/local")
    for cached in (inputs._matches_any, inputs._is_missing):
        cached.cache_clear()


def require(*typed: str) -> None:
    require_inputs(compose_job(["model=llama3_tiny", "cluster=slurm", "cluster.device=cpu", *typed]))


TOKENS = ("data=tokens", "tokenizer=bytes")
LOCAL = ("data=local_text", "tokenizer=bytes", "data.validation_fraction=0")


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ((*LOCAL, "data.paths=[{here}/nope.txt]"), "data.paths=.*no file matches"),
        ((*LOCAL, "data.paths=[{here}/nope/**/*.txt]"), "data.paths=.*no file matches"),
        (
            (*LOCAL, "data.paths=[{here}/a.txt]", "data.validation_paths=[{here}/b]"),
            "data.validation_paths=",
        ),
        ((*TOKENS, "data.paths=[{here}/nope]"), "data.paths=.*no file matches"),
        (("tokenizer.kind=huggingface", "tokenizer.path={here}/nope.json"), "tokenizer.path=.*no such file"),
        (("checkpoint.initial_load_path={here}/nope",), "checkpoint.initial_load_path=.*no such folder"),
    ],
)
def test_what_is_missing(tmp_path: Path, typed: tuple[str, ...], says: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=says):
        require(*(each.replace("{here}", str(tmp_path)) for each in typed))


@pytest.mark.parametrize(
    "typed",
    [
        (*LOCAL, "data.paths=[{here}/nope.txt,{here}/a.*]"),
        (*TOKENS, "data.paths=[{here}/prefix]"),
        (*LOCAL, "data.paths=[/not/here/either/*.txt]"),
        (*LOCAL, "data.paths=[/local/data/*.txt]"),
        ("tokenizer.kind=huggingface", "tokenizer.path=/not/here/tokenizer.json"),
        ("tokenizer=bytes", "checkpoint.initial_load_path=s3://bucket/step-5"),
        ("tokenizer=bytes", "checkpoint.initial_load_path={here}"),
    ],
)
def test_what_is_here_or_cannot_be_seen(tmp_path: Path, typed: tuple[str, ...]) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "prefix.idx").touch()
    require(*(each.replace("{here}", str(tmp_path)) for each in typed))
