"""A launcher's environment variables are complete and valid, or a one-line error."""

import pytest
from cases import rows
from one_line import one_line

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
    set_environment(monkeypatch, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "nope"})
    assert launched_ranks() == 1, "a lone rank meets nobody"
    set_environment(monkeypatch, {"WORLD_SIZE": "abc"})
    assert launched_ranks() is None


@pytest.mark.parametrize(
    ("name", "value", "says"),
    rows("""
        WORLD_SIZE   abc      "WORLD_SIZE=abc: must be a whole number from 1 to"
        WORLD_SIZE   null     "WORLD_SIZE=: must be a whole number from 1 to"
        RANK         '-1'     "RANK=-1: must be a whole number from 0 to 1; RANK=-1 means"
        RANK         '2'      "RANK=2: must be a whole number from 0 to 1; RANK=2 means"
        MASTER_ADDR  null     "MASTER_ADDR: must be given; RANK=1 means that a launcher"
        MASTER_PORT  '99999'  "MASTER_PORT=99999: must be a whole number from 1 to 65535"
        LOCAL_RANK   x        "LOCAL_RANK=x: must be a whole number"
    """),
)
def test_mistakes(name, value, says, monkeypatch):
    set_environment(monkeypatch, COMPLETE if value is None else {**COMPLETE, name: value})
    if value is None:
        monkeypatch.delenv(name)
    with one_line(UserError, f"^{says}.*would work: "):
        launched_ranks()
