"""Flux: a diffusion transformer that makes pictures from captions."""
