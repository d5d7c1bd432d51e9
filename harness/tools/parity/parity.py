"""The verb ``parity``."""

from __future__ import annotations

import dataclasses
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from harness.compose.composer import Composer
from harness.compose.resolve import resolve
from harness.compose.verb import Result, Verb
from harness.config.fields import label, part, with_value
from harness.config.job import Job, differing_numerics
from harness.config.optimizer import EIGHT_BIT
from harness.config.parallelism import ParallelismConfig
from harness.config.training import ActivationCheckpointConfig, CompileConfig
from harness.launch.inputs import require_vocabulary
from harness.metrics.console import progress
from harness.tools.parity.formats import formats_of, lowest_format
from harness.tools.parity.random_jobs import random_job
from harness.tools.parity.verdict import HEADER, Verdict, line
from harness.util.errors import EXIT_OK, ConfigError
from harness.util.words import plural

if TYPE_CHECKING:
    from harness.launch.pool import RankPool

HELP = """`harness parity`: check on CPU ranks that every layout computes the same as one process.

The same job is trained from the same seed with each layout and in one process. Losses, gradient norms and
gradients, before clipping, are compared. The gradients are the most sensitive: clipping and Adam hide an
error of scale from the loss. At the end come what the updates have left: how far weights and their average
moved, loads of experts, and a validation loss. A layout saves, is built again and loads in the middle.
"""

EXIT_DIFFERS = 1
KEPT_REFERENCES = 8
TOLERANCES = {"float32": (1e-5, 1e-4), "bfloat16": (1e-3, 5e-2), "float8": (1e-3, 2e-1)}
# A sum in another order can move a running mean to the next 8-bit code, as it rounds a weight in
# bfloat16.
TOLERANCES[EIGHT_BIT] = TOLERANCES["bfloat16"]


@dataclass(frozen=True)
class ParityConfig:
    """Layouts to compare, and tolerances."""

    matrix: dict[str, str] = label(factory=dict)
    """Known layouts: name -> overrides, separated by spaces."""
    expert_matrix: dict[str, str] = label(factory=dict)
    """Additional layouts for models with experts."""
    layouts: list[str] = label(factory=list)
    """Names in the matrix to run; empty runs all, and skips those that the model cannot have."""
    transformers: str | None = label(None)
    """A folder with a causal language model of transformers, which the harness need not know: its layouts
    are compared in place of the job's, by one pass of random tokens. Needs accelerate."""
    transformers_matrix: dict[str, str] = label(factory=dict)
    """Known layouts of transformers: name -> sizes of its DistributedConfig, separated by spaces."""
    world_size: int = label(8, least=1)
    """Ranks to start; layouts that need more are reported as skipped."""
    random: int = label(0, least=0)
    """Number of random jobs to compare with one process, instead of the matrix."""
    seed: int = label(0)
    """Seed of the first random job; each further one adds 1."""
    steps: int = label(10, least=1)
    """Optimizer steps of every run."""
    resume: bool = label(True)
    """Save in the middle of a layout's run, build everything again, and load: the one process does not. It
    shows that nothing of a block, an optimizer or the data is missing in a checkpoint."""
    loss_tolerance: float | None = label(None, least=0)
    """Largest relative difference of a step's loss; null: 1e-5 in float32, 1e-3 in less exact formats,
    those of an optimizer's state included."""
    gradient_tolerance: float | None = label(None, least=0)
    """Largest relative difference of a gradient (2-norm, per parameter) or of the gradient norm; null: 1e-4
    in float32, 5e-2 in bfloat16 and with 8-bit state, 0.2 in float8. Ten times as much is allowed
    of how far a weight moved."""

    def validate(self, training_steps: int) -> None:
        """Raise ConfigError for combinations that are not allowed."""
        if self.steps > training_steps:
            raise ConfigError(
                "parity.steps", self.steps, f"must be at most training.steps={training_steps}"
            )
        if self.random and self.layouts:
            rule = f"selects from the matrix, which parity.random={self.random} does not compare"
            raise ConfigError(
                "parity.layouts", self.layouts, rule, "parity.random=0, or no parity.layouts"
            )


