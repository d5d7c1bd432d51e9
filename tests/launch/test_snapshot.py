"""Contents and permissions of the snapshot of the code."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

from harness.launch import snapshot
from harness.launch.snapshot import LARGEST_BYTES, snapshot_path, take_snapshot
from harness.util.errors import MachineError, UserError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a private module, a link to a file outside, and files that are not code."""
    package = tmp_path / "checkout" / "harness"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "model" / "private.py").write_text("key = 1\n")
    (package / "model" / "private.py").chmod(0o600)
    (package / "model").chmod(0o710)
    (tmp_path / "id_rsa").write_text("secret")
    (package / "id_rsa").symlink_to(tmp_path / "id_rsa")
    (package / "token").write_text("secret")
    (package / ".hidden").mkdir()
    (package / ".hidden" / "a.py").write_text("")
    with (package / "core.1234").open("wb") as core:
        core.truncate(100 * LARGEST_BYTES)
    monkeypatch.setattr(snapshot, "PACKAGE", package)
    return package


def modes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode)
        for path in sorted(folder.rglob("*"))
    }


def test_only_code_is_copied_with_its_permissions(package: Path, tmp_path: Path) -> None:
    taken = take_snapshot(tmp_path / "home")
    assert modes(taken / "harness") == {
        "__init__.py": stat.S_IMODE((package / "__init__.py").stat().st_mode),
        "model": 0o710,
        "model/private.py": 0o600,
    }
    assert (taken / "harness" / "model" / "private.py").read_text() == "key = 1\n"
    assert sorted(os.listdir(tmp_path / "home" / "code")) == [taken.name]


@pytest.mark.parametrize("name", ["linked.py", "folder"])
def test_links_are_refused(package: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (package / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        UserError,
        match=f"{package / name}: snapshots .* do not follow symbolic links.*cluster.snapshot=false",
    ):
        take_snapshot(tmp_path / "home")


def test_a_large_file_is_refused_by_name(package: Path, tmp_path: Path) -> None:
    with (package / "generated.py").open("wb") as file:
        file.truncate(LARGEST_BYTES + 1)
    with pytest.raises(UserError, match=f"{package / 'generated.py'}: has 10 MB"):
        snapshot_path(tmp_path / "home")


@pytest.mark.parametrize(
    ("number", "raised", "says"),
    [
        (errno.ENOSPC, MachineError, "disk full or quota exceeded"),
        (errno.EACCES, UserError, "Permission denied"),
    ],
)
def test_a_copy_that_fails_leaves_nothing(
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    raised: type[Exception],
    says: str,
) -> None:
    written: list[Path] = []

    def fail_at_the_second(original: Path, copy: Path) -> None:
        written.append(original)
        if len(written) == 2:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(shutil, "copymode", fail_at_the_second)
    with pytest.raises(raised, match=f"the code cannot be copied: .*{says}") as caught:
        take_snapshot(tmp_path / "home")
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path / "home" / "code") == []


def test_the_copy_matches_its_digest(package: Path, tmp_path: Path) -> None:
    """Editing a file while jobs are submitted does not change the content of an existing snapshot."""
    before = snapshot_path(tmp_path / "home")
    (package / "__init__.py").write_text("edited\n")
    assert take_snapshot(tmp_path / "home") == before
    assert (before / "harness" / "__init__.py").read_text() == ""
