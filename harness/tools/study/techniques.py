"""Options of ``harness converge``, and its runs: the control and every technique, once per seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from harness.compose.composer import Composed, Composer
from harness.config.fields import label, part, with_value
from harness.config.job import Job, differing_numerics
from harness.launch.inputs import require_vocabulary
from harness.util.errors import ConfigError, UserError

CONTROL = "control"


@dataclass(frozen=True)
class ConvergeConfig:
    """Control, techniques, seeds and bounds of a comparison of loss curves."""

    control: str = label("")
    """Overrides of the control, separated by spaces; empty: the job as composed. Techniques start
    from it."""
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
    final_bound: float = label(0.01, above=0)
    """Largest relative difference of the final loss that counts as equal."""
    speed_bound: float = label(0.01, above=0)
    """Largest relative difference of the learning speed that counts as equal: 0.01 is 1 % more or fewer steps
    to the same loss."""
    norm_bound: float = label(0.01, above=0)
    """Largest relative difference of the gradient norm that counts as equal; for techniques that claim the
    control's numerics."""
    out: str | None = label(None, written="folder", works="a folder")
    """Folder of the report; null: runs_dir/name/converge."""

    def validate(self, job: Job) -> None:
        """Raise ConfigError for combinations that are not allowed."""
        if not self.seeds:
            raise ConfigError("converge.seeds", "[]", "needs at least one seed", "[1,2,3]")
        repeated = [seed for seed in self.seeds if self.seeds.count(seed) > 1]
        if repeated:
            raise ConfigError(
                "converge.seeds", self.seeds, f"{repeated[0]} occurs twice", "each seed once"
            )
        if 2 * self.smooth_steps > job.steps:
            rule = f"must be at most half of training.steps={job.steps}"
            raise ConfigError(
                "converge.smooth_steps", self.smooth_steps, rule, f"at most {job.steps // 2}"
            )
        if job.metrics.log_interval > self.smooth_steps:
            rule = f"must be at most converge.smooth_steps={self.smooth_steps}, whose steps need a loss"
            works = f"at most {self.smooth_steps}"
            raise ConfigError("metrics.log_interval", job.metrics.log_interval, rule, works)
        for field, known in (
            ("techniques", self.techniques),
            ("expert_techniques", self.expert_techniques),
        ):
            if CONTROL in known:
                rule = "this is the name of the job itself"
                raise ConfigError(
                    f"converge.{field}.{CONTROL}", known[CONTROL], rule, "another name"
                )

    def chosen(self, *, has_experts: bool) -> dict[str, str]:
        """Return the techniques to run: name -> overrides.

        Raises:
            ConfigError: a name in ``only`` is unknown, or there is no technique.
        """
        known = self.techniques | (self.expert_techniques if has_experts else {})
        for name in self.only:
            if name not in known:
                raise ConfigError("converge.only", name, "no such technique", sorted(known))
        if not known:
            raise ConfigError(
                "converge.techniques",
                "{}",
                "needs at least one technique",
                "{bf16: precision=bf16}",
            )
        return {name: known[name] for name in self.only or known}


@dataclass(frozen=True)
class ConvergeJob(Job):
    """A job plus the options of the comparison."""

    varies: ClassVar[bool] = True

    converge: ConvergeConfig = part(ConvergeConfig)
    """Control, techniques, seeds and bounds."""


@dataclass(frozen=True)
class Technique:
    """One technique and its runs.

    Attributes:
        overrides: its overrides, besides those of all runs.
        runs: a run for every seed, by seed; empty if it is skipped.
        differs_in: numeric fields whose values differ from the control's.
        skipped: why it cannot run here, or is not compared.
    """

    name: str
    overrides: str
    runs: dict[int, Composed]
    differs_in: Sequence[str] = ()
    skipped: str = ""

    @property
    def job(self) -> Job:
        """The job of the first seed."""
        job: Job = next(iter(self.runs.values())).job
        return job


def compose_techniques(job: ConvergeJob, overrides: Sequence[str]) -> list[Technique]:
    """Compose the control and the techniques, in this order."""
    config = job.converge
    common = [text for text in overrides if not text.lstrip("+").startswith("converge.")]
    common += config.control.split()
    chosen = config.chosen(has_experts=job.model.moe.enabled)
    composer = Composer("converge", ConvergeJob)
    control = _compose(composer, CONTROL, "", common, config)
    techniques: list[Technique] = []
    for name, changes in chosen.items():
        try:
            technique = _compose(composer, name, changes, common, config)
        except ConfigError as error:
            techniques.append(Technique(name, changes, {}, skipped=str(error)))
            continue
        except UserError as error:
            raise UserError(f"converge.techniques.{name}: {error}") from error
        _refuse_other_labels(technique, techniques)
        techniques.append(_compared(control.job, technique, config))
    if all(technique.skipped for technique in techniques):
        rule = f"none of these techniques can run; {techniques[0].name}: {techniques[0].skipped}"
        raise ConfigError("converge.only", f"[{','.join(chosen)}]", rule)
    return [control, *techniques]


def _compose(
    composer: Composer, name: str, changes: str, common: Sequence[str], config: ConvergeConfig
) -> Technique:
    """Compose a technique once, and copy it for every seed."""
    overrides = [*common, *changes.split()]
    job = composer.job(overrides).plain
    require_vocabulary(job)
    runs = {
        seed: Composed(
            [*overrides, f"training.seed={seed}"], with_value(job, "training.seed", seed)
        )
        for seed in config.seeds
    }
    return Technique(name, changes, runs)


def _compared(control: Job, technique: Technique, config: ConvergeConfig) -> Technique:
    job = technique.job
    if job.id == control.id:
        return replace(technique, runs={}, skipped="the same job as the control")
    if config.world_size is not None and job.world_size > config.world_size:
        reason = f"{job.world_size} ranks, converge.world_size={config.world_size}"
        return replace(technique, runs={}, skipped=reason)
    if (job.steps, job.metrics.log_interval) != (control.steps, control.metrics.log_interval):
        rule = "changes training.steps or metrics.log_interval, so the curves cannot be compared step by step"
        raise ConfigError(f"converge.techniques.{technique.name}", technique.overrides, rule)
    return replace(technique, differs_in=differing_numerics(control, job))


def _refuse_other_labels(technique: Technique, others: Sequence[Technique]) -> None:
    """Refuse a technique that differs from another one in labels only: their curves are the same."""
    for other in others:
        if other.runs and other.job.id == technique.job.id and other.job != technique.job:
            rule = f"differs from {other.name} in labels only, which do not change the curve"
            raise ConfigError(f"converge.techniques.{technique.name}", technique.overrides, rule)
