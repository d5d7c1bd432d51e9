"""The verb ``coordcheck``."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.compose.resolve import resolve
from harness.compose.verb import Result, Verb
from harness.config.fields import label, part
from harness.config.job import Job
from harness.launch.inputs import require_inputs, require_vocabulary
from harness.metrics.console import progress
from harness.model.architecture import require_decoder
from harness.util.encoding import dumps
from harness.util.errors import EXIT_OK, ConfigError
from harness.util.files import write_atomically
from harness.util.plots import COLORS, new_panels, save
from harness.util.tables import Table, columns_of, to_text
from harness.util.words import plural

if TYPE_CHECKING:
    from harness.tools.study.activations import Activation

HELP = """`harness coordcheck`: check that activations do not depend on the width of the model.

The job trains for a few steps at several widths, in this process. After every step the activations of each
module are measured on the first batch: attention, its scores, feed-forwards, experts, routers, the residual
stream, logits. With muP (`model.mup.base_dim`) neither they nor their change during training follow a power
of the width; in the standard parametrization they do (arXiv:2203.03466, appendix D.1). The command fails if
an exponent exceeds `coordcheck.bound`.
"""

EXIT_DRIFTS = 1
STEADY = "steady"
GROWS = "grows"
VANISHES = "vanishes"
UNDEFINED = "undefined"
LOGITS = ("logits", "router logits")
"""Kinds of modules whose number of outputs does not depend on the width of the model."""
OF_LOGITS = 0.5
"""Exponent of the inverse power of the width that a change of logits may follow."""
_COLUMNS = columns_of("""
    module        module
    slope         exponent   +.2f
    step          at step    d
    change_slope  of change  +.2f
    word          verdict
