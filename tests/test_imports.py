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


TINY = (
    *("train", "model=llama3_tiny", "data=synthetic", "tokenizer=bytes", "model.vocab_size=258"),
    *("training.steps=1", "schedule.warmup_steps=0", "cluster.device=cpu"),
)
# Print the harness's modules, and the harness's frames of the main thread, in place of a function.
STOP_AT = """
import os, runpy, sys, threading, traceback
from pathlib import Path

def stop(*_, **__):
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
    here = str(Path("harness").resolve())
    print("modules", *(name for name in sys.modules if name.split(".")[0] == "harness"))
    print("frames", *(frame.name for frame in stack if frame.filename.startswith(here)), flush=True)
    os._exit(0)

{replace}
runpy.run_module("harness", run_name="__main__", alter_sys=True)
"""
AT_START = """from torch.distributed.elastic import multiprocessing
multiprocessing.start_processes = stop"""
AT_FORWARD = """from torch import nn
call = nn.Module.__call__
nn.Module.__call__ = lambda self, *a, **k: (
    stop() if type(self).__name__ == "Decoder" else call(self, *a, **k)
)"""


def test_the_way_to_the_first_forward_pass_is_short(tmp_path: Path) -> None:
    """Modules before the first rank starts; frames from the command to it, and from there to the model."""

    def seen(replace: str, *overrides: str) -> dict[str, list[str]]:
        typed = [*TINY, f"runs_dir={tmp_path}", *overrides]
        lines = python("-c", STOP_AT.format(replace=replace), *typed).stdout.splitlines()
        return {line.split()[0]: line.split()[1:] for line in lines if line.startswith(("modules", "frames"))}

    started = seen(AT_START, "parallelism.dp_shard=2")
    assert len(started["modules"]) <= 60, started["modules"]
    rank = seen(AT_FORWARD)["frames"]
    # A rank that is a process of its own has two more: its module and main.
    frames = [*started["frames"], "<module>", "main", *rank[rank.index("run_rank") :], "forward"]
    assert len(frames) <= 18, frames


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
