"""Arrows point down: a room imports the rooms below it, and none above; nothing slow is imported early."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from processes import python

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "harness").rglob("*.py")
}
# From the ground up.
ROOMS = (
    *("util", "config", "data", "model", "metrics", "run", "precision", "parallelism", "optimizer"),
    *("checkpoint", "weights", "train", "compose", "launch", "tools", "contrib"),
)
# Packages that importing a module does not import. harness.train.process sets what torch reads once.
NOT_IMPORTED = {
    "harness.config.job": "torch hydra omegaconf",
    "harness.util.hardware": "torch",
    "harness.config.data": "torch numpy datasets sentencepiece tiktoken pyarrow",
    "harness.config.metrics": "torch rich wandb",
    "harness.train.rank": "torch",
    "harness.train.process": "torch",
    "harness.launch.train": "torch hydra omegaconf",
    "harness.launch.sweep.run": "torch hydra omegaconf",
}


@pytest.mark.parametrize("module", NOT_IMPORTED)
def test_importing_is_quick(module: str) -> None:
    listed = python("-c", f"import sys, {module}; print(*sys.modules)").stdout.split()
    assert module in listed and not set(NOT_IMPORTED[module].split()) & set(listed)


@cache
def imports_of(module: str, *, of_types: bool = True) -> frozenset[str]:
    """Modules of the harness that a module imports, also inside of functions.

    Args:
        module: its name.
        of_types: whether to count what only type checkers see.
    """
    found = set()
    for node in nodes(ast.parse(FILES[module].read_text()), of_types=of_types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import module` imports a module, `from module import name` does not.
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else node.module for name in names}
    return frozenset(found & FILES.keys())


def nodes(tree: ast.AST, *, of_types: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING" and not of_types:
            continue
        yield child
        yield from nodes(child, of_types=of_types)


def room_of(module: str) -> tuple[str, ...]:
    """The room of a module, and its own name in ``tools`` and ``contrib``; empty for a door."""
    _, *parts = module.split(".")
    if not parts or parts[0] not in ROOMS:
        return ()
    return tuple(parts[:2]) if parts[0] in ("tools", "contrib") else (parts[0],)


def points_down(source: tuple[str, ...], target: tuple[str, ...]) -> bool:
    """Whether a room may import another. Doors import all; tools and contributions only the plan of tools."""
    if source == target or not source or not target:
        return bool(target) or not source
    if target[0] in ("tools", "contrib"):
        return target == ("tools", "plan") and source[0] in ("tools", "contrib")
    return ROOMS.index(target[0]) < ROOMS.index(source[0])


def test_imports_are_found() -> None:
    assert "harness.train.engine" in imports_of("harness.train.trainer")
    assert "harness.train.trainer" in imports_of("harness.train.rank"), "an import inside of a function"
    assert "harness.train.steps" in imports_of("harness.train.rows"), "an import for type checkers"
    assert "harness.train.steps" not in imports_of("harness.train.rows", of_types=False)


def test_every_module_is_in_a_room() -> None:
    doors = [module for module in FILES if not room_of(module)]
    assert len(doors) <= 4, doors


def test_arrows_point_down() -> None:
    up = [
        f"{module} -> {imported}"
        for module in FILES
        for imported in imports_of(module)
        if not points_down(room_of(module), room_of(imported))
    ]
    assert not up, "\n".join(sorted(up))


def test_ranks_import_no_hydra() -> None:
    """A rank imports the rooms up to train, and no file of these names Hydra or its configurations."""
    named = re.compile(r"^\s*(?:from|import) (?:hydra|omegaconf)\b", re.MULTILINE)
    rooms = {room_of(module)[:1] for module, path in FILES.items() if named.search(path.read_text())}
    assert ("compose",) in rooms
    assert not rooms & {(room,) for room in ROOMS[: ROOMS.index("compose")]}


def test_no_circles() -> None:
    try:
        TopologicalSorter({module: imports_of(module, of_types=False) for module in FILES}).prepare()
    except CycleError as error:
        raise AssertionError(f"modules import each other: {' <- '.join(error.args[1])}") from None
