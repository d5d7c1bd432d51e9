"""The verbs of the harness, as they are declared."""

from harness.compose.verb import VERBS as TABLE

VERBS = {name: TABLE[name] for name in TABLE}
JOBS = {name: verb.job for name, verb in VERBS.items() if verb.job is not None}
"""Dataclasses of the verbs that take a job; each composes conf/NAME.yaml."""
