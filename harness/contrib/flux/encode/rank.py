"""The writer of a job's latents, on the device of this process."""

from __future__ import annotations

from harness.contrib.flux.encode.config import EncodeJob
from harness.contrib.flux.encode.writer import LatentWriter
from harness.train.setup import pick_device


def writer_of(job: EncodeJob) -> LatentWriter:
    """Return the writer of a job's latents.

    Raises:
        UserError: the pictures or the encoders cannot be read.
    """
    return LatentWriter(job, pick_device(job))
