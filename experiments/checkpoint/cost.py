"""What checkpoints cost: saving and loading against bare DCP on the same state, and an async save's stall.

    python experiments/checkpoint/cost.py --rounds 5

Ranks are processes on this machine (gloo), sharded by FSDP. In every round the two sides take turns, three
each, of which the quickest counts; ratios are taken within a round. Prints a Markdown table of medians and
ranges over the rounds.
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

from harness.compose.composer import compose_job
from harness.config.fields import with_value
from harness.config.job import Job
from harness.launch.pool import RankPool
from harness.weights import huggingface

TURNS = 3
SHAPE = [
    *("model=llama3_debug", "model.dim=768", "model.n_layers=12", "model.n_heads=12", "model.n_kv_heads=12"),
    *("model.ffn_hidden_dim=2048", "model.vocab_size=32000", "data=synthetic", "tokenizer=bytes"),
    *("training.seq_len=128", "training.global_batch_size=8", "training.steps=1000", "cluster.device=cpu"),
    *("parallelism=fsdp", "metrics.console=none", "checkpoint.keep_latest_k=0"),
]


def measure(job_json: str, folder: str, rounds: int) -> list[dict[str, float]]:
    """One rank's seconds of everything, by round; all ranks call it together."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from harness.checkpoint.load import CheckpointLoader
    from harness.checkpoint.save import Saver
    from harness.checkpoint.state import (
        RankGroup,
        allocate_optimizer_state,
        model_state,
        optimizer_state,
        rng_key,
        rng_state,
    )
    from harness.data.tokenizer import build_tokenizer
    from harness.train.engine import Engine
    from harness.train.objective import loader_of
    from harness.train.setup import set_up_process

    job = Job.from_json(job_json)
    set_up_process(job)
    torch.set_num_threads(1)
    engine = Engine(job, torch.device("cpu"))
    allocate_optimizer_state(engine)
    loader = loader_of(job, build_tokenizer(job.tokenizer), engine.rows)
    together = RankGroup(job.checkpoint.timeout_seconds)
    root = Path(folder)

    def state() -> dict[str, torch.Tensor]:
        own = {rng_key(engine.mesh): rng_state(engine.device)}
        return {**model_state(engine), **optimizer_state(engine), **own}

    def timed(call: Callable[[], object]) -> float:
        """Seconds until the slowest rank is through."""
        dist.barrier()
        if together.rank == 0:
            os.sync()  # or the disk would still be at what the call before has left to it
        dist.barrier()
        started = time.perf_counter()
        call()
        dist.barrier()
        return time.perf_counter() - started

    def saver_in(name: str, mode: str) -> Saver:
        own = with_value(Job.from_json(job_json), "checkpoint.folder", str(root / name))
        own = with_value(own, "checkpoint.async_mode", mode)
        return Saver(own, root, engine, loader, together, huggingface, lambda _: None)

    def clear() -> None:
        dist.barrier()
        if together.rank == 0:
            for each in root.iterdir():
                shutil.rmtree(each)
        dist.barrier()

    def step() -> float:
        outcome = engine.gradients(loader.next())
        return outcome.grad_norm

    rows = []
    background = saver_in("async", "async")
    for number in range(rounds):
        row: dict[str, float] = {}
        bare = root / "bare"

        def save_bare() -> None:
            dcp.save(state(), checkpoint_id=bare, process_group=together.group)  # noqa: B023

        def save_ours() -> None:
            saver_in("ours", "disabled").save(1, {"step": 1})

        def load_bare() -> None:
            dcp.load(state(), checkpoint_id=bare, process_group=together.group)  # noqa: B023

        def load_ours() -> None:
            own = with_value(Job.from_json(job_json), "checkpoint.folder", str(root / "ours"))
            started_from = CheckpointLoader(own, root, engine, loader, together, huggingface).start()
            assert started_from.path is not None

        def best(sides: list[tuple[str, Callable[[], None]]], before: Callable[[], None]) -> None:
            # Whoever goes second finds the disk busy with what the first one left: they take turns at that.
            for turn in range(TURNS):
                before()
                for name, call in sides if (number + turn) % 2 else reversed(sides):  # noqa: B023
                    row[name] = min(timed(call), row.get(name, float("inf")))  # noqa: B023

        best([("save_bare", save_bare), ("save", save_ours)], clear)
        best([("load_bare", load_bare), ("load", load_ours)], dist.barrier)
        clear()
        row["step"] = timed(lambda: engine.update(step()))
        before = background.account.seconds
        started = time.perf_counter()
        background.save(number + 1, {"step": number + 1})
        norm = step()
        background.wait_for_staging()
        row["stall"] = background.account.seconds - before
        engine.update(norm)
        row["step_with_save"] = time.perf_counter() - started
        background.close() if number + 1 == rounds else background._finish_background_save()
        clear()
        rows.append(row)
    size = sum(
        t.nbytes if not hasattr(t, "_local_tensor") else t._local_tensor.nbytes for t in state().values()
    )
    return [{**row, "bytes": float(size)} for row in rows]


def table(rows: list[list[dict[str, float]]]) -> str:
    """The Markdown table of all ranks' rounds; the first round, which warms up, is left out."""
    rounds = [[ranks[number] for ranks in rows] for number in range(1, len(rows[0]))]
    gigabytes = sum(each["bytes"] for each in rounds[0]) / 1e9
    slowest = [{name: max(rank[name] for rank in ranks) for name in ranks[0]} for ranks in rounds]
    lines = [
        f"{len(rows)} ranks, {gigabytes:.2f} GB of state, {len(rounds)} rounds",
        "",
        "| figure | median | range |",
        "|---|---|---|",
    ]

    def add(name: str, values: list[float], form: str) -> None:
        low, high = min(values), max(values)
        lines.append(f"| {name} | {statistics.median(values):{form}} | {low:{form}} to {high:{form}} |")

    add("save, GB/s", [gigabytes / r["save"] for r in slowest], ".2f")
    add("load, GB/s", [gigabytes / r["load"] for r in slowest], ".2f")
    add("save, time over bare dcp.save", [r["save"] / r["save_bare"] for r in slowest], ".3f")
    add("load, time over bare dcp.load", [r["load"] / r["load_bare"] for r in slowest], ".3f")
    add("async: time training stands still, s", [r["stall"] for r in slowest], ".3f")
    add("async: that over a sync save", [r["stall"] / r["save"] for r in slowest], ".3f")
    add(
        "async: step beside which it copies, over one without",
        [r["step_with_save"] / r["step"] for r in slowest],
        ".2f",
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the rounds and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one that warms up")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints are written; a temporary folder by default"
    )
    arguments = parser.parse_args()
    job = compose_job([*SHAPE, f"parallelism.dp_shard={arguments.ranks}"])
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, RankPool(arguments.ranks, 3600) as pool:
        print(table(pool.run(arguments.ranks, measure, job.to_json(), folder, arguments.rounds + 1)))


if __name__ == "__main__":
    main()
