"""Hold the tree of ``harness/`` against the floor plan: rooms, arrows, sizes in tokens, and dense habits.

    python .ci/check_house.py            tables; exit code 1 if anything is off
    python .ci/check_house.py --habits   the same, with every place of every habit

A room may import the rooms below it, never one above it. Imports inside functions and under
``TYPE_CHECKING`` count: whoever reads a file has to know what it names. Rooms of ``tools`` and ``contrib``
may not import each other, except for ``plan``, which the others may read. Files in ``harness/`` are doors
and may import everything.

Size is counted in tokens: names, operators, numbers and strings. Docstrings, comments, blank lines and line
breaks are free, so a statement on a line of its own costs nothing, and packing two into one saves nothing.
A habit is a form that saves lines and costs the reader a second look. Each has a ceiling.

A room may be 3 % over its budget. A feature that needs more deletes something, or changes the budget in a
commit of its own that says why.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# From the ground up, with budgets of tokens. They go down with every deletion.
BUDGETS = {
    "util": 7_700,
    "config": 33_200,
    "data": 30_600,
    "model": 27_900,
    "metrics": 7_150,
    "run": 3_720,
    "precision": 3_330,
    "parallelism": 22_600,
    "optimizer": 9_600,
    "checkpoint": 13_850,
    "weights": 25_300,
    "train": 28_100,
    "compose": 18_000,
    "launch": 31_600,
    "tools": 98_200,
    "contrib": 3_380,
}
SLACK = 1.03
HARNESS_AT_MOST = 366_000
TESTS_AT_MOST = 271_500
DOORS_AT_MOST = 4
# The most places of a habit in harness/. In brackets: well-kept projects, for a tree of this size.
HABITS = {
    "star of a literal": 4,  # *("a", b) [0]
    "conditional expression inside another": 4,  # a if b else c if d else e [0 to 6]
    "comparison as a factor": 3,  # size * (a > 1) [0 to 2]
    "conditional callee": 0,  # (f if a else g)(x) [0]
    "augmented by a conditional": 8,  # x |= a if b else c [0 to 4]
    "tuple assignment of a display": 160,  # a, b = c, d [30 to 110]
    "comprehension inside another, or with two loops": 90,  # [13 to 68]
    "lambda that assigns": 0,  # lambda: d.__setitem__(...) [0]
    "line over 100 columns": 1_100,  # 2 % of the lines [0.4 to 5 %]
}
TOKENS = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
# From Python 3.12 on an f-string is several tokens; its beginning and its texts count.
TOKENS |= {
    getattr(tokenize, name)
    for name in ("FSTRING_START", "FSTRING_MIDDLE")
    if hasattr(tokenize, name)
}
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
ROOMS = tuple(BUDGETS)
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
        if (
            isinstance(child, ast.If)
            and ast.unparse(child.test) == "TYPE_CHECKING"
            and not of_types
        ):
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


def tokens_of(paths: list[Path]) -> int:
    """Tokens of files, without docstrings and comments."""
    total = 0
    for path in paths:
        text = path.read_text()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            total += token.type in TOKENS
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, DEFINITIONS):
                total -= sum(_is_text(statement) for statement in node.body)
    return total


def _is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a string on its own: a docstring of a module, class, function or field."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def habits_of(node: ast.AST) -> Iterator[str]:
    """Yield the names of the habits that a node shows."""
    if isinstance(node, ast.Starred) and isinstance(node.value, (ast.Tuple, ast.List)):
        yield "star of a literal"
    if isinstance(node, ast.IfExp):
        parts = (node.body, node.orelse, node.test)
        if any(isinstance(part, ast.IfExp) for part in parts):
            yield "conditional expression inside another"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors = (node.left, node.right)
        if any(isinstance(factor, (ast.Compare, ast.BoolOp)) for factor in factors):
            yield "comparison as a factor"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.IfExp):
        yield "conditional callee"
    if isinstance(node, ast.AugAssign) and isinstance(node.value, ast.IfExp):
        yield "augmented by a conditional"
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    ):
        yield "tuple assignment of a display"
    if isinstance(node, COMPREHENSIONS):
        has_inner = any(
            isinstance(child, COMPREHENSIONS) for child in ast.walk(node) if child is not node
        )
        if has_inner or len(node.generators) > 1:
            yield "comprehension inside another, or with two loops"
    if isinstance(node, ast.Lambda) and "__setitem__" in ast.unparse(node):
        yield "lambda that assigns"


def places_of_habits() -> dict[str, list[str]]:
    """Every place of every habit, as ``path:line``."""
    places: dict[str, list[str]] = {name: [] for name in HABITS}
    for path in FILES.values():
        name = path.relative_to(ROOT)
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            for habit in habits_of(node):
                places[habit].append(f"{name}:{node.lineno}")
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > 100:
                places["line over 100 columns"].append(f"{name}:{number}")
    return places


def main() -> int:
    rooms: dict[str, list[Path]] = {room: [] for room in ROOMS}
    doors = []
    for module, path in FILES.items():
        room = room_of(module)
        if room:
            rooms[room[0]].append(path)
        else:
            doors.append(path)
    rows = [(room, tokens_of(paths), int(SLACK * BUDGETS[room])) for room, paths in rooms.items()]
    rows.append(("doors, files", len(doors), DOORS_AT_MOST))
    rows.append(("harness", tokens_of([*FILES.values()]), HARNESS_AT_MOST))
    rows.append(("tests", tokens_of([*(ROOT / "tests").rglob("*.py")]), TESTS_AT_MOST))
    places = places_of_habits()
    rows += [(habit, len(places[habit]), most) for habit, most in HABITS.items()]
    rows.append(("arrows that point up", len(arrows_up()), 0))
    for name, count, most in rows:
        print(f"{name:<48}{count:>8,} of {most:>7,}{'  too many' if count > most else ''}")
        if "--habits" in sys.argv:
            print(*(f"  {place}" for place in places.get(name, [])), sep="\n")
    print(*arrows_up(), sep="\n")
    return int(any(count > most for _, count, most in rows))


if __name__ == "__main__":
    sys.exit(main())