""")
_INCHES = 2.3
"""Side of a panel."""
_ROWS = (("rms", "RMS of activations"), ("change", "RMS of change since step 0"))


@dataclass(frozen=True)
class CoordCheckConfig:
    """Widths to compare, and the bound of the check."""

    widths: list[int] = label(factory=lambda: [64, 128, 256, 512], least=1)
    """Values of model.dim. The other widths of the model are proportional to it; heads keep their
    width."""
    bound: float = label(0.25, above=0)
    """Largest exponent of a power of the width that an activation may follow."""
    out: str | None = label(None, written="folder", works="a folder")
    """Folder of the picture and the numbers; null: runs_dir/name/coordcheck."""

    def validate(self, job: Job) -> None:
        """Raise ConfigError for combinations that are not allowed."""
        require_decoder(job.model, "compares widths by muP", "a decoder")
        if len(set(self.widths)) < 2:
            raise ConfigError(
                "coordcheck.widths", self.widths, "must be at least two widths", "[64,128]"
            )
        if job.world_size > 1:
            rule = "the check runs in one process; harness parity compares layouts"
            raise ConfigError("parallelism", f"{job.world_size} ranks", rule, "single")

    def jobs(self, job: Job) -> dict[int, Job]:
        """Return the job at every width, in ascending order.

        Raises:
            ConfigError: the model does not exist at a width.
        """
        # The head must return logits, not the loss.
        job = replace(job, training=replace(job.training, loss_chunks=1))
        widths = sorted(set(self.widths))
        models = [job.model.at_width(width, field="coordcheck.widths") for width in widths]
        return {
            width: resolve(replace(job, model=model))
            for width, model in zip(widths, models, strict=True)
        }


@dataclass(frozen=True)
class CoordCheckJob(Job):
    """A job plus the options of the check."""

    coordcheck: CoordCheckConfig = part(CoordCheckConfig)
    """Widths and bound."""


def coordcheck(job: CoordCheckJob, overrides: list[str]) -> Result:
    """Train every width, judge the activations, and write the picture."""
    config = job.coordcheck
    config.validate(job)
    jobs = config.jobs(job.plain)
    require_inputs(job)
    require_vocabulary(job)
    from harness.tools.study.activations import measure

    activations = []
    with progress(len(jobs)) as show:
        for width, of_width in jobs.items():
            show(f"width {width}: {plural(job.steps, 'step')}")
            activations += measure(of_width)
    found = judge(activations, config.bound)
    out = Path(config.out or Path(job.runs_dir) / job.name / "coordcheck")
    base = job.model.mup.base_dim
    name = "standard parametrization" if base is None else f"muP, base width {base}"
    picture = out / "coordcheck.png"
    steady = sum(each.word == STEADY for each in found)
    words = f"{steady} of {len(found)} modules steady (bound {config.bound:g})"
    title = f"{job.model.name}, {job.optimizer.kind}, {name}: {words}"
    draw(picture, title, activations, found)
    modules = [dataclasses.asdict(each) for each in found]
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
    summary = (
        f"{steady} of {len(found)} modules are steady ({name}; bound {config.bound:g})\n{picture}\n"
    )
    code = EXIT_OK if steady == len(found) else EXIT_DRIFTS
    return Result(data, to_text(Table(_COLUMNS, modules)) + summary, code)


@dataclass(frozen=True)
class WidthExponents:
    """How the activations of a module depend on the width.

    Attributes:
        slope: largest exponent, over all steps, of the power of the width that the activations
            follow.
        step: the step that has it.
        change_slope: that exponent for the change since step 0, after the last step.
        word: ``steady``, ``grows``, ``vanishes``, or ``undefined`` if a value is 0 or not finite.
    """

    module: str
    kind: str
    slope: float
    step: int
    change_slope: float
    word: str


def judge(activations: Sequence[Activation], bound: float) -> list[WidthExponents]:
    """Compare the exponents of every module with the bound.

    The activations, and their change during training, must not grow with the width. The change must
    not vanish either: then a wide model would learn no features. Activations before training may
    vanish. In muP the initial logits are proportional to the inverse root of the width
    (arXiv:2203.03466, appendix D.2), and so is the part of their change that updates of other
    tokens cause; their change may therefore vanish as that root.
    """
    found = []
    for module in dict.fromkeys(each.module for each in activations):
        own = [each for each in activations if each.module == module]
        kind = own[0].kind
        last = max(each.step for each in own)
        steps = range(last + 1)
        slopes = []
        for step in steps:
            slopes.append(slope((each.width, each.rms) for each in own if each.step == step))
        change = slope((each.width, each.change) for each in own if each.step == last)
        # NaN, from values that have no logarithm, counts as the largest.
        step = max(steps, key=lambda step: (math.isnan(slopes[step]), slopes[step]))
        if math.isnan(slopes[step]) or math.isnan(change):
            word = UNDEFINED
        elif max(slopes[step], change) > bound:
            word = GROWS
        else:
            word = VANISHES if change < -bound - (OF_LOGITS if kind in LOGITS else 0.0) else STEADY
        found.append(WidthExponents(module, kind, slopes[step], step, change, word))
    return found


def slope(points: Iterable[tuple[float, float]]) -> float:
    """Return the exponent of the power law through points (x, y), by least squares of logarithms.

    NaN if a y is not a positive finite number.
    """
    pairs = list(points)
    if not all(0 < y < math.inf for _, y in pairs):
        return math.nan
    xs, ys = zip(*((math.log(x), math.log(y)) for x, y in pairs), strict=True)
    return statistics.linear_regression(xs, ys).slope


def draw(
    path: Path,
    title: str,
    activations: Sequence[Activation],
    found: Sequence[WidthExponents],
) -> None:
    """Draw a panel for each kind of module: a line for each module and step, darker with each step.

    A panel's title has the largest exponent of its modules, in another color if one of them is not
    steady.
    """
    import matplotlib

    kinds = list(dict.fromkeys(each.kind for each in activations))
    last = max(each.step for each in activations)
    widths = sorted({each.width for each in activations})
    colors = matplotlib.colormaps["viridis_r"]
    figure, panels = new_panels(
        len(_ROWS), len(kinds), _INCHES * len(kinds), _INCHES * len(_ROWS) + 0.7, sharex=True
    )
    for kind, column in zip(kinds, panels.T, strict=True):
        of_kind = [each for each in found if each.kind == kind]
        passed = all(each.word == STEADY for each in of_kind)
        of_title = "black" if passed else COLORS["measured"]
        worst = {
            "rms": max(each.slope for each in of_kind),
            "change": max((each.change_slope for each in of_kind), key=abs),
        }
        for axis, (name, words) in zip(column, _ROWS, strict=True):
            lines = defaultdict(list)
            for each in activations:
                if each.kind == kind and (each.step or name == "rms"):
                    lines[each.module, each.step].append(getattr(each, name))
            for (_, step), values in lines.items():
                axis.plot(widths, values, color=colors(step / max(1, last)), linewidth=0.8)
            axis.set(xscale="log", yscale="log", xlabel="width", ylabel=words)
            axis.set_xticks(widths, map(str, widths))
            axis.minorticks_off()
            axis.label_outer()
            # A power of at least 2 in view, so that noise does not look like a trend.
            low, high = axis.get_ylim()
            middle = (low * high) ** 0.5
            axis.set_ylim(min(low, middle / 3), max(high, middle * 3))
            axis.set_title(f"{kind}\nexponent {worst[name]:+.2f}", fontsize=8, color=of_title)
    save(figure, path, title)


VERB = Verb("coordcheck", coordcheck, help=HELP, job=CoordCheckJob, has_json=True, is_alone=True)
