"""Measures what ``metrics.tensors=norms`` costs in a step that is recorded, as a share of its CPU time.

python experiments/measure/norms_cost.py --steps 12
"""

import argparse
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.compose.composer import compose_job
from harness.data.tokenizer import build_tokenizer
from harness.train.engine import Engine
from harness.train.objective import loader_of
from harness.train.setup import process_group, set_up_process
from harness.train.tensor_norms import TensorNorms

WARMUP_STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    steps = parser.parse_args().steps + WARMUP_STEPS
    job = compose_job(
        ["experiment=cpu_baseline/shape", "cluster.device=cpu", f"training.steps={steps}"]
    )
    set_up_process(job)
    device = torch.device("cpu")
    shares = []
    with process_group(job, device):
        engine = Engine(job, device)
        loader = loader_of(job, build_tokenizer(job.tokenizer), engine.rows)
        norms = TensorNorms(engine)
        for _ in range(steps):
            batch = loader.next()
            times = [time.process_time()]
            outcome = engine.gradients(batch)
            times.append(time.process_time())
            norms.before_update()
            times.append(time.process_time())
            engine.update(outcome.norm)
            times.append(time.process_time())
            norms.after_update(outcome.squares)
            times.append(time.process_time())
            passes, kept, update, computed = (b - a for a, b in pairwise(times))
            shares.append((kept + computed) / (passes + update))
    counted = shares[WARMUP_STEPS:]
    low, high = min(counted), max(counted)
    print(f"{statistics.median(counted):.2%} of a step ({low:.2%} to {high:.2%})")


if __name__ == "__main__":
    main()
