"""``python -m harness.parity``: proof on CPU ranks that every layout computes what one process computes.

For each layout and for one process the same job is trained from the same seed; losses, gradient norms and
the gradients themselves, before clipping, are compared. Gradients are the sensitive figure: clipping and
Adam hide an error of scale from the loss.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.app import run_verb
from harness.compose import Composer
from harness.config import label, part
from harness.errors import EXIT_OK, ConfigError
from harness.job import Job, differing_numerics
from harness.model.shapes import BALANCE_BIAS, block_prefix

if TYPE_CHECKING:
    from torch import Tensor

EXIT_DIFFERS = 1
TOLERANCES = {"float32": (1e-5, 1e-4), "bfloat16": (1e-3, 5e-2), "float8": (1e-3, 2e-1)}


@dataclass
class ParityConfig:
    """What is compared, and how closely."""

    matrix: dict[str, str] = label(factory=dict)
    """Known layouts: a name, and the overrides that make it, separated by spaces."""
    expert_matrix: dict[str, str] = label(factory=dict)
    """The same for models with experts."""
    layouts: list[str] = label(factory=list)
    """Names out of the matrix to run; empty means all."""
    world_size: int = label(8)
    """Ranks to start; layouts that need more are skipped, and said to be."""
    steps: int = label(10)
    """Optimizer steps of every run."""
    loss_tolerance: float | None = label(None)
    """Largest relative difference of a step's loss; null: 1e-5 in float32, 1e-3 in bfloat16 and float8."""
    gradient_tolerance: float | None = label(None)
    """Largest relative difference of a gradient (2-norm, per parameter) or of the norm; null: 1e-4 in
    float32, 5e-2 in bfloat16, 0.2 in float8."""

    def validate(self, training_steps: int) -> None:
        """Raises ConfigError for counts and tolerances that compare nothing."""
        if not 1 <= self.steps <= training_steps:
            raise ConfigError(
                "parity.steps", self.steps, f"must be from 1 to training.steps={training_steps}"
            )
        if self.world_size < 1:
            raise ConfigError("parity.world_size", self.world_size, "must be at least 1")
        for name in ("loss_tolerance", "gradient_tolerance"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"parity.{name}", value, "must not be negative, or null")


@dataclass
class ParityJob(Job):
    """A job with what is to be compared."""

    parity: ParityConfig = part(ParityConfig)
    """What is compared."""


