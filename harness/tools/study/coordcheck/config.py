"""Configuration of ``harness coordcheck``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.compose.resolve import resolve
from harness.config.fields import label, part
from harness.config.job import Job
from harness.model.architecture import require_decoder
from harness.util.errors import ConfigError


@dataclass(frozen=True)
class CoordCheckConfig:
    """Widths to compare, and the bound of the check."""

    widths: list[int] = label(factory=lambda: [64, 128, 256, 512], least=1)
    """Values of model.dim. The other widths of the model are proportional to it; heads keep their width."""
    bound: float = label(0.25, above=0)
    """Largest exponent of a power of the width that an activation may follow."""
    out: str | None = label(None, written="folder", works="a folder")
    """Folder of the picture and the numbers; null: runs_dir/name/coordcheck."""

    def validate(self, job: Job) -> None:
        """Raise ConfigError for combinations that are not allowed."""
        require_decoder(job.model, "compares widths by muP", "a decoder")
        if len(set(self.widths)) < 2:
            raise ConfigError("coordcheck.widths", self.widths, "must be at least two widths", "[64,128]")
        if job.world_size > 1:
            rule = "the check runs in one process; harness parity compares layouts"
            raise ConfigError("parallelism", f"{job.world_size} ranks", rule, "single")

    def jobs(self, job: Job) -> dict[int, Job]:
        """The job at every width, in ascending order.

        Raises:
            ConfigError: the model does not exist at a width.
        """
        # The head must return logits, not the loss.
        training = replace(job.training, loss_chunks=1)
        return {
            width: resolve(
                replace(job, training=training, model=job.model.at_width(width, field="coordcheck.widths"))
            )
            for width in sorted(set(self.widths))
        }


@dataclass(frozen=True)
class CoordCheckJob(Job):
    """A job plus the options of the check."""

    coordcheck: CoordCheckConfig = part(CoordCheckConfig)
    """Widths and bound."""
