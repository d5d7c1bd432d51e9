"""Measure the peak memory of a conversion."""

import os
import subprocess
import sys
from pathlib import Path

# Most memory of a small conversion is torch itself, so measure how much a large one adds.
_MEASURE = r"""
import re, sys
from harness.compose.composer import compose_job
from harness.tools.convert import ConvertJob, convert

def run(*typed):
    convert(compose_job(typed, config_name="convert", schema=ConvertJob), list(typed))

def peak():
    # getrusage would start from the peak of the parent process.
    return int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) * 1024

small, large, out, kind, small_layers, *model = sys.argv[1:]
options = [f"convert.format={kind}", "convert.max_shard_gb=0.02", *model]
run(f"convert.source={small}", f"convert.target={out}.small", *options, small_layers)
before = peak()
run(f"convert.source={large}", f"convert.target={out}", *options)
print("peak", peak() - before)
"""


def bytes_of_converting(small, large, out, target, small_layers, model):
    """Return by how many bytes the peak of a process rises when it converts ``large`` after ``small``.

    Args:
        small: a model with few layers, converted first to load the code.
        large: the model to measure.
        out: where to write.
        target: format to write, as in ``convert.format``.
        small_layers: layers of ``small``.
        model: overrides that describe ``large``; empty if its folder does.
    """
    layers = f"model.n_layers={small_layers}"
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(small), str(large), str(out), target, layers, *model],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])
