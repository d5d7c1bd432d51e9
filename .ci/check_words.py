"""Refuse habits of prose that make docstrings, errors and documentation hard to read.

    python .ci/check_words.py [PATH ...]        default: DEFAULT below

It reads docstrings, comments, string literals, Markdown outside of code blocks, and comments of YAML.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

HABITS = {
    "a relative clause where a noun would do": (
        r"\bwhat (?:is|was|has|had|becomes?|became|comes?|came|goes|went|they|it|a|an|the \w+) "
        r"(?:\w+ )?(?:of|with|there|then|anew)\b"
    ),
    "'become of'": r"\b(?:becomes?|became) of\b",
    "'told' or 'said'": r"\b(?:is|are|was|were|be) (?:told|said)\b",
    "'stands' or 'lies' for 'is'": r"\b(?:stands?|lies?) (?:in|beside|there|at|on)\b",
    "'come to'": r"\b(?:has|have|had) come to\b",
    "'whoever' for the caller": r"\b(?:whoever|for who|to who)\b",
    "an archaic word": r"\b(?:anew|dear|thereof|wherein|whither|for want of|last words|sees to it|of then)\b",
    "a chain of 'of'": r"\b(?:of those that|of what|out of which|from what|for what it)\b",
    "'settle', which had seven meanings": r"\bsettle[sd]?\b",
}
PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in HABITS.items()}
DEFAULT = (
    "harness",
    "experiments/extensions",
    "docs",
    "conf",
    "README.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
)


def main() -> int:
    """Print every place; return 1 if there is one."""
    roots = [Path(path) for path in sys.argv[1:] or DEFAULT]
    places = [
        f"{path}:{number}: {name}: {line.strip()}"
        for root in roots
        for path in files_of(root)
        for number, line in lines_of(path)
        for name, pattern in PATTERNS.items()
        if pattern.search(line)
    ]
    sys.stdout.write("".join(f"{place}\n" for place in places))
    return 1 if places else 0


def files_of(root: Path) -> list[Path]:
    """Return the files under a folder that people read, or the file itself."""
    if root.is_file():
        return [root]
    return sorted(path for path in root.rglob("*") if path.suffix in (".py", ".md", ".yaml"))


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of prose with their numbers."""
    text = path.read_text()
    if path.suffix == ".py":
        yield from _python(text)
    elif path.suffix == ".yaml":
        yield from ((n, line.partition("#")[2]) for n, line in enumerate(text.splitlines(), 1))
    else:
        yield from _markdown(text)


def _python(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        start = token.start[0]
        if token.type == tokenize.COMMENT:
            yield start, token.string
        elif token.type == tokenize.STRING:
            # An f-string has no value here; its source has its words.
            is_plain = "f" not in token.string.lower().partition(token.string[-1])[0]
            value = ast.literal_eval(token.string) if is_plain else token.string
            if isinstance(value, str):
                yield from enumerate(value.splitlines(), start)


def _markdown(text: str) -> Iterator[tuple[int, str]]:
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, line


if __name__ == "__main__":
    sys.exit(main())
