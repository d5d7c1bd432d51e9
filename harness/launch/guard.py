"""Requeue a job that has lost its first node: ``python -m harness.launch.guard JOB_ID NODE``.

It runs on another node of the job. With the first node SLURM ends the batch process, but not the
job: sbatch --no-kill lets it idle until its time limit.
"""

import signal
import sys
from contextlib import suppress

from harness.launch.queue import SlurmError, nodes_of, requeue

SECONDS = 10.0


def main() -> None:
    """Watch until the job is requeued, or this process is asked to end."""
    _, job_id, first = sys.argv
    # SLURM asks at the end of the job, which that of its batch process can be.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    asked = None
    while asked is None:
        asked = signal.sigtimedwait([signal.SIGTERM], SECONDS)
        with suppress(SlurmError):
            if first not in nodes_of(job_id):
                requeue(job_id)
                return


if __name__ == "__main__":
    main()
