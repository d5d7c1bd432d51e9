"""Save the batch and the gradient norms of a step whose loss or gradients are not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

import torch

from harness.data.loader import Batch
from harness.loop.engine import StepOutcome


def save_evidence(
    folder: Path, rank: int, step: int, outcome: StepOutcome, batch: Batch, names: Iterable[str]
) -> str:
    """Write ``step<step>-rank<rank>.pt`` (this rank's rows) and ``.json`` (gradients that are not finite).

    The gradients themselves may be freed by now; this rank's share of each norm is still known.

    Returns:
        A message: where the files are, or why they could not be written. A full disk must not hide that the
        numbers were not finite.
    """
    wrong = [
        {"parameter": name, "norm": str(square**0.5)}
        for name, square in zip(names, outcome.squares.tolist(), strict=True)
        if not math.isfinite(square)
    ]
    stem = folder / f"step{step}-rank{rank}"
    row = {
        "step": step,
        "rank": rank,
        "loss": str(outcome.loss),
        "grad_norm": str(outcome.grad_norm),
        "gradients": wrong,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stem.with_suffix(".json").write_text(json.dumps(row, indent=2) + "\n")
        tensors = {"inputs": batch.inputs_BT, "labels": batch.labels_BT, "documents": batch.documents_BT}
        torch.save(
            {name: tensor.cpu() for name, tensor in tensors.items() if tensor is not None},
            stem.with_suffix(".pt"),
        )
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
        return f"evidence could not be saved: {error}"
    return f"evidence in {folder}"