@dataclass(frozen=True)
class ParityJob(Job):
    """A job plus the options of the comparison."""

    varies: ClassVar[bool] = True

    parity: ParityConfig = part(ParityConfig)
    """Layouts to compare, and tolerances."""


Trace = list[dict[str, Any]]
"""Values of every step on one rank, by the words that name them: ``values_of`` in ``first_wrong``. The first
and the last step are whole, and the last one also has what the updates have left."""


def trace(job_json: str, steps: int, resume_in: str | None = None) -> Trace:
    """Train on this rank of a process group and record losses, norms, gradients and results.

    Args:
        resume_in: an empty folder that all ranks share, to resume there in the middle; None: do not
            resume.
    """
    from harness.tools.parity.first_wrong import (
        results_of,
        resume,
        start,
        statistics_of,
        update,
        values_of,
        weights_of,
    )

    engine, loader = start(job_json)
    initial = weights_of(engine)
    found = []
    for step in range(steps):
        if resume_in is not None and 0 < step == steps // 2:
            engine, loader = resume(engine, loader, job_json, resume_in)
        outcome = engine.gradients(loader.next())
        is_whole = step in (0, steps - 1)
        found.append(values_of(engine, outcome, whole=is_whole))
        if is_whole:
            found[-1] |= statistics_of(engine, outcome)
            found[-1] |= update(engine, outcome)
        else:
            engine.update(outcome.norm)
    found[-1] |= results_of(engine, initial, loader.next())
    return found


def compare(
    layout: str, ranks: int, reference: Trace, traces: list[Trace], tolerances: tuple[float, float]
) -> Verdict:
    """Compare the traces of all ranks of a layout with the trace of a single process.

    Every rank counts: a different loss on one rank, or a gradient that no rank has, fails the
    comparison.
    """
    from harness.tools.parity.first_wrong import (
        FURTHER_LOSS,
        GRADIENT,
        LOSS,
        NORM,
        NORM_OF,
        SHARE,
        STATISTIC,
        difference,
        largest,
        tolerance_of,
    )

    offs: dict[str, float] = {}
    wrong: dict[str, int] = {}
    for step, expected in enumerate(reference):
        for what, whole in expected.items():
            off = difference(what, whole, [each[step] for each in traces])
            offs[what] = largest([offs.get(what, 0.0), off])
            # NaN is different, because every comparison with it is false.
            if not off <= tolerance_of(what, tolerances):
                wrong.setdefault(what, step)
    gradients = {what: off for what, off in offs.items() if what.startswith(GRADIENT)}
    # What the norm lacks can be too little for it to show: 3e-7 of it for sinks of attention.
    shares = [what for what in offs if what.startswith((SHARE, NORM_OF, STATISTIC))]
    worst = max(gradients, key=lambda what: (math.isnan(offs[what]), offs[what]))
    if wrong and worst not in wrong:
        worst = next(iter(wrong))
    return Verdict(
        layout,
        ranks,
        largest([offs[what] for what in (LOSS, FURTHER_LOSS) if what in offs]),
        largest([*gradients.values()]),
        worst.removeprefix(GRADIENT),
        largest([offs[what] for what in (NORM, *shares)]),
        not wrong,
        min(wrong.values(), default=0),
    )


