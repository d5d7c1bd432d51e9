"""What a test uses: the pool of ranks, a SLURM scheduler, or processes that it starts itself."""

import inspect
import sys
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import pytest

OURS = [Path(__file__).parents[1] / name for name in ("tests", "experiments")]
STARTERS = {
    "subprocess",
    "multiprocessing",
    "nbclient",
    "harness.launch.pool.RankPool",
    "harness.tools.inference.inference.run_on_ranks",
    "harness.tools.parity.parity.parity",
}
"""Modules, classes and functions that start processes."""


def uses(item):
    """Return the marks of a test: ``pool`` and ``slurm`` by its fixtures, ``process`` by all its code."""
    marks = [name for name in ("pool", "slurm") if name in getattr(item, "fixturenames", ())]
    if not marks and isinstance(item, pytest.Function):
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        code = (item.function, *(each.func for definitions in fixtures for each in definitions))
        if _starts_process(code):
            marks.append("process")
    return marks


@cache
def _starts_process(code):
    """Whether functions start processes; the rows of a table have the same."""
    todo = list(code)
    seen = set()
    while todo:
        value = todo.pop()
        if _full_name(value) in STARTERS:
            return True
        if id(value) not in seen and _is_ours(value):
            seen.add(id(value))
            todo += _parts(value)
    return False


def _parts(value):
    """Yield what a function names, or the functions of a class."""
    if isinstance(value, type):
        yield from (inspect.unwrap(getattr(part, "fget", part)) for part in vars(value).values())
    elif isinstance(value, FunctionType):
        names = set(_names(value.__code__))
        for found in (value.__globals__[name] for name in names & value.__globals__.keys()):
            yield inspect.unwrap(found) if callable(found) else found
            if isinstance(found, ModuleType):
                yield from (vars(found)[name] for name in names & vars(found).keys())


def _full_name(value):
    if isinstance(value, ModuleType):
        return value.__name__
    return (
        f"{value.__module__}.{value.__qualname__}" if isinstance(value, FunctionType | type) else ""
    )


def _names(code):
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_ours(value):
    """Whether a function, class or module is code of the tests or experiments."""
    if isinstance(value, FunctionType):
        file = value.__code__.co_filename
    else:
        module = sys.modules.get(value.__module__) if isinstance(value, type) else value
        file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
    return file is not None and _is_in_ours(file)


@cache
def _is_in_ours(file):
    return any(Path(file).is_relative_to(folder) for folder in OURS)
