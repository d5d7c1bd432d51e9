"""Configuration of ``harness converge``."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.fields import label, part
from harness.config.job import Job
from harness.util.errors import ConfigError

CONTROL, TWIN = "control", "twin"


@dataclass(frozen=True)
class ConvergeConfig:
    """Control, techniques, seeds and bounds of a comparison of loss curves."""

    control: str = label("")
    """Overrides of the control, separated by spaces; empty: the job as composed. Techniques start from it."""
    twin: str = label("training.local_batch_size=1")
    """Overrides that compute the control's numbers in another order, to measure the effect of rounding;
    empty: do not compare techniques of the same numerics by rounding."""
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
    """Number of last steps whose mean is the final loss, and length of a block of steps."""
    level: float = label(0.05, above=0, below=0.5)
    """Significance level of all tests together (Holm), and of each claim of equality."""
    final_bound: float = label(0.01, above=0)
    """Largest relative difference of the final loss that counts as equal."""
    speed_bound: float = label(0.01, above=0)
    """Largest relative difference of the learning speed that counts as equal: 0.01 is 1 % more or fewer steps
    to the same loss."""
    rounding_factor: float = label(10.0, above=1)
    """Techniques with the control's numerics may depart from it this many times farther than the twin."""
    out: str | None = label(None, written="folder", works="a folder")
    """Folder of the report; null: runs_dir/name/converge."""

    def validate(self, job: Job) -> None:
        """Raise ConfigError for combinations that are not allowed."""
        if not self.seeds:
            raise ConfigError("converge.seeds", "[]", "needs at least one seed", "[1,2,3]")
        repeated = [seed for seed in self.seeds if self.seeds.count(seed) > 1]
        if repeated:
            raise ConfigError("converge.seeds", self.seeds, f"{repeated[0]} occurs twice", "each seed once")
        if 2 * self.smooth_steps > job.steps:
            raise ConfigError(
                "converge.smooth_steps",
                self.smooth_steps,
                f"must be at most half of training.steps={job.steps}",
                f"at most {job.steps // 2}",
            )
        if job.metrics.log_interval > self.smooth_steps:
            raise ConfigError(
                "metrics.log_interval",
                job.metrics.log_interval,
                f"must be at most converge.smooth_steps={self.smooth_steps}; every block needs a loss",
                f"at most {self.smooth_steps}",
            )
        for field, known in (
            ("techniques", self.techniques),
            ("expert_techniques", self.expert_techniques),
        ):
            for name in {CONTROL, TWIN} & known.keys():
                rule = "this is the name of the control or its twin"
                raise ConfigError(f"converge.{field}.{name}", known[name], rule, "another name")

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
                "converge.techniques", "{}", "needs at least one technique", "{bf16: precision=bf16}"
            )
        return {name: known[name] for name in self.only or known}


@dataclass(frozen=True)
class ConvergeJob(Job):
    """A job plus the options of the comparison."""

    converge: ConvergeConfig = part(ConvergeConfig)
    """Control, techniques, seeds and bounds."""