@dataclass
class LayoutComparer:
    """Compares layouts with one process; the process runs once for all layouts with the same reference job.

    Args:
        pool: runs the ranks.
        config: number of steps, and tolerances.
    """

    pool: RankPool
    config: ParityConfig
    references: dict[str, Trace] = dataclasses.field(default_factory=dict)
    """Traces of one process by job id; only of the last few jobs, because gradients take memory."""

    def verdict(self, name: str, job: Job) -> Verdict:
        """Compare one layout; with several ``comparisons``, return the worst result."""
        verdicts = [self._compare(name, each) for each in comparisons(job)]
        return min(verdicts, key=lambda verdict: (verdict.passed, -verdict.gradient))

    def _compare(self, name: str, job: Job) -> Verdict:
        with tempfile.TemporaryDirectory() as folder:
            resume_in = folder if self.config.resume else None
            traces = self.pool.run(
                job.world_size, trace, job.to_json(), self.config.steps, resume_in
            )

        tolerances = tolerances_of(job, self.config)
        alone = single_process(job)
        references = [alone]
        if lowest_format(job) != "float32":
            # One process sums all rows of a batch in low precision, and can be less exact than
            # several ranks: an embedding's gradient in bfloat16 was 5 % from float32, that of eight
            # ranks 0.6 %.
            references.append(in_float32(alone))
        for each in references:
            expected = self._reference(each)
            if each is not alone:
                # Lower formats have no statistics of activations.
                expected = [without_statistics(values) for values in expected]
            verdict = compare(name, job.world_size, expected, traces, tolerances)
            if verdict.passed:
                return verdict
        wrong = self._first_wrong(job, alone, verdict.wrong_step, tolerances)
        return dataclasses.replace(verdict, first_wrong=wrong)

    def _first_wrong(
        self, job: Job, alone: Job, wrong_step: int, tolerances: tuple[float, float]
    ) -> str:
        from harness.tools.parity.first_wrong import first_wrong, record

        # Compiled blocks have no modules to look into, and the compiler keeps the memory budget.
        eager = dataclasses.replace(job, compile=CompileConfig())
        if job.activation_checkpoint.mode == "memory_budget":
            eager = dataclasses.replace(eager, activation_checkpoint=ActivationCheckpointConfig())
        for step in sorted({0, wrong_step, self.config.steps - 1}):
            [whole] = self.pool.run(1, record, alone.to_json(), step)
            found = self.pool.run(job.world_size, record, eager.to_json(), step)
            text = first_wrong(whole, found, job.parallelism, tolerances)
            if text is not None:
                return f"step {step + 1}, {text}"
        if job.compile.enable:
            return "nothing without the compiler"
        return f"nothing in a second run{', which does not resume' if self.config.resume else ''}"

    def _reference(self, alone: Job) -> Trace:
        if alone.id not in self.references:
            for oldest in list(self.references)[: 1 - KEPT_REFERENCES]:
                del self.references[oldest]
            [self.references[alone.id]] = self.pool.run(
                1, trace, alone.to_json(), self.config.steps
            )
        return self.references[alone.id]


def without_statistics(values: dict[str, Any]) -> dict[str, Any]:
    from harness.tools.parity.first_wrong import STATISTIC

    return {what: value for what, value in values.items() if not what.startswith(STATISTIC)}


def in_float32(job: Job) -> Job:
    """Return a copy of a job that computes in float32.

    The job is resolved, so its fields have formats that came from its precision; these are derived
    again.
    """
    job = dataclasses.replace(job, precision=type(job.precision)())
    for name, default in formats_of(Job()).items():
        job = with_value(job, name, default)
    return resolve(job, gpus=0)


def tolerances_of(job: Job, config: ParityConfig) -> tuple[float, float]:
    """Tolerances (loss, gradient) of a job: configured, or the default of its lowest format."""
    loss, gradient = TOLERANCES.get(lowest_format(job), TOLERANCES["float8"])
    return (
        loss if config.loss_tolerance is None else config.loss_tolerance,
        gradient if config.gradient_tolerance is None else config.gradient_tolerance,
    )


def comparisons(job: Job) -> list[Job]:
    """Return the jobs to compare for a layout: usually the job itself.

    A job of low precision is compared twice: in float32, whose tolerance is small, and in its
    precision. Low precision changes router scores, so that some tokens go to other experts, and
    gradients differ more than by an error in the layout. So experts are compared with their own
    routing in float32 only, and with ``model.moe.force_balance`` in their precision, unless
    ``debug.routing`` chooses experts.
    """
    if lowest_format(job) == "float32":
        return [job]
    fixed = job
    if job.model.moe.enabled and job.debug.routing is None:
        fixed = with_value(job, "model.moe.force_balance", True)
    return [in_float32(job), resolve(fixed, gpus=0)]


