"""``harness coordcheck``: check that activations do not depend on the width of the model.

The job trains for a few steps at several widths, in this process. After every step the activations of each
module are measured on the first batch: attention, its scores, feed-forwards, experts, routers, the residual
stream, logits. With muP (``model.mup.base_dim``) neither they nor their change during training follow a power
of the width; in the standard parametrization they do (arXiv:2203.03466, appendix D.1). The command fails if
an exponent exceeds ``coordcheck.bound``.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from harness.compose.verb import Result, Verb
from harness.tools.study.coordcheck.config import CoordCheckJob
from harness.train.process import launched_ranks
from harness.util.encoding import dumps
from harness.util.errors import EXIT_OK, UserError
from harness.util.files import write_atomically
from harness.util.tables import Column, Table, to_text

EXIT_DRIFTS = 1
_COLUMNS = (
    Column("module", "module"),
    Column("slope", "exponent", "+.2f"),
    Column("step", "at step", "d"),
    Column("change_slope", "of change", "+.2f"),
    Column("word", "verdict"),
)


def coordcheck(job: CoordCheckJob, overrides: list[str]) -> Result:
    """Train every width, judge the activations, and write the picture."""
    if launched_ranks() is not None:
        raise UserError("harness coordcheck runs in one process; start it without torchrun")
    config = job.coordcheck
    config.validate(job)
    jobs = config.jobs(job.plain)
    from harness.tools.study.coordcheck.judge import STEADY, judge
    from harness.tools.study.coordcheck.measure import measure
    from harness.tools.study.coordcheck.picture import draw

    activations = []
    for width, of_width in jobs.items():
        sys.stderr.write(f"width {width}: {job.steps} steps\n")
        activations += measure(of_width)
    verdicts = judge(activations, config.bound)
    out = Path(config.out or Path(job.runs_dir) / job.name / "coordcheck")
    out.mkdir(parents=True, exist_ok=True)
    base = job.model.mup.base_dim
    name = "standard parametrization" if base is None else f"muP, base width {base}"
    picture = out / "coordcheck.png"
    draw(picture, f"{job.model.name}, {job.optimizer.kind}, {name}", activations, verdicts, config.bound)
    steady = sum(each.word == STEADY for each in verdicts)
    modules = [dataclasses.asdict(each) for each in verdicts]
    data = {
        "overrides": overrides,
        "widths": list(jobs),
        "steps": job.steps,
        "base_dim": base,
        "bound": config.bound,
        "steady": steady,
        "modules": modules,
        "activations": [dataclasses.asdict(each) for each in activations],
        "picture": str(picture),
    }
    write_atomically(out / "coordcheck.json", f"{dumps(data, indent=2)}\n".encode())
    summary = f"{steady} of {len(verdicts)} modules are steady ({name}; bound {config.bound:g})\n{picture}\n"
    code = EXIT_OK if steady == len(verdicts) else EXIT_DRIFTS
    return Result(data, to_text(Table(_COLUMNS, modules)) + summary, code)


VERB = Verb("coordcheck", coordcheck, job=CoordCheckJob, has_json=True)
