"""Rules of pipelines: stages, schedules and microbatches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, count
from typing import TYPE_CHECKING

from harness.config.model import ModelConfig
from harness.config.pipeline_schedules import SCHEDULES, read_csv_schedule
from harness.config.stages import check_stages, check_weights, fitting_layers_per_stage, stages_per_rank
from harness.util.errors import ConfigError, divisors

if TYPE_CHECKING:
    from harness.config.parallelism import ParallelismConfig


def check_pipeline(layout: ParallelismConfig, model: ModelConfig, local_batch_size: int, share: int) -> None:
    """Check that the model and the batch can be split as the schedule needs.

    Args:
        layout: the layout.
        model: the model, resolved.
        local_batch_size: sequences per data-parallel rank and forward pass.
        share: sequences per data-parallel rank and step.

    Raises:
        ConfigError: naming the field, its value, the rule, and what would work.
    """
    check_weights(layout, model.n_layers)
    if layout.pp == 1:
        return
    if model.tied_embeddings:
        raise ConfigError(
            "parallelism.pp",
            layout.pp,
            "the model ties its output projection to the embedding table, and the pipeline would put "
            "them on different ranks",
            "1, or model.tied_embeddings=false",
        )
    if model.mtp.depth:
        raise ConfigError(
            "parallelism.pp",
            layout.pp,
            "multi-token prediction uses the embedding and the output projection, and the pipeline would "
            "put them on different ranks",
            "1, or model.mtp.depth=0",
        )
    if local_batch_size % layout.pp_microbatch_size:
        raise ConfigError(
            "parallelism.pp_microbatch_size",
            layout.pp_microbatch_size,
            f"must divide training.local_batch_size={local_batch_size}",
            divisors(local_batch_size),
        )
    check_stages(layout, model.n_layers)
    per_rank = stages_per_rank(layout, model.n_layers)
    if layout.pp_schedule_csv is not None:
        scheduled = read_csv_schedule(layout.pp_schedule_csv, layout.pp).num_microbatches
        rule = f"{layout.pp_schedule_csv} runs {scheduled} microbatches"
        _check_microbatches(layout, local_batch_size, share, scheduled.__eq__, rule)
        return
    schedule = SCHEDULES[layout.pp_schedule]
    if not schedule.takes_stages(per_rank):
        fits = [other.name for other in SCHEDULES.values() if other.takes_stages(per_rank)]
        if layout.pp_layers_per_stage is not None and not layout.pp_modules_per_stage:
            layers = [*fitting_layers_per_stage(layout, model.n_layers), "null"]
            fits.append(f"or parallelism.pp_layers_per_stage={', '.join(map(str, layers))}")
        raise ConfigError(
            "parallelism.pp_schedule",
            layout.pp_schedule,
            f"takes {schedule.stages_in_words} per rank, and the split gives {per_rank}",
            fits,
        )
    microbatches = local_batch_size // layout.pp_microbatch_size
    _check_microbatches(
        layout,
        local_batch_size,
        share,
        lambda number: schedule.takes_microbatches(number, layout.pp, per_rank),
        schedule.microbatches_in_words(microbatches, layout.pp, per_rank),
    )


def _check_microbatches(
    layout: ParallelismConfig, batch: int, share: int, fits: Callable[[int], bool], rule: str
) -> None:
    """Raise ConfigError if the schedule cannot run the batch's number of microbatches."""
    size = layout.pp_microbatch_size
    if fits(batch // size):
        return
    local = [b for b in divisors(share) if b % size == 0 and fits(b // size)]
    smaller = [s for s in divisors(batch) if fits(batch // s)]
    now = batch // size
    near = next(filter(fits, chain(range(now, now + layout.pp + 1), count(1)))) * size
    works = [", ".join(map(str, local))] if local else []
    if smaller:
        works.append(f"parallelism.pp_microbatch_size={', '.join(map(str, smaller))}")
    works.append(f"{near} with training.global_batch_size={near * layout.data_parallel}")
    raise ConfigError(
        "training.local_batch_size",
        batch,
        f"with parallelism.pp_microbatch_size={size} the number of microbatches is {now}, but {rule}",
        ", or ".join(works),
    )
