"""Runs of one rank in this process, and what they left."""

import jobs
from resumable_runs import SMALL

from harness.checkpoint.catalog import CheckpointFolder, remove
from harness.metrics.jsonl import read_metrics
from harness.util.errors import EXIT_OK, EXIT_USER


class Run:
    """A run folder after a run."""

    def __init__(self, folder):
        self.folder, self.path, self.row = folder, folder.path, folder.row
        self.checkpoints = CheckpointFolder(str(folder.path / "checkpoints"))

    @property
    def start_step(self):
        return self.row["start_step"]

    def series(self, name):
        """A metric by step."""
        return {
            row["step"]: row[name]
            for row in read_metrics(self.path / "metrics.jsonl")
            if name in row
        }

    @property
    def losses(self):
        return self.series("loss")

    @property
    def error(self):
        error = self.folder.errors.first()
        assert error is not None
        return error

    def step(self, step):
        return self.path / "checkpoints" / f"step-{step}"

    def superseded(self):
        return sorted(
            path.name for path in (self.path / "checkpoints" / "superseded" / "1").iterdir()
        )

    def forget_the_end(self, *steps):
        """Make the run look as if killed before it wrote the checkpoints of ``steps``."""
        (self.path / "result.json").unlink()
        for step in steps:
            remove(str(self.step(step)))


def start(tmp_path, *overrides, adopt=False, code=EXIT_OK):
    """Train like the user's command, to the given exit code."""
    done = jobs.train(tmp_path, *SMALL, "training.steps=8", *overrides, adopt=adopt)
    assert done.code == code
    return Run(done.folder)


def failed(tmp_path, *overrides, code=EXIT_USER):
    """The one-line error of a run."""
    message = start(tmp_path, *overrides, code=code).error["message"]
    assert "\n" not in message
    return message


def flip(path, at=None):
    """Flip one bit of a file, by default in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)
