"""The verbs of the harness and of packages that extend it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.config.registry import Registry

if TYPE_CHECKING:
    from harness.compose.verb import Verb

VERBS: Registry[Verb] = Registry(
    "verb",
    {
        "train": "harness.launch.train:VERB",
        "plan": "harness.tools.plan.verb:VERB",
        "rehearse": "harness.tools.rehearse.verb:VERB",
        "parity": "harness.tools.parity.parity:VERB",
        "bench": "harness.tools.study.bench:VERB",
        "converge": "harness.tools.study.converge.verb:VERB",
        "coordcheck": "harness.tools.study.coordcheck.verb:VERB",
        "sweep": "harness.tools.report.sweep:VERB",
        "report": "harness.tools.report.verb:VERB",
        "evaluate": "harness.tools.inference.evaluate.verb:VERB",
        "generate": "harness.tools.inference.generate.verb:VERB",
        "verify": "harness.tools.verify:VERB",
        "convert": "harness.tools.convert:VERB",
        "download": "harness.tools.download:VERB",
        "tokenize": "harness.tools.tokenize.verb:VERB",
    },
    field="verb",
    expects="harness.compose.verb:Verb",
)
