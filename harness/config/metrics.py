"""Configuration of the ``metrics`` and ``profiling`` groups."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from harness.config.fields import Switch, label
from harness.config.registry import Registry, resolve_options
from harness.util.errors import ConfigError


@dataclass(frozen=True)
class ViewKind:
    """A view of metrics.jsonl.

    Attributes:
        view: ``module:class`` of a ``harness.metrics.views.View``, which is called with a
            ``ShownRun``.
        options: dataclass of ``metrics.views.NAME``; None: there are none.
    """

    view: str
    options: type | None = None


VIEWS: Registry[ViewKind] = Registry(
    "metrics",
    {
        "wandb": ViewKind("harness.metrics.views:WandbView"),
        "tensorboard": ViewKind("harness.metrics.views:TensorBoardView"),
    },
    field="metrics.views",
    expects="harness.config.metrics:ViewKind",
)
"""Views of metrics.jsonl."""
CONSOLES = ("plain", "none")
OFF = "off"
TENSORS = (OFF, "norms")
_SWITCHES = ("wandb", "tensorboard")
"""Views with a field of their own that switches them on."""

WANDB = Switch("metrics.wandb")
PROFILING = Switch("profiling.enable")
OF_RECORDS = Switch("metrics.tensors", "metrics.tensors=norms", reads="metrics.records")
tracing_label = functools.partial(label, needs=PROFILING)


@dataclass(frozen=True)
class MetricsConfig:
    """Which metrics are written, how often, and where. Every field is a label: none changes the results."""

    log_interval: int = label(1, least=1)
    """Optimizer steps between two rows of metrics.jsonl (and of every view of it)."""
    warmup_steps: int = label(3, least=0)
    """First steps of this process that throughput excludes: they compile, allocate and connect."""
    all_ranks: bool = label(False)
    """Also write the own values of every rank (memory, times, loss) into
    ``metrics/rank<r>.jsonl``."""
    tensors: str = label(OFF, choices=TENSORS)
    """norms: write the 2-norms of every tensor's gradient (before clipping), weight and update, the
    same on every layout, into ``tensors.bin``; `harness report` draws them by layer and step. off:
    nothing. It takes the memory of a second copy of this rank's weights during the update."""
    activations: bool = label(False)
    """Write statistics of the residual stream after every block (root mean square, largest value,
    kurtosis), the entropy of every router and the largest score of every attention, the same on
    every layout, into ``activations.bin``; `harness report` draws them by layer and step. A step
    with a record computes its forward pass once more, without the compiler."""
    tensors_interval: int = label(100, least=1, needs=OF_RECORDS)
    """Optimizer steps between two records of metrics.tensors and metrics.activations. The first and
    the last step have one too."""
    console: str = label("plain", choices=CONSOLES)
    """plain: a line for each row; none: nothing."""
    wandb: bool = label(False)
    """Also log to Weights & Biases; offline when there is no API key. WANDB_ENTITY and WANDB_MODE
    are W&B's own."""
    wandb_project: str | None = label(None, needs=WANDB)
    """W&B project; null: WANDB_PROJECT, or else ``harness``."""
    wandb_group: str | None = label(None, needs=WANDB)
    """W&B group of this run, e.g. the name of a sweep; null: WANDB_RUN_GROUP."""
    tensorboard: bool = label(False)
    """Also write TensorBoard event files into the ``tensorboard`` folder of the run."""
    views: dict[str, Any] = label(factory=dict)
    """More views, each by its name with its options: {mlflow: {experiment: my_experiment}}.
    Packages add them: experiments/extensions has mlflow."""

    def resolve(self) -> MetricsConfig:
        """Return the config with the defaults of the views' options.

        Raises:
            ConfigError: no such view, or no such option of it.
        """
        views = {}
        for name, options in self.views.items():
            field = f"metrics.views.{name}"
            if name in _SWITCHES:
                raise ConfigError(field, options, "no such view", f"metrics.{name}=true")
            if name not in VIEWS:
                works = [*VIEWS.plugins, "a package that adds it (mlflow: experiments/extensions)"]
                raise ConfigError(field, options, "no such view", works)
            if not isinstance(options, dict):
                raise ConfigError(
                    field, options, "must be a mapping of the view's options", f"{field}={{}}"
                )
            views[name] = resolve_options(options, VIEWS[name].options, field, f"the view {name}")
        return replace(self, views=views)

    @property
    def records(self) -> bool:
        """Whether steps have records."""
        return self.tensors != OFF or self.activations

    @property
    def shown(self) -> dict[str, dict[str, Any]]:
        return {**{name: {} for name in _SWITCHES if getattr(self, name)}, **self.views}


@dataclass(frozen=True)
class ProfilingConfig:
    """Traces of complete steps by torch's profiler, and snapshots of GPU memory."""

    enable: bool = label(False)
    """Write traces."""
    interval: int = tracing_label(100)
    """Steps from one trace to the next; the first trace ends this many steps after the process
    starts."""
    warmup: int = tracing_label(3, least=0)
    """Steps before each trace in which the profiler already runs but records nothing."""
    active: int = tracing_label(1, least=1)
    """Steps per trace."""
    ranks: list[int] = tracing_label(factory=lambda: [0])
    """Ranks that write traces."""
    phases: bool = label(False)
    """Write the time of each phase of a step on each rank (``phases/``), and warn about slow
    ranks."""
    memory_snapshot: bool = tracing_label(False)
    """Also write snapshots of GPU memory by source line: with each trace, and when memory runs
    out."""

    def validate(self, steps: int, world_size: int) -> None:
        if not self.enable:
            return
        traced = self.warmup + self.active
        if self.interval < traced:
            rule = f"must hold profiling.warmup + profiling.active = {traced} steps"
            raise ConfigError("profiling.interval", self.interval, rule, f"{traced} or more")
        if self.interval > steps:
            rule = f"a run of training.steps={steps} would write no trace"
            works = f"at most {steps}" if steps >= traced else f"training.steps={self.interval}"
            raise ConfigError("profiling.interval", self.interval, rule, works)
        unknown = [rank for rank in self.ranks if not 0 <= rank < world_size]
        if unknown or not self.ranks:
            rule = f"must be ranks of this job, which has {world_size}"
            raise ConfigError("profiling.ranks", self.ranks, rule, f"[0] to [{world_size - 1}]")

    def refuse_snapshots(self, why: str) -> None:
        """Reject memory snapshots without a GPU, for the reason ``why``."""
        if self.enable and self.memory_snapshot:
            rule = f"snapshots need a GPU, and {why}"
            raise ConfigError(
                "profiling.memory_snapshot", True, rule, "false, or cluster.device=cuda"
            )
