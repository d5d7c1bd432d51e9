"""What is kept when a loss or a gradient is not finite."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.data.loader import Batch
from harness.loop.engine import StepOutcome


def save_evidence(
    folder: Path,
    rank: int,
    step: int,
    outcome: StepOutcome,
    batch: Batch,
    named: Iterable[tuple[str, Tensor]],
) -> str:
    """Writes ``step<step>-rank<rank>.pt`` (this rank's rows) and ``.json`` (which gradients went wrong).

    Returns:
        where it lies, or why it could not be kept: a full disk must not hide that the numbers went wrong.
    """
    wrong = []
    for name, parameter in named:
        if parameter.grad is None:
            continue
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        bad = int((~torch.isfinite(gradient)).sum())
        if bad:
            wrong.append({"parameter": name, "non_finite": bad, "of": gradient.numel()})
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
        return f"evidence could not be kept: {error}"
    return f"evidence in {folder}"
