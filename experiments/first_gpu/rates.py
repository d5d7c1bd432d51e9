"""What a device can do, and updates alone: rows of JSON on standard output.

    python experiments/first_gpu/rates.py ceilings   # GB/s of a copy, TFLOP/s of products in bfloat16
    python experiments/first_gpu/rates.py updates    # AdamW, 8-bit AdamW and Muon beside torch's

With ``--tiny`` as second word all sizes are small, for a trial on a CPU.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "measure"))

import torch
from muon_update import clock, ours, parameters_of, torchs

from harness.compose.composer import compose_job
from harness.model.spec import tensors

ROUNDS = 5
CALLS = 10
PRODUCTS = ((8192, 8192, 8192), (8192, 4096, 14336), (8192, 14336, 4096), (8192, 4096, 128256))
"""Rows, inner length and columns: a square, and products of 8B at a sequence of 8,192."""


def seconds_of(call: Callable[[], Any]) -> float:
    """Median seconds of a call, of rounds of several; two that come before do not count."""
    call()
    call()
    taken = []
    for _ in range(ROUNDS):
        began = clock()
        for _ in range(CALLS):
            call()
        taken.append((clock() - began) / CALLS)
    return statistics.median(taken)


def ceilings(device: str, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the speed of a copy within the device's memory, and of products in bfloat16."""
    source = torch.ones(2**20 if tiny else 2**30, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    taken = seconds_of(partial(target.copy_, source))
    yield {"point": "copy", "gb_per_second": 2 * source.nbytes / taken / 1e9}
    del source, target
    for rows, inner, columns in PRODUCTS[:1] if tiny else PRODUCTS:
        if tiny:
            rows, inner, columns = 128, 128, 128
        left = torch.randn(rows, inner, dtype=torch.bfloat16, device=device)
        right = torch.randn(columns, inner, dtype=torch.bfloat16, device=device)
        out = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        taken = seconds_of(partial(torch.mm, left, right.T, out=out))
        found = 2 * rows * inner * columns / taken / 1e12
        yield {"point": f"product {rows} x {inner} x {columns}", "tflops": found}


def updates(device: str, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the time of an update of the matrices of two layers of 8B by ours, and by torch's."""
    torch.set_default_device(device)
    model = "llama3_tiny" if tiny else "llama3_8b"
    words = [f"model={model}", "model.n_layers=2", "data=synthetic", "tokenizer=bytes"]
    for kind, more in (("adamw", []), ("adamw", ["optimizer.state_dtype=8bit"]), ("muon", [])):
        job = compose_job([*words, f"optimizer={kind}", f"cluster.device={device}", *more])
        specs = {name: spec for name, spec in tensors(job.model).items() if spec.is_hidden_matrix}
        narrow: dict[str, Any] = {"newton_schulz_dtype": "bfloat16"} if kind == "muon" else {}
        row: dict[str, Any] = {"point": " ".join(["update,", kind, *(["8bit"] if more else [])])}
        row["update_seconds"] = seconds_of(ours(job.optimizer, specs, **narrow))
        row["bare.update_seconds"] = seconds_of(
            torchs(job.optimizer, specs) if kind == "muon" else torchs_adamw(job.optimizer, specs)
        )
        row["parameters"] = sum(spec.size for spec in specs.values())
        yield row


def torchs_adamw(config: Any, specs: Any) -> Callable[[], None]:
    """The step of torch's fused AdamW, whose state is float32, with the same settings."""
    plain = replace(config, state_dtype=None)
    parameters = list(parameters_of(specs).values())
    betas = (plain.beta1, plain.beta2)
    optimizer = torch.optim.AdamW(parameters, lr=plain.lr, betas=betas, fused=True)
    return lambda: optimizer.step()


def main() -> None:
    """Print the rows of one kind."""
    kinds = {"ceilings": ceilings, "updates": updates}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for row in kinds[sys.argv[1]](device, tiny="--tiny" in sys.argv):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
