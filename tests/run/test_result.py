"""result.json is complete or absent, flat, and names the commit and versions of its code."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from harness.run.result import git_commit, versions, write_json_atomically, write_result
from harness.util import __version__, files
from harness.util.encoding import flatten


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=A", "-c", "user.email=a@b.c")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def test_result_is_one_flat_row(tmp_path: Path) -> None:
    row = {"exit": "done", "job": {"training": {"steps": 3}, "empty": {}}, "tags": ["a"], "loss": math.nan}
    path = write_result(tmp_path, {**row, "run_dir": tmp_path})
    assert json.loads(path.read_text()) == {
        "exit": "done",
        "job.training.steps": 3,
        "tags": ["a"],
        "loss": "nan",
        "run_dir": str(tmp_path),
    }


def test_flatten_refuses_two_values_of_one_name() -> None:
    with pytest.raises(ValueError, match=r"a\.b"):
        flatten({"a.b": 1, "a": {"b": 2}})


def test_a_crash_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    write_json_atomically(path, {"state": "old"})

    def fail(handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_json_atomically(path, {"state": "new"})
    assert json.loads(path.read_text()) == {"state": "old"}
    assert os.listdir(tmp_path) == ["status.json"]


def test_result_is_as_readable_as_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        mode = write_result(tmp_path, {}).stat().st_mode
    finally:
        os.umask(before)
    assert mode & 0o777 == 0o640


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = versions()
    assert found["harness"] == __version__
    assert found["python"] and found["torch"]
    monkeypatch.setattr("harness.run.result._PACKAGES", ("no-such-package-at-all",))
    assert versions()["no-such-package-at-all"] is None


def test_git_commit_clean_and_dirty(tmp_path: Path) -> None:
    git(tmp_path, "init")
    assert git_commit(tmp_path) == {"commit": None, "dirty": None}
    (tmp_path / "code.py").write_text("x = 1\n")
    (tmp_path / ".gitignore").write_text("ignored/\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    clean = git_commit(tmp_path)
    assert clean["dirty"] is False
    assert isinstance(clean["commit"], str) and len(clean["commit"]) == 40
    (tmp_path / "new.py").write_text("y = 2\n")
    assert git_commit(tmp_path) == {"commit": clean["commit"], "dirty": True}
    (tmp_path / "ignored").mkdir()
    assert git_commit(tmp_path / "ignored") == {"commit": None, "dirty": None}


def test_git_commit_outside_of_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {"commit": None, "dirty": None}
    assert git_commit(tmp_path) == nothing
    assert git_commit(tmp_path / "missing") == nothing
    monkeypatch.setenv("PATH", "")
    assert git_commit(tmp_path) == nothing
