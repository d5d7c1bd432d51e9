"""Read by Python at its start: changes the training steps of a rank, by the variable ``TEST_PATCH``.

``slow``: every step takes a quarter of a second longer. ``drags``: the forward pass of rank 1 takes a tenth
of a second longer. ``killed``, ``segfault``, ``lags``, ``hangs``: the fault of rank 1 in the third step; rank
0 then takes seconds to close its loader. ``faults``: ranks of some points of a sweep fail, once, in the third
step; the job's seed decides whether the point fails, and its layout how. ``starved``: the first node of a
job's first attempt has no free memory when it is checked.
"""

import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

SECONDS = 0.25
DRAG_SECONDS = 0.1
STEP = 3
CLOSING_SECONDS = 3.0


def raise_on_rank_1(rank):
    if rank == 1:
        raise RuntimeError("injected into rank 1")


def eat_memory_on_rank_0(rank):
    if rank == 0:
        import torch

        eaten = [torch.ones(2**26)]  # 256 MiB of float32
        while True:
            eaten.append(torch.ones(2**26))


def kill_rank_3(rank):
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {
    (2, 1): raise_on_rank_1,
    (1, 2): eat_memory_on_rank_0,
    (4, 1): kill_rank_3,
}


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "harness.train.engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            PATCHES[os.environ["TEST_PATCH"]](module.Engine)

        spec.loader.exec_module = exec_module
        return spec


def slow_down(engine):
    original = engine.gradients

    def gradients(self, *args, **kwargs):
        time.sleep(SECONDS)
        return original(self, *args, **kwargs)

    engine.gradients = gradients


def drag(engine):
    from harness.util.annotation import annotated

    original = engine.gradients

    def gradients(self, *args, **kwargs):
        if os.environ["RANK"] == "1":
            with annotated("forward.blocks"):
                time.sleep(DRAG_SECONDS)
        return original(self, *args, **kwargs)

    engine.gradients = gradients


def sabotage(engine):
    run, rank = Path(sys.argv[-1]), int(os.environ["RANK"])
    job = json.loads((run / "job.json").read_text())
    fault = FAULTS.get((job["parallelism"]["dp_shard"], job["parallelism"]["tp"]))
    if job["training"]["seed"] != 2 or fault is None or (run / "attempts").exists():
        return
    original, calls = engine.gradients, []

    def gradients(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == STEP:
            fault(rank)
        return original(self, *args, **kwargs)

    engine.gradients = gradients


def starve(read_text):
    def read(path, *args, **kwargs):
        text = read_text(path, *args, **kwargs)
        return text.replace("MemAvailable:", "MemAvailable: 1 kB\nWas:") if path.name == "meminfo" else text

    return read


def on_rank_1(act):
    def patch(engine):
        from harness.data.prefetch import Prefetcher

        original, close, calls = engine.gradients, Prefetcher.close, []

        def gradients(self, *args, **kwargs):
            calls.append(1)
            if len(calls) == STEP and os.environ["RANK"] == "1":
                act()
            return original(self, *args, **kwargs)

        def close_late(self):
            time.sleep(CLOSING_SECONDS)
            close(self)

        engine.gradients, Prefetcher.close = gradients, close_late

    return patch


PATCHES = {
    "slow": slow_down,
    "drags": drag,
    "faults": sabotage,
    "killed": on_rank_1(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "segfault": on_rank_1(lambda: os.kill(os.getpid(), signal.SIGSEGV)),
    "lags": on_rank_1(lambda: time.sleep(12)),
    "hangs": on_rank_1(lambda: time.sleep(600)),
}

if os.environ.get("TEST_PATCH") in PATCHES and "harness.train.rank" in Path("/proc/self/cmdline").read_text():
    sys.meta_path.insert(0, Finder())

if (
    os.environ.get("TEST_PATCH") == "starved"
    and os.environ.get("SLURM_NODEID") == "0"
    and "SLURM_RESTART_COUNT" not in os.environ
):
    Path.read_text = starve(Path.read_text)
