"""Experiments on the harness's own numbers: converge, coordcheck, bench."""
