"""A launcher's environment variables are complete and valid, or a one-line error."""

from __future__ import annotations

import pytest

from harness.train.process import launched_ranks
from harness.util.errors import UserError

COMPLETE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def set_environment(patch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
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
    ("name", "value", "says"),
    [
        ("WORLD_SIZE", "abc", "WORLD_SIZE=abc: must be a whole number of at least 1; RANK=1 means"),
        ("WORLD_SIZE", None, "WORLD_SIZE: is missing; RANK=1 means that a launcher started"),
        ("RANK", "-1", "RANK=-1: must be a whole number of at least 0 and less than 2"),
        ("RANK", "2", "RANK=2: must be a whole number of at least 0 and less than 2"),
        ("MASTER_ADDR", None, "MASTER_ADDR: is missing"),
        (
            "MASTER_PORT",
            "99999",
            "MASTER_PORT=99999: must be a whole number of at least 1 and less",
        ),
        ("LOCAL_RANK", "x", "LOCAL_RANK=x: must be a whole number"),
    ],
)
def test_mistakes(name, value, says, monkeypatch):
    set_environment(monkeypatch, COMPLETE if value is None else {**COMPLETE, name: value})
    if value is None:
        monkeypatch.delenv(name)
    with pytest.raises(UserError) as refused:
        launched_ranks()
    assert str(refused.value).startswith(says)
