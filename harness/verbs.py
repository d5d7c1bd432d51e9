"""The verbs of the harness and of packages that extend it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.registry import Registry

if TYPE_CHECKING:
    from harness.app import Verb

VERBS: Registry[Verb] = Registry(
    "verb",
    {
        "train": "harness.train:VERB",
        "plan": "harness.plan.__main__:VERB",
        "rehearse": "harness.rehearse.__main__:VERB",
        "parity": "harness.parity:VERB",
        "bench": "harness.bench:VERB",
        "converge": "harness.converge.__main__:VERB",
        "coordcheck": "harness.coordcheck.__main__:VERB",
        "sweep": "harness.sweep.__main__:VERB",
        "report": "harness.report.__main__:VERB",
        "evaluate": "harness.evaluate.__main__:VERB",
        "generate": "harness.generate.__main__:VERB",
        "verify": "harness.verify:VERB",
        "convert": "harness.convert:VERB",
        "download": "harness.download:VERB",
        "tokenize": "harness.tokenize.__main__:VERB",
        "encode": "harness.encode.__main__:VERB",
    },
    field="verb",
    expects="harness.app:Verb",
)
