"""Read by Python at its start: changes the training steps of a rank, by the variable ``TEST_PATCH``.

``slow``: every step takes a quarter of a second longer. ``segfault``, ``lags``: the fault of rank 1 in the
third step; rank 0 then takes seconds to close its loader. ``faults``: ranks of some points of a sweep fail,
once, in the third step; the job's seed decides whether the point fails, and its layout how. ``starved``: the
first node of a job's first attempt has no free memory when it is checked.
"""

import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

STEP = 3
CLOSING_SECONDS = 3.0


def slow(step):
    time.sleep(0.25)


def on_rank_1(act):
    def fault(step):
        from harness.data.prefetch import Prefetcher

        if step == 1:
            close = Prefetcher.close
            Prefetcher.close = lambda self: time.sleep(CLOSING_SECONDS) or close(self)
        if step == STEP and os.environ["RANK"] == "1":
            act()

    return fault


def sabotage(step):
    run, rank = Path(sys.argv[-1]), int(os.environ["RANK"])
    if step != STEP or (run / "attempts").exists():
        return
    job = json.loads((run / "job.json").read_text())
    layout = (job["parallelism"]["dp_shard"], job["parallelism"]["tp"])
    if job["training"]["seed"] != 2:
        return
    if layout == (2, 1) and rank == 1:
        raise RuntimeError("injected into rank 1")
    if layout == (1, 2) and rank == 0:
        import torch

        eaten = torch.ones(2**30)  # 4 GiB of float32, which SLURM's next look at the step finds
        time.sleep(len(eaten))
    if layout == (4, 1) and rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)


ACTS = {
    "slow": slow,
    "faults": sabotage,
    "segfault": on_rank_1(lambda: os.kill(os.getpid(), signal.SIGSEGV)),
    "lags": on_rank_1(lambda: time.sleep(12)),
}


class Finder(importlib.abc.MetaPathFinder):
    """Patches the engine when it is imported: an act precedes the gradients of each step."""

    def find_spec(self, name, path, target=None):
        if name != "harness.train.engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            original, calls = module.Engine.gradients, []

            def gradients(self, *args, **kwargs):
                calls.append(1)
                ACTS[os.environ["TEST_PATCH"]](len(calls))
                return original(self, *args, **kwargs)

            module.Engine.gradients = gradients

        spec.loader.exec_module = exec_module
        return spec


def starve(read_text):
    def read(path, *args, **kwargs):
        text = read_text(path, *args, **kwargs)
        return (
            text.replace("MemAvailable:", "MemAvailable: 1 kB\nWas:")
            if path.name == "meminfo"
            else text
        )

    return read


chosen = os.environ.get("TEST_PATCH")
if chosen in ACTS and "harness.train.rank" in Path("/proc/self/cmdline").read_text():
    sys.meta_path.insert(0, Finder())
if (
    chosen == "starved"
    and os.environ.get("SLURM_NODEID") == "0"
    and "SLURM_RESTART_COUNT" not in os.environ
):
    Path.read_text = starve(Path.read_text)
