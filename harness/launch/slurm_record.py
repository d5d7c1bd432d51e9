"""``slurm/job.json`` of a run folder, which identifies the run's job in SLURM's queue."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from harness.config.fields import from_dict
from harness.launch.queue import Jobs, Queued
from harness.run.folder import last_lines
from harness.run.result import write_json_atomically
from harness.util.encoding import read_object
from harness.util.errors import ConfigError, MachineError, UserError

FILE = "slurm/job.json"


@dataclass(frozen=True)
class SlurmJobRecord:
    """Record of a run's SLURM job; written before submission, and again once SLURM has returned its id.

    Attributes:
        name: the job's name, unique among the user's jobs.
        index: index of the array task; None for a job that is not an array.
        job_id: the id as ``squeue`` prints it; None until SLURM has answered.
        restarts: how often SLURM has restarted the job.
        cancelled: whether the job was cancelled.
        begun: whether an attempt has begun and has not said how it ended.
        logs: folder of the job script's log; None in files of earlier versions.
    """

    name: str
    index: int | None = None
    job_id: str | None = None
    restarts: int = 0
    cancelled: bool = False
    logs: str | None = None
    begun: bool = False

    def write(self, run_dir: Path) -> None:
        """Write the record into a run folder.

        Raises:
            OSError: the file cannot be written.
        """
        path = run_dir / FILE
        path.parent.mkdir(exist_ok=True)
        write_json_atomically(path, asdict(self))

    @classmethod
    def read(cls, run_dir: Path) -> SlurmJobRecord | None:
        """Return the record of a run folder; None if the run was never submitted.

        Raises:
            UserError: the file cannot be read, or is damaged.
        """
        path = run_dir / FILE
        try:
            plain = read_object(path)
        except FileNotFoundError:
            return None
        if "name" not in plain:
            raise UserError(f"{path}: damaged: name is missing")
        try:
            job_record: SlurmJobRecord = from_dict(cls, plain)
        except ConfigError as error:
            raise UserError(f"{path}: damaged, or another version wrote it: {error}") from None
        return job_record

    @property
    def key(self) -> tuple[str, str]:
        """Id and name, which identify the job once SLURM has returned its id."""
        return self.job_id or "", self.name

    def find(self, listed: Jobs) -> Queued | None:
        """Return the job in the queue; None if it has ended, or its controller died before submitting it."""
        return listed.find(self.job_id, self.name, self.index)

    @property
    def ended_without_result(self) -> str:
        """A message that the job ended without a result, with the path of its log if known."""
        return f"{self._named} ended without a result{self._look}"

    @property
    def batch_was_killed(self) -> str:
        """A message that the job's process on the first node was killed."""
        return f"the batch process of {self._named} was killed{self._look}"

    @property
    def _named(self) -> str:
        return f"SLURM job {self.job_id}" if self.job_id else f"the SLURM job {self.name}"

    @property
    def _look(self) -> str:
        return f", see {self.log}" if self.log is not None else ""

    @property
    def log(self) -> Path | None:
        """Path of the job script's output, if known."""
        return Path(self.logs) / f"{self.job_id}_0_log.out" if self.logs and self.job_id else None


class JobLost(MachineError):
    """A SLURM job that ended without a result.

    Args:
        record: the record of the job.
        state: SLURM's final state of the job; None if SLURM has forgotten it.
    """

    def __init__(self, record: SlurmJobRecord, state: str | None) -> None:
        # SLURM keeps no record of a waiting task of an array that is cancelled.
        default = "machine" if record.begun else "unknown"
        self.kind = "cancelled" if record.cancelled else _KINDS.get(state or "", default)
        known = f"SLURM says {state}" if state else "SLURM does not know it any more"
        how = record.batch_was_killed if self.kind == "machine" else record.ended_without_result
        log = "" if record.log is None else last_lines(record.log)
        super().__init__(f"{how}; {known}{log}")


_KINDS = {
    "NODE_FAIL": "node",
    "BOOT_FAIL": "node",
    "PREEMPTED": "preempted",
    "TIMEOUT": "preempted",
    "DEADLINE": "preempted",
    "OUT_OF_MEMORY": "out_of_memory",
    "CANCELLED": "cancelled",
}
