"""Experiments on the harness's own numbers: converge and coordcheck."""
