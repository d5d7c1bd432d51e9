"""Folders of configurations: ``conf/`` of the checkout or the wheel, and the folders of the search path."""

import functools
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from harness.config.registry import Registry
from harness.util import PACKAGE
from harness.util.errors import UserError


@functools.cache
def conf_dir() -> str:
    """Return the absolute path of ``conf/``: the checkout's, or the wheel's copy."""
    for candidate in (PACKAGE.parent / "conf", PACKAGE / "_conf"):
        if os.path.isfile(candidate / "train.yaml"):
            return str(candidate)
    raise UserError(
        f"{PACKAGE}: no conf/ found beside or in the package; would work: install it again"
    )


Stamp = tuple[tuple[str, int, int], ...]
"""Path, size and mtime of files."""


@dataclass(frozen=True)
class ConfigFolders:
    """Folders of configurations; a file in an earlier folder hides those of the same name in later ones.

    Attributes:
        paths: ``conf/``, the folders of the search path, and those of installed packages.
        groups: groups and their folders.
        primaries: the primary config to compose instead of a verb's own, by name.
    """

    paths: tuple[Path, ...]
    groups: dict[str, tuple[Path, ...]] = field(compare=False)
    primaries: dict[str, str] = field(default_factory=dict)

    @property
    def added(self) -> tuple[Path, ...]:
        return tuple(path for path in self.paths[1:] if path not in folders_of_packages())

    def find(self, name: str) -> Path | None:
        """Return the file of a config, such as ``train`` or ``model/llama3_8b``; None if there is none."""
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return None
        files = (path / f"{name}.yaml" for path in self.paths)
        return next((file for file in files if os.path.isfile(file)), None)

    def stamp(self) -> Stamp:
        """Return the order of the folders and the stamp of all files, to detect changes."""
        paths = [str(path) for path in self.paths]
        inside = []
        for group in chain.from_iterable(self.groups.values()):
            inside += [folder for folder, _, _ in os.walk(group)]
        stamp = [(path, 0, 0) for path in paths]
        for folder in (*paths, *sorted(inside)):
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                if entry.is_file():
                    facts = entry.stat()
                    stamp.append((entry.path, facts.st_size, facts.st_mtime_ns))
        return tuple(stamp)


_used: ContextVar[ConfigFolders | None] = ContextVar("config_folders", default=None)


def config_folders() -> ConfigFolders:
    """Return the folders of configurations in use: without a search path, outside of ``using_folders``."""
    return _used.get() or _only_conf(conf_dir())


@contextmanager
def using_folders(added: Sequence[Path], primaries: dict[str, str] | None = None) -> Iterator[None]:
    """Use other folders after ``conf/``, and other primary configs."""
    before = _used.set(folders_with(added, primaries))
    try:
        yield
    finally:
        _used.reset(before)


def folders_with(added: Sequence[Path], primaries: dict[str, str] | None = None) -> ConfigFolders:
    paths = (Path(conf_dir()), *added, *folders_of_packages())
    conf, *others = paths
    # All folders of conf/, and folders elsewhere that hold YAML.
    names = {path.name for path in conf.iterdir() if path.is_dir()}
    for folder in others:
        new = {path.parent.name for path in folder.glob("*/*.yaml")}
        names |= {name for name in new if name.isidentifier()}
    groups = {}
    for name in sorted(names):
        folders = [folder / name for folder in paths]
        groups[name] = tuple(folder for folder in folders if folder.is_dir())
    return ConfigFolders(paths, groups, primaries or {})


@functools.cache
def _only_conf(_conf: str) -> ConfigFolders:
    return folders_with([])


@functools.cache
def folders_of_packages() -> tuple[Path, ...]:
    """Return the folders of configurations of installed packages, which entry points of harness.conf name."""
    folders = []
    for entry in Registry[str]("conf", {}, field="hydra.searchpath").plugins.values():
        folder = folder_of_package(entry.value)
        if folder is None:
            package = f"the package {entry.dist.name} " if entry.dist else ""
            raise UserError(
                f"{package}names the folder {entry.value} in group harness.conf, which does not exist; "
                "would work: package data of its wheel, or pip uninstall"
            )
        folders.append(folder)
    return tuple(folders)


def folder_of_package(name: str) -> Path | None:
    """Return the folder of a package, or of data in one, without importing it where that is possible."""
    top, *below = name.replace("/", ".").split(".")
    try:
        for module, rest in ((top, below), (".".join([top, *below]), [])):
            spec = importlib.util.find_spec(module)
            for location in (spec.submodule_search_locations if spec else None) or ():
                if Path(location, *rest).is_dir():
                    return Path(location, *rest).absolute()
    except (ImportError, ValueError):
        return None
    return None
