"""The rows of torchtitan's tables of December 2024, each with the overrides that make its job.

Figures come from ``experiments/llama3_h100/published.csv``. What the tables leave open is as torchtitan had
it then: the loss was not compiled ("causes CUDA errors, turning off for now", train.py), and a pipeline whose
microbatches are not said ran as many as it has ranks (pipeline_parallel_microbatches), so those of table 5
are of four sequences each. Throughput says the same: interleaving gains 28 %, which is what 8 microbatches
over 8 ranks give, (8 + 7) / (8 + 7 / 2) = 1.30; with 32 of one sequence it would be 1.10.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

CSV = Path(__file__).resolve().parents[2] / "experiments" / "llama3_h100" / "published.csv"

RECIPE = (
    *("data=synthetic", "tokenizer=bytes", "checkpoint=disabled", "cluster=slurm", "precision=bf16"),
    *("cluster.ranks_per_node=8", "model.max_seq_len=262144", "training.steps=1000"),
)
FLOAT8 = (
    "precision=float8_tensorwise",
    "precision.enable_fsdp_float8_all_gather=true",
    "precision.precompute_float8_dynamic_scale_for_fsdp=true",
)
COMPILE = ("compile=on", "compile.components=[blocks]")
MODELS = {"llama3.1-8B": "llama3_8b", "llama3.1-70B": "llama3_70b", "llama3.1-405B": "llama3_405b"}
DEGREES = {"FSDP": "dp_shard", "TP": "tp", "PP": "pp", "CP": "cp"}
RECOMPUTED = {"selective": "selective_op", "full": "full"}


@dataclass(frozen=True)
class Row:
    """One published row."""

    name: str
    overrides: tuple[str, ...]
    memory_gib: float
    tps: float
    """Tokens per second and GPU."""


def _row(line: dict[str, str]) -> Row:
    degrees = dict(_degree(word) for word in line["parallel_layout"].split())
    batch = int(line["local_batch_size"])
    overrides = [
        *RECIPE,
        f"model={MODELS[line['model']]}",
        f"training.seq_len={line['seq_len']}",
        f"training.local_batch_size={batch}",
        f"training.global_batch_size={batch * degrees['dp_shard']}",
        f"activation_checkpoint={RECOMPUTED[line['ac_mode']]}",
        *(f"parallelism.{axis}={degree}" for axis, degree in degrees.items()),
    ]
    overrides += FLOAT8 if line["quantization"] == "float8_tensorwise" else ()
    overrides += COMPILE if line["compile"] == "yes" else ()
    overrides += ["parallelism.async_tp=true"] if line["async_tp"] == "yes" else []
    if "pp" in degrees:
        overrides += [
            f"parallelism.pp_schedule={line['pp_schedule']}",
            f"parallelism.pp_microbatch_size={batch // degrees['pp']}",
        ]
    words = [line["model"].removeprefix("llama3.1-"), line["parallel_layout"], line["seq_len"]]
    words += [line["quantization"], "compile" if line["compile"] == "yes" else "eager"]
    words += ["async"] * (line["async_tp"] == "yes") + [line["pp_schedule"]] * bool(line["pp_schedule"])
    return Row(" ".join(words), tuple(overrides), float(line["memory_gib"]), float(line["tps_per_gpu"]))


def _degree(word: str) -> tuple[str, int]:
    letters = word.rstrip("0123456789")
    return DEGREES[letters], int(word[len(letters) :])


with CSV.open(newline="") as _file:
    ROWS = [_row(line) for line in csv.DictReader(_file)]
