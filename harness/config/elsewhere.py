"""What other tools call a field, an option or a setting of Hydra, and what to type here.

``elsewhere.txt`` has the names, of which refusals and the tables of docs/coming_from.md are made.
It is read when something is refused.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

from harness.config.fields import allows
from harness.config.job import Job
from harness.util.words import words_of

HYDRA = "Hydra"
"""The section of the file with settings that have no effect here."""
OTHERS = "Others"
"""The section with names that belong to no tool."""
ANOTHER = ("eval", "val", "test")
"""Beginnings of sections in which a name means another thing: the batch of a validation."""


@dataclass(frozen=True)
class Row:
    """A name elsewhere.

    Attributes:
        tool: the tool that has it.
        typed: the name, or the name with one of its values.
        here: what takes its place: overrides, of which fields alone get the typed value; ``-`` if
            there is no such thing.
        note: what else has to be known.
    """

    tool: str
    typed: str
    here: str
    note: str = ""

    def answer(self, value: str | None, schema: type, tool: str) -> str:
        """Return the rule of a refusal that calls it a name of ``tool``, and what would work."""
        rule = "no such name here" if tool == OTHERS else f"is {tool}'s name"
        if tool == HYDRA:
            rule = "has no effect, because Hydra only composes here"
        if self.here == "-":
            return f"{rule}, and has no counterpart; {self.note}"
        parts = self.here.split()
        for index, part in enumerate(parts):
            if value is not None and self.takes_value(part):
                parts[index] = f"{part}={value if allows(schema, part, value) else 'VALUE'}"
        note = f" ({self.note})" if self.note else ""
        return f"{rule}; would work: {' '.join(parts)}{note}"

    def takes_value(self, part: str) -> bool:
        """Whether a part of ``here`` is a field alone."""
        return not ("=" in part or part.startswith("-") or self.here.startswith("--help"))


@functools.cache
def rows() -> list[Row]:
    """Return the rows of the file, in order."""
    lines = Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines()
    return [Row(*line.split(" | ")) for line in lines if line and not line.startswith("#")]


def answer(key: str, value: str | None, schema: type, *, is_field: bool = False) -> str:
    """Return what a refusal says of a name elsewhere, in any case and order of words; nothing if it is none.

    Args:
        key: the name.
        value: what was typed for it.
        schema: dataclass of the job.
        is_field: whether a field here has the last part of the name. Without one this part is
            looked up alone, and then the parts before it.
    """
    if not issubclass(schema, Job):
        return ""
    table = {_words(row.typed): row for row in reversed(rows())}
    found = table.get(_words(f"{key}={value}")) or table.get(_words(key))
    if found or is_field:
        return found.answer(value, schema, found.tool) if found else ""
    section, _, last = key.replace("/", ".").rpartition(".")
    if "." not in section and not section.startswith(ANOTHER):
        for typed in (f"{last}={value}", last):
            ends = [row for row in rows() if _words(_end(row)) == _words(typed)]
            if len({row.here for row in ends}) == 1:
                return ends[0].answer(value, schema, OTHERS)
    while section and not found:
        found = table.get(_words(section))
        section = section.rpartition(".")[0]
    return found.answer(None, schema, found.tool) if found else ""


def _words(typed: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    name, _, value = typed.partition("=")
    return words_of(name), words_of(value)


def _end(row: Row) -> str:
    """The last part of a row's name with its value; empty if it says too little without its section."""
    name, is_value, value = row.typed.partition("=")
    section, _, last = name.rpartition(".")
    is_clear = row.tool != HYDRA and (not section or len(words_of(last)) > 1)
    return f"{last}{is_value}{value}" if is_clear else ""
