"""Mixtures of small sources."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from pathlib import Path
from typing import Any

from loaders import streamed

from harness.config.data import DataConfig

WEIGHTS = {"code": 0.2, "math": 0.1, "web": 0.7}


def shares(weights: dict[str, float]) -> dict[str, Fraction]:
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    return {name: weight / sum(exact.values()) for name, weight in exact.items()}


def write_sources() -> None:
    for name, count in (("web", 30), ("code", 9), ("math", 5)):
        Path(name).mkdir(exist_ok=True)
        for i in range(count):
            Path(name, f"{i:02}.txt").write_text(f"{name}{i:02} " * (1 + i * i % 13))


def mixture(**changed: Any) -> DataConfig:
    write_sources()
    sources = {name: DataConfig(paths=[f"{name}/*.txt"]) for name in WEIGHTS}
    data = DataConfig(kind="mixture", sources=sources, weights=WEIGHTS, cache_dir="cache")
    return dataclasses.replace(data, **changed)


def with_stream(files: int) -> DataConfig:
    sources = {"web": DataConfig(paths=["web/*.txt"]), "c4": streamed(files)}
    return mixture(sources=sources, weights={"web": 1.0, "c4": 1.0})
