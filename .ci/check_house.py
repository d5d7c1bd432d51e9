"""Hold the tree of ``harness/`` against the floor plan: rooms, arrows, budgets of lines and files.

    python .ci/check_house.py            a table; exit code 1 if anything is off

A room may import the rooms below it, never one above it. Imports inside functions and under
``TYPE_CHECKING`` count: whoever reads a file has to know what it names. Rooms of ``tools`` and ``contrib``
may not import each other, except for ``plan``, which the others may read. Files in ``harness/`` are doors
and may import everything.

A feature that needs more lines than its room has left deletes others, or changes a budget here and says why.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# From the ground up, with budgets of lines. They go down with every deletion.
BUDGETS = {
    "util": 1306,
    "config": 4698,
    "data": 5190,
    "model": 2573,
    "metrics": 1406,
    "run": 590,
    "precision": 600,
    "parallelism": 2617,
    "optimizer": 1322,
    "checkpoint": 2146,
    "weights": 3189,
    "train": 3509,
    "compose": 2840,
    "launch": 4535,
    "tools": 15496,
    "contrib": 4450,
}
ROOMS = tuple(BUDGETS)
DOORS, FILES_AT_MOST, LINES_AT_MOST, TESTS_AT_MOST = 4, 278, 56_510, 35_722
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "harness").rglob("*.py"))
}


@cache
def imports_of(module: str, *, of_types: bool = True) -> frozenset[str]:
    """Modules of the harness that a module imports, also inside of functions.

    Args:
        module: its name.
        of_types: whether to count what only type checkers see.
    """
    found = set()
    for node in _nodes(ast.parse(FILES[module].read_text()), of_types=of_types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import module` imports a module, `from module import name` does not.
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else node.module for name in names}
    return frozenset(found & FILES.keys())


def _nodes(tree: ast.AST, *, of_types: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING" and not of_types:
            continue
        yield child
        yield from _nodes(child, of_types=of_types)


def room_of(module: str) -> tuple[str, ...]:
    """The room of a module, and its own name in ``tools`` and ``contrib``; empty for a door."""
    _, *parts = module.split(".")
    if not parts or parts[0] not in ROOMS:
        return ()
    return tuple(parts[:2]) if parts[0] in ("tools", "contrib") else (parts[0],)


def points_down(source: tuple[str, ...], target: tuple[str, ...]) -> bool:
    """Whether a room may import another."""
    if source == target or not source or not target:
        return bool(target) or not source
    if target[0] in ("tools", "contrib"):
        return target == ("tools", "plan") and source[0] in ("tools", "contrib")
    return ROOMS.index(target[0]) < ROOMS.index(source[0])


def arrows_up() -> list[str]:
    """Imports that the plan does not allow, as ``module -> module``."""
    return [
        f"{module} -> {imported}"
        for module in FILES
        for imported in sorted(imports_of(module))
        if not points_down(room_of(module), room_of(imported))
    ]


def lines_of(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def main() -> int:
    counts = [
        (room, lines_of([path for module, path in FILES.items() if room_of(module)[:1] == (room,)]), budget)
        for room, budget in BUDGETS.items()
    ]
    doors = [path for module, path in FILES.items() if not room_of(module)]
    counts += [
        ("doors, files", len(doors), DOORS),
        ("harness, files", len(FILES), FILES_AT_MOST),
        ("harness, lines", lines_of([*FILES.values()]), LINES_AT_MOST),
        ("tests, lines", lines_of([*(ROOT / "tests").rglob("*.py")]), TESTS_AT_MOST),
        ("arrows that point up", len(arrows_up()), 0),
    ]
    for name, count, most in counts:
        print(f"{name:<22}{count:>8,} of {most:>6,}{'  too many' if count > most else ''}")
    print(*arrows_up(), sep="\n")
    return int(any(count > most for _, count, most in counts))


if __name__ == "__main__":
    sys.exit(main())
