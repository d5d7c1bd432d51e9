"""Read loss curves of finished runs from their run folders. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.metrics.jsonl import read_metrics
from harness.run.folder import RunFolder
from harness.tools.study.converge.judge import Curves, Losses
from harness.tools.study.converge.points import Technique


@dataclass(frozen=True)
class Found:
    """Curves of a technique, and the runs without one.

    Attributes:
        curves: losses and gradient norms of the completed runs.
        missing: reason for each seed without a curve.
        has_failed: whether any of these runs ended with an error.
    """

    curves: Curves
    missing: dict[int, str]
    has_failed: bool


def read_curves(technique: Technique, control: Curves | None = None) -> Found:
    """Read the curves of a technique.

    Args:
        technique: the technique.
        control: curves to pair them with: others of the same steps and seeds count as missing. None reads the
            control itself, whose curves must have the steps of the first.

    Raises:
        UserError: a file of metrics is damaged.
    """
    steps = None if control is None else control.steps.tolist()
    losses: dict[int, Losses] = {}
    norms: dict[int, Losses] = {}
    missing: dict[int, str] = {}
    has_failed = False
    for seed, run in technique.runs.items():
        folder = RunFolder(run.job.run_dir)
        row = folder.row
        if row.get("exit_reason") != "completed":
            missing[seed] = _reason(row) or folder.state or "not started"
            has_failed |= row.get("exit_reason") == "failed"
            continue
        rows = [each for each in read_metrics(folder.path / "metrics.jsonl") if "loss" in each]
        values = np.array([each["loss"] for each in rows], np.float64)
        steps = [each["step"] for each in rows] if steps is None else steps
        if [each["step"] for each in rows] != steps:
            missing[seed] = "metrics.jsonl does not have the steps of the control"
        elif not np.isfinite(values).all():
            missing[seed], has_failed = "a loss is not finite", True
        elif control is not None and seed not in control.losses:
            missing[seed] = "the control has no curve of this seed"
        else:
            losses[seed] = values
            own = np.array([each["grad_norm"] for each in rows], np.float64)
            if np.isfinite(own).all() and own.all():  # a skipped step may have no finite norm
                norms[seed] = own
    same = not technique.differs_in
    return Found(Curves(np.array(steps or [], np.int64), losses, same, norms), missing, has_failed)


def _reason(row: dict[str, Any]) -> str:
    """Return the class and message of a run's error, or how it ended; empty without a row."""
    message = " ".join(str(row.get("error.message", "")).split())
    return ": ".join(part for part in (row.get("error.kind", row.get("exit_reason", "")), message) if part)
