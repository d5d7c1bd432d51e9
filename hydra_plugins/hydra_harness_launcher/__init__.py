"""Hydra's launcher ``hydra/launcher=harness``: runs the points that one of Hydra's sweepers chooses.

Hydra imports this module whenever it starts, so it imports nothing else of the harness.
"""

# Without `from __future__ import annotations`: Hydra executes plugins before they are in sys.modules, where
# dataclasses look up annotations that are texts.
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher


@dataclass
class HarnessLauncherConf:
    """``hydra.launcher``.

    Attributes:
        objective: the column of ``result.json`` that the sweeper optimizes, or a list of columns.
        failed: the value that failed and illegal points report; None reports them as failed.
    """

    _target_: str = "hydra_plugins.hydra_harness_launcher.HarnessLauncher"
    objective: Any = "loss"
    failed: float | None = None


ConfigStore.instance().store(
    group="hydra/launcher", name="harness", node=HarnessLauncherConf, provider="harness"
)


class HarnessLauncher(Launcher):
    """Runs each batch of points as jobs of the harness, and returns when all have ended.

    The task function is a ``harness.launch.sweep.study.Study``, which has the objective from the same config.
    """

    def __init__(self, **_config: Any) -> None:
        self._study: Any = None

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        """Keep the study that runs the points."""
        self._study = task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Run points; return their values in order, a failed point with its reason."""
        outcomes = self._study.run(job_overrides)
        return [
            PointReturn(
                overrides=list(overrides),
                status=JobStatus.FAILED if outcome.error is not None else JobStatus.COMPLETED,
                _return_value=outcome.error if outcome.error is not None else outcome.value,
            )
            for overrides, outcome in zip(job_overrides, outcomes, strict=True)
        ]


class PointReturn(JobReturn):
    """The result of a point; unlike Hydra's, it prints nothing when a sweeper reads a failure."""

    @property
    def return_value(self) -> Any:
        """The value of the objective, a list for several.

        Raises:
            PointFailedError: the point failed, or is no valid job.
        """
        if self.status == JobStatus.FAILED:
            raise self._return_value
        return self._return_value

    @return_value.setter
    def return_value(self, value: Any) -> None:
        self._return_value = value
