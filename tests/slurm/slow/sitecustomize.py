"""Read by Python at its start: makes every training step of a rank take a quarter of a second longer."""

import importlib.abc
import importlib.util
import sys
import time
from pathlib import Path

SECONDS = 0.25


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "harness.loop.engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            slow_down(module.Engine)

        spec.loader.exec_module = exec_module
        return spec


def slow_down(engine):
    original = engine.gradients

    def gradients(self, *args, **kwargs):
        time.sleep(SECONDS)
        return original(self, *args, **kwargs)

    engine.gradients = gradients


if "harness.rank" in Path("/proc/self/cmdline").read_text():
    sys.meta_path.insert(0, Finder())
