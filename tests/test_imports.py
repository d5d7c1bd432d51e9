"""Imports point one way; code that trains imports no tools, and nothing imports slow packages early."""

from __future__ import annotations

import ast
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
# Tools that plan, compare and report jobs. They import what trains, never the reverse.
TOOLS = ("bench", "compositions", "converge", "coordcheck", "parity", "plan", "rehearse", "report", "sweep")
# Imports by what trains that are needed nevertheless, with the reason.
NEEDED = {
    ("harness.train", "harness.launch.sweep.run"): "harness.train -m starts the jobs of a sweep",
    ("harness.train", "harness.launch.sweep.sweepers"): "with hydra/sweeper=optuna it runs a study",
}


# Packages that importing a module does not import. harness.train.process sets what torch reads once.
NOT_IMPORTED = {
    "harness.config.job": "torch hydra omegaconf",
    "harness.util.hardware": "torch",
    "harness.data": "torch numpy datasets sentencepiece tiktoken pyarrow",
    "harness.metrics": "torch rich wandb",
    "harness.train.rank": "torch",
    "harness.train.process": "torch",
}


@pytest.mark.parametrize("module", NOT_IMPORTED)
def test_importing_is_quick(module: str) -> None:
    listed = python("-c", f"import sys, {module}; print(*sys.modules)").stdout.split()
    assert module in listed and not set(NOT_IMPORTED[module].split()) & set(listed)


def is_tool(module: str) -> bool:
    return module.split(".")[1:2] != [] and module.split(".")[1] in TOOLS


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes, except those that only type checkers see."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from nodes(child)


@cache
def imports_of(module: str) -> frozenset[str]:
    """Modules of the harness that a module imports, also inside of functions."""
    found = set()
    for node in nodes(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import module` imports a module, `from module import name` does not.
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else node.module for name in names}
    return frozenset(found & FILES.keys())


def test_imports_are_found() -> None:
    assert "harness.train.engine" in imports_of("harness.train.trainer")
    assert "harness.train.trainer" in imports_of("harness.train.rank"), "an import inside of a function"
    assert "harness.train.steps" not in imports_of("harness.metrics.rows"), "an import for type checkers"


def test_no_circles() -> None:
    try:
        TopologicalSorter({module: imports_of(module) for module in FILES}).prepare()
    except CycleError as error:
        raise AssertionError(f"modules import each other: {' <- '.join(error.args[1])}") from None


def test_what_trains_imports_no_tools() -> None:
    upward = {
        (module, imported)
        for module in FILES
        for imported in imports_of(module)
        if is_tool(imported) and not is_tool(module)
    }
    assert upward == NEEDED.keys()


def test_tools_import_each_other_one_way() -> None:
    """Only the ``__main__`` of a verb may use every tool: ``harness plan rehearse=true`` rehearses."""
    packages: dict[str, set[str]] = {tool: set() for tool in TOOLS}
    for module in FILES:
        if is_tool(module) and not module.endswith(".__main__"):
            tool = module.split(".")[1]
            packages[tool] |= {each.split(".")[1] for each in imports_of(module) if is_tool(each)} - {tool}
    try:
        TopologicalSorter(packages).prepare()
    except CycleError as error:
        raise AssertionError(f"tools import each other: {' <- '.join(error.args[1])}") from None
    assert not packages["plan"]
