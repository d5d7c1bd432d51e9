"""A launcher's environment variables are complete and valid, or a one-line error."""

from __future__ import annotations

import pytest

from harness.train.process import launched_ranks
from harness.util.errors import UserError

COMPLETE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def set_environment(patch, variables):
    for name in (*COMPLETE, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        patch.delenv(name, raising=False)
    for name, value in variables.items():
        patch.setenv(name, value)


def test_ranks_are_counted(monkeypatch):
    set_environment(monkeypatch, COMPLETE)
    assert launched_ranks() == 2
    set_environment(monkeypatch, {"RANK": "0", "WORLD_SIZE": "1"})
    assert launched_ranks() == 1, "a lone rank meets nobody"
    set_environment(monkeypatch, {"WORLD_SIZE": "abc"})
    assert launched_ranks() is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "abc"),
        ("WORLD_SIZE", None),
        ("RANK", "-1"),
        ("RANK", "2"),
        ("MASTER_ADDR", None),
        ("MASTER_PORT", "99999"),
        ("LOCAL_RANK", "x"),
    ],
)
def test_mistakes(name, value, monkeypatch):
    set_environment(monkeypatch, COMPLETE if value is None else {**COMPLETE, name: value})
    if value is None:
        monkeypatch.delenv(name)
    with pytest.raises(UserError) as refused:
        launched_ranks()
    assert "RANK means that a launcher started this process" in str(refused.value)
    assert (f"{name}={value}" in str(refused.value)) == (value is not None)
