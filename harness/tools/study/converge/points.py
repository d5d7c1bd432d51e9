"""The runs of a comparison: control, twin and techniques, each with every seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.compose.composer import Composed, Composer
from harness.config.fields import with_value
from harness.config.job import Job, differing_numerics
from harness.launch.preflight import require_vocabulary
from harness.tools.study.converge.config import CONTROL, TWIN, ConvergeConfig, ConvergeJob
from harness.util.errors import ConfigError, UserError


@dataclass(frozen=True)
class Technique:
    """One technique and its runs.

    Attributes:
        name: its name; ``control`` and ``twin`` are the first two.
        overrides: its overrides, besides those of all runs.
        runs: a run for every seed, by seed; empty if it is skipped.
        differs_in: fields whose numerics differ from the control's.
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
    """Compose control, twin and techniques, in this order.

    Args:
        job: the composed job with its options.
        overrides: the overrides of the command line.

    Raises:
        UserError: the control or its twin is invalid, a name is unknown, a technique is misspelled, or none
            can run.
    """
    config = job.converge
    common = [each for each in overrides if not each.lstrip("+").startswith("converge.")]
    common += config.control.split()
    chosen = config.chosen(has_experts=job.model.moe.enabled)
    composer = Composer("converge", ConvergeJob)
    control = _compose(composer, CONTROL, "", common, config)
    made = [control]
    if config.twin:
        twin = _compose(composer, TWIN, config.twin, common, config)
        _check_twin(control.job, twin.job, config)
        made.append(twin)
    for name, own in chosen.items():
        try:
            technique = _compose(composer, name, own, common, config)
        except ConfigError as error:
            made.append(Technique(name, own, {}, skipped=str(error)))
            continue
        except UserError as error:
            raise UserError(f"converge.techniques.{name}: {error}") from error
        _refuse_other_labels(technique, made[1:])
        made.append(_compared(control.job, technique, config))
    if all(each.skipped for each in made if each.name in chosen):
        first = next(each for each in made if each.name in chosen)
        rule = f"none of these techniques can run; {first.name}: {first.skipped}"
        raise ConfigError("converge.only", f"[{','.join(chosen)}]", rule)
    return made


def _compose(
    composer: Composer, name: str, own: str, common: Sequence[str], config: ConvergeConfig
) -> Technique:
    """Compose a technique once, and copy it for every seed."""
    overrides = [*common, *own.split()]
    job = composer.job(overrides).plain
    require_vocabulary(job)
    runs = {
        seed: Composed([*overrides, f"training.seed={seed}"], with_value(job, "training.seed", seed))
        for seed in config.seeds
    }
    return Technique(name, own, runs)


def _compared(control: Job, technique: Technique, config: ConvergeConfig) -> Technique:
    """Return the technique with what differs from the control, or with the reason to skip it."""
    job = technique.job
    if job.id == control.id:
        return replace(technique, runs={}, skipped="the same job as the control")
    if config.world_size is not None and job.world_size > config.world_size:
        reason = f"{job.world_size} ranks, converge.world_size={config.world_size}"
        return replace(technique, runs={}, skipped=reason)
    rows, rows_of_control = ((each.steps, each.metrics.log_interval) for each in (job, control))
    if rows != rows_of_control:
        rule = "changes training.steps or metrics.log_interval, so the curves cannot be compared step by step"
        raise ConfigError(f"converge.techniques.{technique.name}", technique.overrides, rule)
    return replace(technique, differs_in=differing_numerics(control, job))


def _refuse_other_labels(technique: Technique, others: Sequence[Technique]) -> None:
    """Refuse a technique that differs from another one in labels only: their curves are the same.

    Raises:
        ConfigError: naming the technique.
    """
    for other in others:
        if other.runs and other.job.id == technique.job.id and other.job != technique.job:
            rule = f"differs from {other.name} in labels only, which do not change the curve"
            raise ConfigError(f"converge.techniques.{technique.name}", technique.overrides, rule)


def _check_twin(control: Job, twin: Job, config: ConvergeConfig) -> None:
    differing = differing_numerics(control, twin)
    if differing:
        rule = f"changes the numerics: {', '.join(differing)}"
        raise ConfigError("converge.twin", config.twin, rule, "overrides that change execution only")
    if twin.id == control.id:
        rule = "is the same job as the control"
        raise ConfigError("converge.twin", config.twin, rule, "another layout, or empty")