@dataclass(frozen=True)
class Trace:
    """What one run did on one rank."""

    losses: list[float]
    """Loss of every step; with multi-token prediction, each followed by its own."""
    norms: list[float]
    """Gradient norm of every step, before clipping."""
    valid_tokens: list[int]
    """Tokens of every step that the loss counts."""
    gradients: list[dict[str, Tensor]]
    """Whole gradients of the first and the last step, of the parameters this rank holds."""
    biases: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Balancing biases of the experts this rank holds, after the last step."""


@dataclass(frozen=True)
class Verdict:
    """How far one layout is from one process: the largest relative difference of each figure."""

    layout: str
    ranks: int
    loss: float
    gradient: float
    worst_parameter: str
    norm: float
    passed: bool


def trace(job_json: str, steps: int) -> Trace:
    """Trains on this rank of a process group; the gradients are whole, and on rank 0 of all parameters."""
    import torch

    from harness.data.tokenizer import build_tokenizer
    from harness.loop.batches import loader_of
    from harness.loop.engine import Engine
    from harness.loop.setup import set_up_process

    job = Job.from_json(job_json)
    set_up_process(job)
    engine = Engine(job, torch.device("cpu"))
    loader = loader_of(job, build_tokenizer(job.tokenizer), engine.rows)
    losses, norms, tokens, gradients = [], [], [], []
    for step in range(steps):
        outcome = engine.gradients(loader.next())
        losses += [outcome.loss, *([] if outcome.mtp_loss is None else [outcome.mtp_loss])]
        norms.append(outcome.grad_norm)
        tokens.append(outcome.valid_tokens)
        if step in (0, steps - 1):
            gradients.append(whole_gradients(engine))
        engine.update(outcome.norm)
    biases = {
        block_prefix(job.model, layer) + BALANCE_BIAS: moe.balance_bias
        for part in engine.parts
        for layer, moe in part.mixtures.items()
        if moe.balance_bias is not None
    }
    return Trace(losses, norms, tokens, gradients, biases)


def whole_gradients(engine: Any) -> dict[str, Tensor]:
    """Gradients of this rank's parameters, gathered over the ranks that share each; all ranks call it."""
    from torch.distributed.tensor import DTensor

    whole = {}
    for name, parameter in engine.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, f"{name} has no gradient"
        # Gathering would complete a partial gradient, and hide that nothing else does.
        assert getattr(gradient, "placements", None) == getattr(parameter, "placements", None), name
        whole[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
    return whole


def compare(
    layout: str, ranks: int, reference: Trace, traces: list[Trace], tolerances: tuple[float, float]
) -> Verdict:
    """Holds the traces of all ranks of a layout against the one of a single process.

    Every rank's figures count: a rank that sees another loss, or lacks a gradient, is an error too.
    """
    loss = _largest(reference.losses, [t.losses for t in traces])
    norm = _largest(reference.norms, [t.norms for t in traces])
    worst, worst_parameter = 0.0, ""
    for index, expected in enumerate(reference.gradients):
        found: set[str] = set()
        for each in traces:
            for name, gradient in each.gradients[index].items():
                found.add(name)
                difference = float(
                    (gradient - expected[name]).double().norm() / expected[name].double().norm()
                )
                if difference > worst or math.isnan(difference):
                    worst, worst_parameter = difference, name
                if math.isnan(worst):
                    return Verdict(layout, ranks, loss, worst, worst_parameter, norm, passed=False)
        missing = expected.keys() - found
        if missing:
            worst, worst_parameter = float("inf"), min(missing)
    held = [(name, bias) for trace in traces for name, bias in trace.biases.items()]
    # Bitwise: they follow from counts.
    moved = [name for name, bias in held if not bias.equal(reference.biases[name])]
    moved += reference.biases.keys() - dict(held).keys()
    worst_parameter = min(moved, default=worst_parameter)
    same = not moved and all(t.valid_tokens == reference.valid_tokens for t in traces)
    # Comparisons with a NaN are false: one fails.
    passed = same and loss <= tolerances[0] and worst <= tolerances[1] and norm <= tolerances[1]
    return Verdict(layout, ranks, loss, worst, worst_parameter, norm, passed)


def parity(job: ParityJob, overrides: list[str]) -> int:
    """Runs the chosen layouts and prints the table; returns the exit code."""
    from harness.cluster.pool import RankFailed, RankPool

    config = job.parity
    config.validate(job.training.steps)
    is_float8 = job.precision.linear != "none"
    defaults = TOLERANCES["float8" if is_float8 else job.precision.param_dtype]
    tolerances = (
        defaults[0] if config.loss_tolerance is None else config.loss_tolerance,
        defaults[1] if config.gradient_tolerance is None else config.gradient_tolerance,
    )
    layouts = compose_layouts(config, overrides, has_experts=job.model.moe.enabled)
    fitting = {name: (ranks, each) for name, (ranks, each) in layouts.items() if ranks <= config.world_size}
    out = sys.stdout
    failed: list[str] = []
    with RankPool(max([1, *(ranks for ranks, _ in fitting.values())])) as pool:
        references: dict[str, Trace] = {}
        out.write(HEADER)
        for name, (ranks, each) in layouts.items():
            if name not in fitting:
                out.write(f"{name:<28} {ranks:>5}  skipped: parity.world_size={config.world_size}\n")
                continue
            alone = single_process(each)
            if alone.id not in references:
                [references[alone.id]] = pool.run(1, trace, alone.to_json(), config.steps)
            reference = references[alone.id]
            try:
                verdict = compare(
                    name, ranks, reference, pool.run(ranks, trace, each.to_json(), config.steps), tolerances
                )
            except RankFailed as error:
                failed.append(name)
                out.write(f"{name:<28} {ranks:>5}  FAILED\n{error}\n")
                continue
            if not verdict.passed:
                failed.append(name)
            out.write(line(verdict))
            out.flush()
    out.write(
        f"{len(fitting) - len(failed)} of {len(fitting)} layouts agree with one process "
        f"over {config.steps} steps ({job.precision.linear if is_float8 else job.precision.param_dtype}; "
        f"tolerance {tolerances[0]:g} loss, {tolerances[1]:g} gradients)\n"
    )
    return EXIT_DIFFERS if failed or not fitting else EXIT_OK


HEADER = f"{'layout':<28} {'ranks':>5} {'loss':>9} {'gradient':>9} {'norm':>9}  verdict  worst parameter\n"


def line(verdict: Verdict) -> str:
    """One row of the table."""
    return (
        f"{verdict.layout:<28} {verdict.ranks:>5} "
        f"{verdict.loss:>9.1e} {verdict.gradient:>9.1e} {verdict.norm:>9.1e}  "
        f"{'ok     ' if verdict.passed else 'DIFFERS'}  {verdict.worst_parameter}\n"
    )


def compose_layouts(
    config: ParityConfig, overrides: list[str], *, has_experts: bool = False
) -> dict[str, tuple[int, Job]]:
    """The chosen layouts as jobs with the same numerics: name -> (ranks, job).

    Raises:
        ConfigError: a name that the matrix does not have, or a layout that changes the numerics.
    """
    matrix = config.matrix | (config.expert_matrix if has_experts else {})
    for name in config.layouts:
        if name not in matrix:
            raise ConfigError("parity.layouts", name, "no such layout", sorted(matrix))
    jobs: dict[str, tuple[int, Job]] = {}
    with Composer("parity", ParityJob) as composer:
        for name in config.layouts or matrix:
            composed = composer.job([*overrides, *matrix[name].split()])
            job = Job(**{field.name: getattr(composed, field.name) for field in dataclasses.fields(Job)})
            first = next(iter(jobs.values()), (0, job))[1]
            differing = differing_numerics(first, job)
            if differing:
                raise ConfigError("parity.matrix", name, f"changes the numerics: {', '.join(differing)}")
            jobs[name] = (job.world_size, job)
    return jobs


def single_process(job: Job) -> Job:
    """The same experiment on one rank, eager, with everything kept and nothing cut into pieces.

    Scales of float8 are taken from what goes through a linear together: there the one rank takes as many rows
    at once as the layout's ranks do.
    """
    layout, rows = job.parallelism, None
    if job.precision.linear != "none":
        rows = layout.pp_microbatch_size if layout.pp > 1 else job.local_batch_size
    training = dataclasses.replace(job.training, local_batch_size=rows, loss_chunks=1)
    plain = {name: type(getattr(job, name))() for name in ("parallelism", "activation_checkpoint", "compile")}
    return dataclasses.replace(Job.from_json(job.to_json()), training=training, **plain).resolve(gpus=0)


def _largest(expected: list[float], found: list[list[float]]) -> float:
    """Largest relative difference over steps and ranks; NaN where any figure is one."""
    differences = [abs(a - b) / abs(b) for each in found for a, b in zip(each, expected, strict=True)]
    return math.nan if any(math.isnan(d) for d in differences) else max(differences)


def main() -> None:
    """Entry point of ``python -m harness.parity`` and of the console script."""
    run_verb(parity, config_name="parity", schema=ParityJob)


if __name__ == "__main__":
    main()