def parity(job: ParityJob, overrides: list[str]) -> Result:
    """Compare the chosen layouts with one process, and print a row for each."""
    from harness.launch.pool import RankFailed, RankPool

    config = job.parity
    config.validate(job.steps)
    if config.transformers is not None:
        return parity_of_transformers(job, config.transformers, overrides)
    rows: Iterable[Row] = random_rows(config, overrides)
    refused: dict[str, ConfigError] = {}
    total = config.random
    if not config.random:
        require_vocabulary(job)
        layouts = compose_layouts(config, overrides, refused, has_experts=job.model.moe.enabled)
        rows = [(name, each, "") for name, each in layouts.items()]
        total = sum(each.world_size <= config.world_size for each in layouts.values())
    compared = []
    skipped = []
    with RankPool(config.world_size) as pool, progress(total) as show:
        # which prints above the bar
        judge = LayoutComparer(pool, config)
        out = sys.stdout
        out.write(HEADER)
        for name, error in refused.items():
            out.write(f"{name:<28} {'':>5}  skipped: {error}\n")
            skipped.append(name)
        out.flush()
        for name, each, typed in rows:
            ranks = each.world_size
            if ranks > config.world_size:
                out.write(
                    f"{name:<28} {ranks:>5}  skipped: parity.world_size={config.world_size}\n"
                )
                skipped.append(name)
                continue
            show(name)
            try:
                verdict = judge.verdict(name, each)
                found = dataclasses.asdict(verdict)
                text = line(verdict)
            except RankFailed as error:
                found = {"layout": name, "ranks": ranks, "passed": False, "error": str(error)}
                text = f"{name:<28} {ranks:>5}  FAILED\n{error}\n"
            out.write(text + (f"    {typed}\n" if typed else ""))
            out.flush()
            compared.append(found | {"overrides": typed})
    agree = sum(row["passed"] for row in compared)
    loss, gradient = tolerances_of(job, config)
    what = "layouts"
    more = f"{lowest_format(job)}; tolerance {loss:g} loss, {gradient:g} gradients"
    if config.random:
        what = "compositions"
        more = f"seeds {config.seed} to {config.seed + config.random - 1}"
    steps = plural(config.steps, "step")
    return Result(
        {"compared": compared, "agree": agree, "skipped": skipped, "steps": config.steps},
        f"{agree} of {len(compared)} {what} agree with one process over {steps} ({more})\n",
        EXIT_OK if agree == len(compared) > 0 else EXIT_DIFFERS,
    )


