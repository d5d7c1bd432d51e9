"""Flux and foreign files. Entry points alone register them, as those of an outside package."""
