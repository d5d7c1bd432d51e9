"""Observers of the training loop, in the order in which they are called."""

from harness.config.job import Job
from harness.config.metrics import OFF
from harness.config.training import OBSERVERS
from harness.train.objective import objective_of
from harness.train.observer import Observer


def observers_of(job: Job) -> list[type[Observer]]:
    """Return the observers of a job in the order in which they are called; they are closed in reverse."""
    order = (
        ("phases", job.profiling.phases),
        ("profiler", job.profiling.enable),
        ("flight_recorder", job.world_size > 1 and job.debug.flight_recorder > 0),
        ("nan_watch", job.debug.nan),
        ("tensor_values", job.metrics.tensors != OFF),
        ("activation_values", job.metrics.activations),
        ("memory", True),
        ("validation", job.validation.interval > 0),
        *((name, True) for name in objective_of(job.model).observers(job)),
        ("evaluation", job.evaluation.interval > 0),
        *((name, True) for name in job.training.observers),
        ("rank_metrics", job.metrics.all_ranks),
    )
    return [OBSERVERS[name] for name in dict.fromkeys(name for name, wanted in order if wanted)]