def parity_of_transformers(job: ParityJob, folder: str, overrides: list[str]) -> Result:
    """Compare transformers' layouts of the model in a folder with one process, and print a row for each."""
    from harness.launch.pool import RankFailed, RankPool
    from harness.tools.parity.foreign import Layout, batch_of, check, compare, trace

    config = job.parity
    check(folder, overrides)
    chosen = chosen_layouts(config.transformers_matrix, config.layouts)
    layouts = {name: Layout.read(name, chosen[name]) for name in chosen}
    batch = batch_of(job, layouts)
    tolerances = tolerances_of(Job(), config)
    compared = []
    skipped = []
    out = sys.stdout
    with RankPool(config.world_size) as pool, progress(len(layouts)) as show:
        [reference] = pool.run(1, trace, folder, {}, batch)
        if isinstance(reference, str):
            raise ConfigError("parity.transformers", folder, f"cannot be loaded: {reference}")
        out.write(HEADER.replace("     norm", "  weights"))
        for name, layout in layouts.items():
            show(name)
            reason = f"parity.world_size={config.world_size}"
            if layout.ranks <= config.world_size:
                try:
                    found = pool.run(layout.ranks, trace, folder, layout.sizes, batch)
                except RankFailed as error:
                    compared.append({"layout": name, "ranks": layout.ranks, "passed": False})
                    out.write(f"{name:<28} {layout.ranks:>5}  FAILED\n{error}\n")
                    continue
                refusals = [each for each in found if isinstance(each, str)]
                if not refusals:
                    verdict = compare(name, layout, reference, found, tolerances)
                    compared.append(dataclasses.asdict(verdict))
                    out.write(line(verdict))
                    continue
                reason = refusals[0]
            skipped.append(name)
            out.write(f"{name:<28} {layout.ranks:>5}  skipped: {reason}\n")
    agree = sum(bool(row["passed"]) for row in compared)
    return Result(
        {"compared": compared, "agree": agree, "skipped": skipped},
        f"{agree} of {len(compared)} layouts of transformers agree with one process "
        f"(tolerance {tolerances[0]:g} loss, {tolerances[1]:g} gradients)\n",
        EXIT_OK if agree == len(compared) > 0 else EXIT_DIFFERS,
    )


Row = tuple[str, Job, str]
"""Of the table: its name, a job to compare, and the overrides that compose it if the name does not say."""


def random_rows(config: ParityConfig, overrides: list[str]) -> Iterator[Row]:
    """Compose random jobs one after another; overrides on the command line apply to all of them."""
    fixed = [override for override in overrides if not override.startswith("parity.")]
    composer = Composer("parity", ParityJob)
    for seed in range(config.seed, config.seed + config.random):
        composed, job = random_job(composer, seed, config.world_size, fixed)
        yield f"parity.seed={seed}", job.plain, " ".join(composed)


def compose_layouts(
    config: ParityConfig,
    overrides: list[str],
    refused: dict[str, ConfigError] | None = None,
    *,
    has_experts: bool = False,
) -> dict[str, Job]:
    """Compose the chosen layouts as jobs with the same numerics, by name.

    Args:
        refused: gets the layouts that this job cannot have, unless they are named. None: they are errors.
    """
    matrix = config.matrix | (config.expert_matrix if has_experts else {})
    chosen = chosen_layouts(matrix, config.layouts)
    jobs: dict[str, Job] = {}
    composer = Composer("parity", ParityJob)
    with progress(len(chosen), seconds=5.0) as show:
        for name, words in chosen.items():
            show(f"composing {name}")
            try:
                job = composer.job([*overrides, *words.split()]).plain
            except ConfigError as error:
                if refused is None or config.layouts:
                    raise
                refused[name] = error
                continue
            differing = differing_numerics(next(iter(jobs.values()), job), job)
            if differing:
                raise ConfigError(
                    "parity.matrix", name, f"changes the numerics: {', '.join(differing)}"
                )
            jobs[name] = job
    return jobs


def chosen_layouts(matrix: dict[str, str], names: list[str]) -> dict[str, str]:
    """The named rows of a matrix; all, if none is named."""
    for name in names:
        if name not in matrix:
            raise ConfigError("parity.layouts", name, "no such layout", sorted(matrix))
    return {name: matrix[name] for name in names or matrix}


def single_process(job: Job) -> Job:
    """The same job on one rank: eager, without activation checkpointing and loss chunks.

    A float8 scale is the maximum over all rows that a linear processes at once. So for float8 the
    one rank processes as many rows at once as each rank of the layout.
    """
    rows = None if job.precision.linear == "none" else job.microbatch_size
    training = dataclasses.replace(job.training, local_batch_size=rows, loss_chunks=1)
    alone = dataclasses.replace(
        job,
        training=training,
        parallelism=ParallelismConfig(),
        activation_checkpoint=ActivationCheckpointConfig(),
        compile=CompileConfig(),
    )
    return resolve(alone, gpus=0)


VERB = Verb("parity", parity, help=HELP, job=ParityJob, has_json=True, is_alone=True)
