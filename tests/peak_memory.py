"""How much memory a conversion takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Most of a small conversion's memory is torch's, so what a large one adds to it is the measure.
_MEASURE = r"""
import re, sys
from harness.compose import compose_job
from harness.convert import ConvertJob, convert

def run(*typed):
    convert(compose_job(typed, config_name="convert", schema=ConvertJob), list(typed))

def peak():
    # getrusage's figure would begin with that of the process that started this one.
    return int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) * 1024

small, large, out, kind, small_layers, *model = sys.argv[1:]
options = [f"convert.format={kind}", "convert.max_shard_gb=0.02", *model]
run(f"convert.source={small}", f"convert.target={out}.small", *options, small_layers)
before = peak()
run(f"convert.source={large}", f"convert.target={out}", *options)
print("peak", peak() - before)
"""


def bytes_of_converting(
    small: Path, large: Path, out: Path, target: str, small_layers: int, model: list[str]
) -> int:
    """Bytes by which the peak of a process that converted ``small`` rises when it converts ``large``.

    Args:
        small: the model with few layers, which loads what every conversion needs.
        large: the model to be measured.
        out: where to write.
        target: format to write, as in ``convert.format``.
        small_layers: layers of ``small``.
        model: overrides that describe ``large``; none where its folder says it.
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
