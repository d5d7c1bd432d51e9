"""Arrows point down: a room imports the rooms below it, and none above; nothing slow is imported early.

What is private in torch is listed with the versions in which it was read.
"""

import ast
import inspect
import pkgutil
import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch
from cases import words
from packaging.specifiers import SpecifierSet
from processes import python

sys.path.insert(0, str(Path(__file__).parents[1] / ".ci"))
from check_house import FILES, ROOMS, arrows_up, imports_of, room_of

# Packages that importing a module does not import. harness.train.process sets what torch reads once.
NOT_IMPORTED = {
    "harness.config.job": "torch hydra omegaconf",
    "harness.util.hardware": "torch",
    "harness.config.data": "torch numpy datasets sentencepiece tiktoken pyarrow",
    "harness.config.metrics": "torch wandb",
    "harness.train.rank": "torch",
    "harness.train.process": "torch",
    "harness.launch.train": "torch hydra omegaconf",
    "harness.launch.sweep.run": "torch hydra omegaconf",
}


@pytest.mark.parametrize("module", NOT_IMPORTED)
def test_importing_is_quick(module):
    listed = python("-c", f"import sys, {module}; print(*sys.modules)").stdout.split()
    assert module in listed and not set(NOT_IMPORTED[module].split()) & set(listed)


TINY = tuple(
    words("""
    train model=llama3_tiny data=synthetic tokenizer=bytes model.vocab_size=258 training.steps=1
    schedule.warmup_steps=0 cluster.device=cpu
""")
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
AT_START = """from harness.launch import local
local.Popen = stop"""
AT_FORWARD = """from torch import nn
call = nn.Module.__call__
nn.Module.__call__ = lambda self, *a, **k: (
    stop() if type(self).__name__ == "Decoder" else call(self, *a, **k)
)"""


def test_the_way_to_the_first_forward_pass_is_short(tmp_path):
    """Modules before the first rank starts; frames from the command to it, and from there to the model."""

    def seen(replace, *overrides):
        typed = [*TINY, f"runs_dir={tmp_path}", *overrides]
        lines = python("-c", STOP_AT.format(replace=replace), *typed).stdout.splitlines()
        return {
            line.split()[0]: line.split()[1:]
            for line in lines
            if line.startswith(("modules", "frames"))
        }

    started = seen(AT_START, "parallelism.dp_shard=2")
    assert len(started["modules"]) <= 69, started["modules"]
    rank = seen(AT_FORWARD)["frames"]
    # A rank that is a process of its own has two more: its module and main.
    frames = [*started["frames"], "<module>", "main", *rank[rank.index("run_rank") :], "forward"]
    # One of them is what training and evaluation share: the losses of a batch.
    assert len(frames) <= 20, frames


def test_arrows_point_down():
    up = arrows_up()
    assert not up, "\n".join(up)


def test_ranks_import_no_hydra():
    """A rank imports the rooms up to train, and no file of these names Hydra or its configurations."""
    named = re.compile(r"^\s*(?:from|import) (?:hydra|omegaconf)\b", re.MULTILINE)
    rooms = {
        room_of(module)[:1] for module, path in FILES.items() if named.search(path.read_text())
    }
    assert ("compose",) in rooms
    assert not rooms & {(room,) for room in ROOMS[: ROOMS.index("compose")]}


def test_no_circles():
    try:
        TopologicalSorter(
            {module: imports_of(module, of_types=False) for module in FILES}
        ).prepare()
    except CycleError as error:
        raise AssertionError(f"modules import each other: {' <- '.join(error.args[1])}") from None


PRIVATE = [
    (versions, owner, name)
    for line in Path(__file__).with_name("private_names.txt").read_text().splitlines()
    if not line.startswith("#")
    for versions, owner, *names in [line.split() if line[0] in "<>" else ("", *line.split())]
    for name in names
]
"""Versions of torch, or "" for all; owner and name."""


def private_names(tree):
    """Yield the full names of what a file imports from torch and torchao that is private."""
    known = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            known |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            known |= {each.asname: each.name for each in node.names if each.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            first, dot, rest = ast.unparse(node).partition(".")
            full = known.get(first, "") + dot + rest
            if re.fullmatch(r"torch(ao)?(\.\w+)*\._[a-zA-Z][\w.]*", full):
                yield full


def test_private_names_of_torch_are_listed():
    sources = [path.read_text() for path in FILES.values()]
    listed = [f"{owner}.{name}." for _, owner, name in PRIVATE]
    used = {f"{name}." for source in sources for name in private_names(ast.parse(source))}
    assert "torch._dynamo.reset." in used
    assert not {
        name for name in used if not any(a.startswith(name) or name.startswith(a) for a in listed)
    }
    everything = "\n".join(sources)
    assert not [
        name for *_, name in PRIVATE if not re.search(rf"\b{name.rpartition('.')[2]}\b", everything)
    ]


@pytest.mark.parametrize(("versions", "owner", "name"), PRIVATE)
def test_a_private_name_of_torch_exists(versions, owner, name):
    """Attributes of an object are looked for in the source of its class."""
    if not SpecifierSet(versions).contains(torch.__version__, prereleases=True):
        pytest.skip(f"a name of torch {versions}")
    above, _, last = f"{owner}.{name}".rpartition(".")
    found = pkgutil.resolve_name(above)
    assert hasattr(found, last) or (
        inspect.isclass(found) and re.search(rf"self\.{last}\b", inspect.getsource(found))
    ), f"{above} has no {last} in this version"
