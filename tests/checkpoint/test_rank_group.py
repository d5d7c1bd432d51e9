"""Calls of all ranks that fail on one."""

from unittest import mock

import torch
from held import Held
from jobs import tiny

from harness.checkpoint.catalog import DamagedCheckpoint
from harness.checkpoint.state import RankGroup
from harness.model.spec import tensor_shapes
from harness.tools.inference.model import InferenceModel
from harness.util.errors import UserError
from harness.weights.detect import WeightFolder

ERRORS = (
    UserError("x=1: refused"),
    DamagedCheckpoint("cut"),
    OSError(5, "Input/output error"),
    KeyError("bug"),
)


def _raise(error):
    raise error


def fail_on_the_second():
    """The error that this rank raises for each failure of rank 1."""
    ranks, raised = RankGroup(60), []
    for error in ERRORS:
        try:
            ranks.everywhere(lambda error=error: _raise(error) if ranks.rank == 1 else None)
        except Exception as caught:
            raised.append(f"{type(caught).__name__}: {caught}")
    ranks.everywhere(lambda: None)
    return raised


def test_an_error_of_one_rank_is_raised_on_all(pool):
    first, second = pool.run(2, fail_on_the_second)
    known = [
        "UserError: x=1: refused (rank 1)",
        "DamagedCheckpoint: cut (rank 1)",
        "OSError: [Errno 5] Input/output error (rank 1)",
    ]
    assert first == [*known, "PeerFailed: 'bug' (rank 1)"]
    assert second == [*known, "KeyError: 'bug'"]


def load(job):
    """Load weights whose file rank 1 cannot read; return this rank's error."""
    model = InferenceModel(job, torch.device("cpu"))
    weights = Held({name: torch.zeros(shape) for name, shape in tensor_shapes(job.model).items()})
    if model.ranks.rank == 1:
        weights.read = lambda name: _raise(UserError(f"a.pth: {name} is damaged"))
    with mock.patch("harness.tools.inference.model.open_source", lambda *_: weights):
        try:
            model.load(WeightFolder("meta", "folder", {}))
        except UserError as error:
            return str(error)
    return ""


def test_weights_that_one_rank_cannot_read(pool):
    """Meta's files and DCP checkpoints of other software are read without a collective."""
    job = tiny("parallelism=fsdp", "parallelism.dp_shard=2", "training.global_batch_size=2")
    assert pool.run(2, load, job) == ["a.pth: tok_embeddings.weight is damaged (rank 1)"] * 2
