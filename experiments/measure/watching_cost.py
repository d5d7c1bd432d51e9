"""Measures what a step takes longer if it is recorded, as a share of its CPU time without.

    python experiments/measure/watching_cost.py --steps 12
    python experiments/measure/watching_cost.py --steps 12 model=mixtral_debug model.vocab_size=8192

Every step is taken with everything, one after another, so that a machine whose speed drifts drifts under
all: the norms of ``metrics.tensors=norms``, and the forward pass of ``metrics.activations``, which
``optimizer.qk_clip`` has too. Other arguments are overrides of the job.
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
from harness.train.probe import Probe
from harness.train.setup import process_group, set_up_process
from harness.train.tensor_norms import TensorNorms

WARMUP_STEPS = 2
JOB = ["experiment=cpu_baseline/shape", "cluster.device=cpu"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    arguments, overrides = parser.parse_known_args()
    steps = arguments.steps + WARMUP_STEPS
    job = compose_job([*JOB, f"training.steps={steps}", *overrides])
    set_up_process(job)
    device = torch.device("cpu")
    shares: dict[str, list[float]] = {"norms": [], "activations": []}
    with process_group(job, device):
        engine = Engine(job, device)
        loader = loader_of(job, build_tokenizer(job.tokenizer), engine.rows)
        norms = TensorNorms(engine)
        probe = Probe(engine)
        for _ in range(steps):
            batch = loader.next()
            times = [time.process_time()]
            outcome = engine.gradients(batch)
            times.append(time.process_time())
            probe(outcome.batch)
            times.append(time.process_time())
            norms.before_update()
            times.append(time.process_time())
            engine.update(outcome.norm)
            times.append(time.process_time())
            norms.after_update(outcome.squares)
            times.append(time.process_time())
            passes, probed, kept, update, computed = (b - a for a, b in pairwise(times))
            step = passes + update
            shares["norms"].append((kept + computed) / step)
            shares["activations"].append(probed / step)
    for name, found in shares.items():
        counted = found[WARMUP_STEPS:]
        low = min(counted)
        high = max(counted)
        print(f"{name}: {statistics.median(counted):.2%} of a step ({low:.2%} to {high:.2%})")


if __name__ == "__main__":
    main()
