"""``slurm/job.json`` of a run folder: by which the run's job is found in SLURM's queue. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.cluster.queue import Queued
from harness.config import from_dict
from harness.errors import ConfigError, UserError
from harness.metrics.encoding import read_object
from harness.metrics.result import write_json_atomically

FILE = "slurm/job.json"


@dataclass(frozen=True)
class Ticket:
    """What is known of a run's SLURM job; written before it is submitted, and again when SLURM has named it.

    Attributes:
        name: the job's name, which no other job of the user has.
        index: which task of an array it is; None for a job of its own.
        job_id: as ``squeue`` prints it; None as long as SLURM has not answered.
        restarts: how often SLURM has started it again.
        cancelled: whether somebody asked the harness to cancel it.
        logs: folder of what SLURM itself logs of the job; None in files of earlier versions.
    """

    name: str
    index: int | None = None
    job_id: str | None = None
    restarts: int = 0
    cancelled: bool = False
    logs: str | None = None

    def write(self, run_dir: Path) -> None:
        """Writes it into a run folder.

        Raises:
            OSError: that cannot be.
        """
        path = run_dir / FILE
        path.parent.mkdir(exist_ok=True)
        write_json_atomically(path, asdict(self))

    @classmethod
    def read(cls, run_dir: Path) -> Ticket | None:
        """The ticket of a run folder; None if it was never submitted.

        Raises:
            UserError: it cannot be read, or is damaged.
        """
        path = run_dir / FILE
        try:
            plain = read_object(path)
        except FileNotFoundError:
            return None
        if "name" not in plain:
            raise UserError(f"{path}: damaged: name is missing")
        try:
            ticket: Ticket = from_dict(cls, plain)
        except ConfigError as error:
            raise UserError(f"{path}: damaged, or another version wrote it: {error}") from None
        return ticket

    def find(self, queue: Iterable[Queued]) -> Queued | None:
        """The job in the queue; None if it is over, or was never submitted because its controller died."""
        for job in queue:
            if self.job_id is not None and job.id == self.job_id:
                return job
            # An array's task has its place after the underscore; a single job has no underscore.
            _, _, place = job.id.partition("_")
            if (
                self.job_id is None
                and job.name == self.name
                and place == ("" if self.index is None else str(self.index))
            ):
                return job
        return None
