"""Options of ``harness converge``, and its runs: the control and every technique, once per seed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from harness.compose.composer import Composed, Composer
from harness.config.fields import label, part, with_value
from harness.config.job import Job, differing_numerics
from harness.launch.inputs import require_vocabulary
from harness.util.errors import ConfigError, UserError

CONTROL = "control"


@dataclass(frozen=True)
class ConvergeConfig:
    """Techniques, seeds and the bound of a comparison of loss curves."""

    techniques: dict[str, str] = label(factory=dict)
    """Known techniques: name -> overrides, separated by spaces."""
    expert_techniques: dict[str, str] = label(factory=dict)
    """Additional techniques for models with experts."""
    only: list[str] = label(factory=list)
    """Names of the techniques to run; empty runs all."""
    seeds: list[int] = label(factory=lambda: [1, 2, 3, 4], least=0)
    """Seeds of initial values and data order; every technique runs once for each."""
    world_size: int | None = label(None, least=1)
    """Skip techniques that need more ranks; null: no limit."""
    smooth_steps: int = label(20, least=1)
    """Number of last steps whose mean is the final loss."""
    level: float = label(0.05, above=0, below=0.5)
    """Probability of an error at each end of an interval; 0.05 makes intervals of 90 %."""
    bound: float = label(0.01, above=0)
    """Largest relative difference that counts as equal, of the final loss, of the learning speed (0.01: 1 %
    more or fewer steps to the same loss) and of the gradient norm."""
    out: str | None = label(None, written="folder", works="a folder")
    """Folder of the report; null: runs_dir/name/converge."""

    def validate(self, job: Job) -> None:
        """Raise ConfigError for combinations that are not allowed."""
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError("converge.seeds", self.seeds, "needs seeds, each once", "[1,2,3]")
        for name in ("techniques", "expert_techniques"):
            known = getattr(self, name)
            if CONTROL in known:
                rule = "this is the name of the job itself"
                field = f"converge.{name}.{CONTROL}"
                raise ConfigError(field, known[CONTROL], rule, "another name")
        if 2 * self.smooth_steps > job.steps:
            rule = f"must be at most half of training.steps={job.steps}"
            raise ConfigError(
                "converge.smooth_steps", self.smooth_steps, rule, f"at most {job.steps // 2}"
            )
        if job.metrics.log_interval > self.smooth_steps:
            rule = f"must be at most converge.smooth_steps={self.smooth_steps}, whose steps need a loss"
            works = f"at most {self.smooth_steps}"
            raise ConfigError("metrics.log_interval", job.metrics.log_interval, rule, works)


@dataclass(frozen=True)
class ConvergeJob(Job):
    """A job plus the options of the comparison."""

    varies: ClassVar[bool] = True

    converge: ConvergeConfig = part(ConvergeConfig)
    """Techniques, seeds and the bound."""


@dataclass(frozen=True)
class Technique:
    """One technique and its runs.

    Attributes:
        overrides: its overrides, besides those of all runs.
        runs: a run for every seed, by seed; empty if it is skipped.
        has_same_numerics: whether it claims to compute the control's numbers.
        skipped: why it cannot run here, or is not compared.
    """

    name: str
    overrides: str
    runs: dict[int, Composed] = field(default_factory=dict)
    has_same_numerics: bool = True
    skipped: str = ""


def compose_techniques(job: ConvergeJob, overrides: Sequence[str]) -> list[Technique]:
    """Compose the control and the techniques, in this order."""
    config = job.converge
    known = config.techniques | (config.expert_techniques if job.model.moe.enabled else {})
    for name in config.only:
        if name not in known:
            raise ConfigError("converge.only", name, "no such technique", sorted(known))
    common = [text for text in overrides if not text.lstrip("+").startswith("converge.")]
    composer = Composer("converge", ConvergeJob)
    control: Job = composer.job(common).plain
    require_vocabulary(control)
    names = {control.id: CONTROL}
    techniques = [Technique(CONTROL, "", _runs(control, common, config.seeds))]
    for name in config.only or known:
        changes = known[name]
        typed = [*common, *changes.split()]
        try:
            own: Job = composer.job(typed).plain
            require_vocabulary(own)
        except ConfigError as error:
            techniques.append(Technique(name, changes, skipped=str(error)))
            continue
        except UserError as error:
            raise UserError(f"converge.techniques.{name}: {error}") from error
        if (own.steps, own.metrics.log_interval) != (control.steps, control.metrics.log_interval):
            rule = "changes training.steps or metrics.log_interval, so the curves have other steps"
            raise ConfigError(f"converge.techniques.{name}", changes, rule)
        skipped = ""
        if own.id in names:
            skipped = f"the same job as {names[own.id]}"
        elif config.world_size is not None and own.world_size > config.world_size:
            skipped = f"{own.world_size} ranks, converge.world_size={config.world_size}"
        names.setdefault(own.id, name)
        runs = {} if skipped else _runs(own, typed, config.seeds)
        techniques.append(
            Technique(name, changes, runs, not differing_numerics(control, own), skipped)
        )
    if all(each.skipped for each in techniques[1:]):
        reasons = "; ".join(f"{each.name}: {each.skipped}" for each in techniques[1:])
        rule = f"none of these techniques can run; {reasons}"
        raise ConfigError("converge.only", f"[{','.join(config.only or known)}]", rule)
    return techniques


def _runs(job: Job, overrides: Sequence[str], seeds: Sequence[int]) -> dict[int, Composed]:
    """A copy of a job for every seed, by seed."""
    return {
        seed: Composed(
            [*overrides, f"training.seed={seed}"], with_value(job, "training.seed", seed)
        )
        for seed in seeds
    }
