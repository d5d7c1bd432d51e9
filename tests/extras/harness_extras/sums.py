"""A data source: sums of two numbers as text. Documents are tokenized and cached like those of files."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from harness.config.data import DataConfig
from harness.config.data_kinds import DataKind
from harness.config.fields import numerics
from harness.data.documents import Span, cut

BYTES_OF_A_SUM = 12


@dataclass(frozen=True)
class SumsOptions:
    """Fields of ``data.options``."""

    largest: int = numerics(99, least=9, most=9999)
    """Largest number that is added."""


class Sums:
    """Document ``a * (largest + 1) + b`` is "a+b=c"."""

    without_tokens = "has no sums"

    def __init__(self, config: DataConfig, split: str) -> None:
        self.config, self.name = config, f"data.kind=sums, {split}"
        self.numbers = SumsOptions(**config.options).largest + 1

    @property
    def identity(self) -> Any:
        return ["sums", self.numbers]

    @property
    def reading(self) -> list[Any]:
        return [self.identity]

    def contents(self, spans: Iterable[Span]) -> Any:
        return [[span.begin, span.end] for span in spans]

    def spans(self, unit_bytes: int) -> Iterator[Span]:
        count = self.numbers**2
        return cut(self.name, count, count * BYTES_OF_A_SUM, unit_bytes)

    def read(self, span: Span) -> Iterator[str]:
        for index in range(span.begin, self.numbers**2 if span.end is None else span.end):
            a, b = divmod(index, self.numbers)
            yield f"{a}+{b}={a + b}\n"

    def documents(self) -> Iterator[str]:
        for a, b in product(range(self.numbers), repeat=2):
            yield f"{a}+{b}={a + b}\n"


SUMS = DataKind("harness_extras.sums:Sums", options=SumsOptions)
