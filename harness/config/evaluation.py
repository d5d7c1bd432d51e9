"""Names of tasks, and rules of an evaluation's options. Imports no torch, and no job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.util.errors import ConfigError

DATA, JSONL, LM_EVAL = "data", ".jsonl", "lm_eval:"
SPLITS = ("validation", "train", "all")


def require_tasks(field: str, names: Sequence[str], *, lm_eval: bool) -> None:
    """Check that every name is a task, and that short names are distinct.

    Raises:
        ConfigError: one is not, or there is none.
    """
    kinds = f"{DATA}, FILE{JSONL}{f', {LM_EVAL}NAME' if lm_eval else ''}"
    if not names:
        raise ConfigError(field, "[]", "names no task", kinds)
    for name in names:
        if name != DATA and not name.endswith(JSONL) and not (lm_eval and is_lm_eval(name)):
            raise ConfigError(field, name, "no such task", kinds)
    shorts = [short_name(name) for name in names]
    for name, short in zip(names, shorts, strict=True):
        if shorts.count(short) > 1:
            raise ConfigError(field, name, f"two tasks are called {short}", "files with distinct names")


def require_stride(field: str, stride: int | None, window: int) -> None:
    """Raise ConfigError if windows would leave out tokens."""
    if stride is not None and stride > window:
        raise ConfigError(field, stride, f"exceeds the window of {window} tokens", f"at most {window}")


def is_lm_eval(name: str) -> bool:
    """Whether a task has the prefix of lm-evaluation-harness."""
    return name.startswith(LM_EVAL) and name != LM_EVAL


def short_name(name: str) -> str:
    """Name of a task in the names of metrics."""
    if name.startswith(LM_EVAL):
        return name.removeprefix(LM_EVAL)
    return Path(name).stem.replace(".", "_")
