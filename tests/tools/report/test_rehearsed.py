"""Rehearsed memory beside published rows: what is rehearsed, kept and refused."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import pytest

from harness.tools.rehearse import verb
from harness.tools.rehearse.figures import Failure, RankFigures
from harness.tools.report.experiment import REHEARSED, read_rehearsed, rehearse_missing
from harness.util.errors import UserError

JOB = ["model=llama3_8b", "parallelism=fsdp_pp", "data=synthetic", "tokenizer=bytes", "precision=bf16"]
GIB = 2**30


class FakeRehearsals:
    """Ranks with more memory the higher they are; counts them."""

    ran: list[int]
    failure: Failure | None = None

    def __enter__(self) -> FakeRehearsals:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        return

    def run(self, job: object, rank: int, config: object) -> RankFigures:
        self.ran.append(rank)
        figures = RankFigures(rank, 0, "H100", memory={"reserved": (1.0 + rank) * GIB})
        figures.failure = self.failure
        return figures


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeRehearsals]:
    monkeypatch.setattr(FakeRehearsals, "ran", [], raising=False)
    monkeypatch.setattr(FakeRehearsals, "failure", None)
    monkeypatch.setattr(verb, "Rehearsals", FakeRehearsals)
    monkeypatch.setattr(verb, "require_no_gpu", lambda config: None)
    return FakeRehearsals


def test_the_fullest_rank_is_kept_and_not_rehearsed_again(tmp_path: Path, fake: type[FakeRehearsals]) -> None:
    for _ in range(2):
        rehearse_missing(tmp_path, [("id", JOB, "H100 SXM")])
        assert fake.ran == [0, 2]
    [found] = read_rehearsed(tmp_path).values()
    assert (found["rank"], found["memory_gib"]) == (2, 3.0)


def test_a_failed_rehearsal_is_not_kept(tmp_path: Path, fake: type[FakeRehearsals]) -> None:
    fake.failure = Failure("out of memory", "Tried to allocate 6.00 GiB", "model/decoder.py:1", 0)
    with pytest.raises(UserError, match="rank 0 could not be rehearsed: out of memory: Tried to allocate"):
        rehearse_missing(tmp_path, [("id", JOB, "H100 SXM")])
    assert read_rehearsed(tmp_path) == {}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / REHEARSED).write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        read_rehearsed(tmp_path)
