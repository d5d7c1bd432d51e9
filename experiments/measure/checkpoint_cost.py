"""Saving and loading checkpoints against bare DCP on the same state, and how long an async save stalls.

    python experiments/measure/checkpoint_cost.py --rounds 5

Ranks are processes of this machine (gloo), sharded by FSDP. In every round the two sides take turns, three
each, of which the quickest counts; ratios are taken within a round. Prints medians and ranges.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from harness.checkpoint.load import CheckpointLoader
from harness.checkpoint.optimizer_state import allocate_optimizer_state, optimizer_state
from harness.checkpoint.save import Saver
from harness.checkpoint.state import RankGroup, model_state
from harness.compose.composer import compose_job
from harness.config.fields import with_value
from harness.config.job import Job
from harness.data.tokenizer import build_tokenizer
from harness.launch.pool import RankPool
from harness.train.engine import Engine
from harness.train.objective import loader_of
from harness.train.setup import set_up_process
from harness.weights import huggingface

TURNS = 3
JOB = [
    *(
        "model=llama3_debug",
        "model.dim=768",
        "model.n_layers=12",
        "model.n_heads=12",
        "model.n_kv_heads=12",
    ),
    *("model.ffn_hidden_dim=2048", "model.vocab_size=32000", "data=synthetic", "tokenizer=bytes"),
    *(
        "training.seq_len=128",
        "training.global_batch_size=8",
        "training.steps=1000",
        "cluster.device=cpu",
    ),
    *("parallelism=fsdp", "metrics.console=none", "checkpoint.keep_latest_k=0"),
]


def measure(job_json: str, folder: str, rounds: int) -> tuple[float, list[dict[str, float]]]:
    """Gigabytes of the state, and seconds until the slowest rank was through, by round."""
    job, root = Job.from_json(job_json), Path(folder)
    set_up_process(job)
    torch.set_num_threads(1)
    engine = Engine(job, torch.device("cpu"))
    allocate_optimizer_state(engine)
    loader = loader_of(job, build_tokenizer(job.tokenizer), engine.rows)
    together = RankGroup(job.checkpoint.timeout_seconds)
    bare = {"checkpoint_id": root / "bare", "process_group": together.group}

    def state() -> dict[str, torch.Tensor]:
        return {**model_state(engine), **optimizer_state(engine)}

    def saver_of(mode: str) -> Saver:
        own = with_value(
            with_value(job, "checkpoint.folder", str(root / mode)), "checkpoint.async_mode", mode
        )
        return Saver(own, root, engine, loader, together, huggingface, lambda _: None)

    def load() -> None:
        own = with_value(job, "checkpoint.folder", str(root / "disabled"))
        assert (
            CheckpointLoader(own, root, engine, loader, together, huggingface).start().path
            is not None
        )

    def emptied() -> None:
        dist.barrier()
        if together.rank == 0:
            for each in root.iterdir():
                shutil.rmtree(each)
        dist.barrier()

    def timed(call: Callable[[], object]) -> float:
        if together.rank == 0:
            os.sync()  # or the disk would still be at what the call before has left to it
        dist.barrier()
        started = time.perf_counter()
        call()
        dist.barrier()
        return time.perf_counter() - started

    sides: list[tuple[str, Callable[[], object]]] = [
        ("bare save", lambda: dcp.save(state(), **bare)),
        ("save", lambda: saver_of("disabled").save(1, {"step": 1})),
        ("bare load", lambda: dcp.load(state(), **bare)),
        ("load", load),
    ]
    background, rows = saver_of("async"), []
    for number in range(rounds):
        row: dict[str, float] = {}
        for pair, before in ((sides[:2], emptied), (sides[2:], dist.barrier)):
            for turn in range(TURNS):
                before()
                # Whoever goes second finds the disk busy with what the first one left.
                for name, call in pair if (number + turn) % 2 else reversed(pair):
                    row[name] = min(timed(call), row.get(name, float("inf")))
        emptied()
        before_it = background.account.seconds
        background.save(number + 1, {"step": number + 1})
        norm = engine.gradients(loader.next()).grad_norm
        background.wait_for_staging()
        row["stall"] = background.account.seconds - before_it
        engine.update(norm)
        background._finish_background_save()
        emptied()
        rows.append(row)
    background.close()
    own = (getattr(tensor, "_local_tensor", tensor) for tensor in state().values())
    return sum(tensor.nbytes for tensor in own) / 1e9, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=5, help="measured rounds, after one that warms up"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    typed = parser.parse_args()
    job = compose_job([*JOB, f"parallelism.dp_shard={typed.ranks}"]).to_json()
    with (
        tempfile.TemporaryDirectory(dir=typed.folder) as folder,
        RankPool(typed.ranks, 3600) as pool,
    ):
        of_ranks = pool.run(typed.ranks, measure, job, folder, typed.rounds + 1)
    size = sum(own for own, _ in of_ranks)
    rounds = [
        {name: max(each[name] for each in ranks) for name in ranks[0]}
        for ranks in zip(*(rows[1:] for _, rows in of_ranks), strict=True)
    ]
    print(f"{typed.ranks} ranks, {size:.2f} GB of state, {typed.rounds} rounds: median (range)")
    for name, values in (
        ("save, GB/s", [size / row["save"] for row in rounds]),
        ("load, GB/s", [size / row["load"] for row in rounds]),
        ("save, time over bare dcp.save", [row["save"] / row["bare save"] for row in rounds]),
        ("load, time over bare dcp.load", [row["load"] / row["bare load"] for row in rounds]),
        ("async: seconds for which training stands still", [row["stall"] for row in rounds]),
        ("async: that over a sync save", [row["stall"] / row["save"] for row in rounds]),
    ):
        print(f"{name}: {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()
