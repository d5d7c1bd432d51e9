"""The verb ``tensors``."""

from harness.compose.verb import Result, Verb
from harness.config.job import Job
from harness.model.spec import tensor_shapes

HELP = """`harness tensors`: list the tensors of a model.

harness tensors model=arcee_debug
"""


def tensors(job: Job, overrides: list[str]) -> Result:
    """List names and shapes."""
    shapes = tensor_shapes(job.model)
    return Result(
        dict(shapes), "".join(f"{name} {list(shape)}\n" for name, shape in shapes.items())
    )


VERB = Verb("tensors", tensors, help=HELP, job=Job, has_json=True)
