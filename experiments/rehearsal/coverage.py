"""Measure how much of the code that only CUDA reaches is run by the tests that rehearse.

    .venv-rehearsal/bin/python experiments/rehearsal/coverage.py        runs them, and writes COVERAGE.md

A line counts as CUDA's if it calls ``torch.cuda``, or is in a branch that is taken on CUDA only
(``device.type == "cuda"``, ``is_cuda``). harness/rehearse itself is left out.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PACKAGE = ROOT / "harness"
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def main() -> None:
    """Run the tests with tracing, and write the table."""
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch) / "lines"
        paths = os.pathsep.join([str(FOLDER / "tracing"), str(ROOT)])
        environment = os.environ | {"HARNESS_TRACE": str(trace), "PYTHONPATH": paths}
        tests = [sys.executable, "-m", "pytest", "-q", "-m", "rehearsal", "tests/tools/rehearse"]
        subprocess.run(tests, cwd=ROOT, env=environment, check=True)
        ran: dict[Path, set[int]] = defaultdict(set)
        for line in trace.read_text().splitlines():
            file, _, number = line.rpartition(":")
            ran[Path(file).resolve()].add(int(number))
    total = 0
    missed: list[tuple[Path, int, str]] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if PACKAGE / "rehearse" in path.parents:
            continue
        source = path.read_text()
        for statement in cuda_statements(source):
            total += 1
            if not ran[path] & set(range(statement.lineno, last_line(statement) + 1)):
                missed.append(
                    (path.relative_to(ROOT), statement.lineno, source.splitlines()[statement.lineno - 1])
                )
    write(total, missed)


def cuda_statements(source: str) -> list[ast.stmt]:
    """Statements of a module that only CUDA reaches; the innermost ones."""
    found: dict[int, ast.stmt] = {}
    for parent in ast.walk(ast.parse(source)):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(parent, field, None)
            if isinstance(block, list):
                for statement in _of_block(block):
                    for inner in _innermost([statement]):
                        found[inner.lineno] = inner
    return [found[line] for line in sorted(found)]


def _of_block(block: Sequence[ast.AST]) -> Iterator[ast.stmt]:
    """Statements of one block that are CUDA's by themselves or by a test around or before them."""
    only_cuda = False
    for statement in block:
        if not isinstance(statement, ast.stmt):
            return
        if only_cuda:
            yield statement
            continue
        if isinstance(statement, ast.If):
            sense = _sense(statement.test)
            if sense is True:
                yield from statement.body
            elif sense is False:
                yield from statement.orelse
                only_cuda = isinstance(statement.body[-1], LEAVES)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        elif not hasattr(statement, "body") and "torch.cuda." in ast.unparse(statement):
            yield statement


def _sense(test: ast.expr) -> bool | None:
    """Whether a test holds on CUDA only (True), elsewhere only (False), or does not ask for the device."""
    text = ast.unparse(test)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return True if any(_sense(value) is True for value in test.values) else None
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _sense(test.operand)
        return None if inner is None else not inner
    if ".device " in text:
        return None  # a field of the job, which every machine can compose
    if "== 'cuda'" in text or text.endswith(".is_cuda") or text == "torch.cuda.is_available()":
        return True
    return False if "!= 'cuda'" in text or ("== 'cpu'" in text and "device" in text) else None


def _innermost(block: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in block:
        if isinstance(statement, ast.FunctionDef | ast.Pass | ast.Import | ast.ImportFrom):
            continue
        yield statement
        for field in ("body", "orelse", "finalbody"):
            yield from _innermost(getattr(statement, field, []))


def last_line(statement: ast.stmt) -> int:
    """Last line of a statement without its block."""
    body = getattr(statement, "body", None)
    return body[0].lineno - 1 if isinstance(body, list) and body else statement.end_lineno or statement.lineno


def write(total: int, missed: list[tuple[Path, int, str]]) -> None:
    """Write COVERAGE.md."""
    share = 1 - len(missed) / total
    lines = [
        "# Lines that only CUDA reaches\n",
        "Written by `coverage.py`: statements of harness/ that call `torch.cuda` or are in a branch for "
        "CUDA alone, and whether `make rehearse` runs them.\n",
        f"{total - len(missed)} of {total} statements run ({share:.0%}). The others:\n",
        *(f"* `{path}:{line}` `{text.strip()}`" for path, line, text in missed),
    ]
    (FOLDER / "COVERAGE.md").write_text("\n".join(lines) + "\n")
    sys.stdout.write(f"{share:.1%} of {total}\n")


if __name__ == "__main__":
    main()
