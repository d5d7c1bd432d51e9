"""How a column of ``metrics.jsonl`` or ``result.json`` is declared: beside the code that makes its value.

``harness/train/rows.py`` gathers the declarations. The console and the documentation follow them,
and a test compares them with what runs write. Imports no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """One column.

    Attributes:
        name: key in the row; ``loss.*`` stands for all keys with that prefix.
        unit: unit, or type where there is no unit.
        text: meaning, in one sentence.
        when: condition under which the row has it; empty means always.
        line: how a line of the console shows it: a format of the value (and of ``rest``, what ``*``
            stands for), or a function; empty: not at all.
        in_summary: whether the console shows it at the end of a run.
    """

    name: str
    unit: str
    text: str
    when: str = ""
    line: str | Callable[[Any], str] = ""
    in_summary: bool = False

    def format(self, key: str, value: Any) -> str:
        """Return the text on a line of the console for the value of ``key``."""
        if callable(self.line):
            return self.line(value)
        return self.line.format(value, rest=key.removeprefix(self.name.removesuffix("*")))
