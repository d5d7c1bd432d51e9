"""Folders and packages of the user's own configurations: ``--config-dir`` and ``hydra.searchpath``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.compose.errors import to_user_error
from harness.compose.overrides import OVERRIDE, SETTING, options_of
from harness.compose.paths import (
    ConfigFolders,
    conf_dir,
    config_folders,
    folder_of_package,
    folders_of_packages,
    using_folders,
)
from harness.util.errors import UserError

FLAG = "--config-dir"
_WORKS = f"{SETTING}=[file:///FOLDER], {SETTING}=[pkg://PACKAGE.FOLDER], {FLAG} FOLDER"
# Text that Hydra's grammar reads without quotes.
_PLAIN = re.compile(r"[\w./:-]+", re.ASCII)
SHADOWED_SHOWN = 3


def sets_search_path(override: str) -> bool:
    """Whether an override sets the search path."""
    match = OVERRIDE.match(override)
    return match is not None and match["key"] == SETTING


@contextmanager
def search_path(
    overrides: Iterable[str],
    primary: str,
    *,
    folders: Sequence[str] = (),
    primaries: dict[str, str] | None = None,
) -> Iterator[list[str]]:
    """Use the user's folders; yield the overrides, with the search path first.

    The order is Hydra's: ``conf/``, the folders of ``--config-dir``, then the typed search path or, without
    one, that of the primary config. Without any of these, the folders in use stay.

    Args:
        overrides: as typed.
        primary: name of the primary config.
        folders: values of ``--config-dir``.
        primaries: primary configs to compose instead of a verb's own, by name; None keeps those in use.

    Raises:
        UserError: a folder does not exist, or there is no such primary config.
    """
    now = config_folders()
    names = now.primaries if primaries is None else primaries
    overrides = list(overrides)
    typed = [each for each in overrides if sets_search_path(each)]
    rest = [each for each in overrides if not sets_search_path(each)]
    found = {f"file://{_folder(each, FLAG)}": _folder(each, FLAG) for each in folders}
    entries = (
        _entries(typed[-1])
        if typed
        else _of_primary(names.get(primary, primary), [*found.values()] or now.added)
    )
    found |= {_absolute(each): _folder(each, SETTING) for each in entries}
    if not found and names == now.primaries:
        yield rest
        return
    with using_folders([*found.values()] or now.added, names):
        yield [f"{SETTING}=[{','.join(map(_quoted, found))}]", *rest] if found else rest


def shadowed() -> str:
    """Say which of the user's files are not used, because an earlier folder has another of the same name."""
    paths = config_folders().paths
    names = {file.stem for path in paths[1:] for file in path.glob("*.yaml")}
    names |= {f"{group}/{option}" for group in config_folders().groups for option in options_of(group)}
    hidden = []
    for name in sorted(names):
        first, *others = (path / f"{name}.yaml" for path in paths if (path / f"{name}.yaml").is_file())
        # A copy changes nothing.
        hidden += [(first, other) for other in others if other.read_bytes() != first.read_bytes()]
    shown = [f"{other}: not used, {first} has the same name and comes first" for first, other in hidden]
    more = len(shown) - SHADOWED_SHOWN
    return "\n".join([*shown[:SHADOWED_SHOWN], *([f"and {more} more files"] if more > 0 else [])])


def _entries(override: str) -> list[str]:
    """Return the elements of a typed search path."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    try:
        [parsed] = OverridesParser.create().parse_overrides([override])
    except Exception as error:
        raise to_user_error(error) from error
    if parsed.is_sweep_override():
        raise UserError(f"{override}: all points of a sweep have one search path; would work: {_WORKS}")
    return _texts(parsed.value(), override)


def _of_primary(name: str, added: Sequence[Path]) -> list[str]:
    """Return the search path in a primary config."""
    folders = ConfigFolders((Path(conf_dir()), *added, *folders_of_packages()), {})
    file = folders.find(name)
    if file is None:
        searched, works = (", ".join(map(str, each)) for each in (folders.paths, folders.primary_names()))
        raise UserError(f"--config-name={name}: no such file in {searched}; would work: {works}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return []  # Hydra reports it
    if "searchpath" not in text:
        return []
    from omegaconf import OmegaConf

    try:
        found = OmegaConf.select(OmegaConf.create(text), SETTING)
        return [] if found is None else _texts(list(found), f"{SETTING} in {file}")
    except UserError:
        raise
    except Exception as error:
        raise to_user_error(error) from error


def _texts(value: Any, source: str) -> list[str]:
    elements = value if isinstance(value, list) else [None]
    # Hydra's quoted texts are a class of their own.
    texts = [getattr(each, "text", each) for each in elements]
    names = [each for each in texts if isinstance(each, str) and each]
    if len(names) < len(texts):
        raise UserError(f"{source}: must be a list of folders or packages; would work: {_WORKS}")
    return names


def _folder(entry: str, source: str) -> Path:
    """Return the folder of an element, as an absolute path."""
    scheme, _, name = entry.rpartition("://")
    shown = f"{source}={entry}" if source == FLAG else f"{source}=[{entry}]"
    if scheme == "pkg":
        found = folder_of_package(name)
        if found is None:
            rule = "no such folder in an installed package"
            raise UserError(f"{shown}: {rule}; would work: pip install its package, or {_WORKS}")
        return found
    if scheme not in ("", "file"):
        raise UserError(f"{shown}: must begin with file:// or pkg://; would work: {_WORKS}")
    try:
        if Path(name).is_dir():
            return Path(name).absolute()
    except (OSError, ValueError):  # an invalid path
        pass
    raise UserError(f"{shown}: no such folder; would work: {_WORKS}")


def _absolute(entry: str) -> str:
    """Return an element that means the same from another folder."""
    return entry if entry.startswith("pkg://") else f"file://{_folder(entry, SETTING)}"


def _quoted(entry: str) -> str:
    if _PLAIN.fullmatch(entry):
        return entry
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", entry)
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"
