"""``python -m harness.train`` is ``harness train``, also under torchrun."""

import runpy
import sys

sys.argv.insert(1, "train")
runpy.run_module("harness", run_name="__main__", alter_sys=True)
