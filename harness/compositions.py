"""Random legal jobs, small enough for ranks on a laptop: what ``harness.parity parity.random`` compares.

A seed stands for one composition. Values are drawn field by field, and a draw that the job's own rules refuse
is drawn again, so that every rule is known in one place. Imports no torch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from harness.compose import Composer
from harness.errors import ConfigError, UserError
from harness.job import Job
from harness.parallelism.block_config import MODES
from harness.parallelism.config import AXES, CP_METHODS, CP_ROTATE_METHODS, RESHARD
from harness.parallelism.schedules import SCHEDULES

DENSE = ("llama3_tiny", "qwen3_debug")
MIXTURES = ("qwen3_moe_debug", "gpt_oss_debug", "deepseek_v2_debug", "deepseek_v3_debug", "llama4_debug")
DOCUMENTS = (
    "data=python_stdlib",
    "data.paths=['{stdlib}/json/*.py']",
    "data.validation_fraction=0",
    "data.mask_fraction=0",
    "model.vocab_size=258",
)
DRAWS = 500
DRAWS_OF_DEGREES = 25


def random_job(composer: Composer, seed: int, ranks: int, fixed: Sequence[str]) -> tuple[list[str], Job]:
    """Draw a legal job.

    Args:
        composer: of the primary config ``parity``.
        seed: the same seed gives the same job.
        ranks: the most ranks it may take.
        fixed: overrides that are not drawn.

    Returns:
        The overrides, and the job they compose to.

    Raises:
        UserError: no draw is legal together with the fixed overrides.
    """
    generator = random.Random(seed)
    # One model for all draws: composing another takes a fifth of a second.
    groups = _draw_groups(generator)
    held = {override.partition("=")[0] for override in fixed}
    refused = ""
    for draw in range(DRAWS):
        # The same degrees for some draws: those of one rank are legal most often, and would be drawn mostly.
        if draw % DRAWS_OF_DEGREES == 0:
            degrees = _draw_degrees(generator, ranks)
        drawn = [*groups, *_draw_fields(generator, groups, degrees)]
        overrides = [*(o for o in drawn if o.partition("=")[0] not in held), *fixed]
        try:
            job: Job = composer.job(overrides)
        except ConfigError as error:
            refused = str(error)
            continue
        if job.world_size <= ranks:
            return overrides, job
    raise UserError(f"parity.seed={seed}: none of {DRAWS} draws is legal, the last because of {refused}")


def _draw_groups(generator: random.Random) -> list[str]:
    """Draw what is chosen by files: the model, and whether samples are packed from documents."""
    model = generator.choice(DENSE if generator.random() < 0.4 else MIXTURES)
    return [f"model={model}", *(DOCUMENTS if generator.random() < 0.2 else ())]


def _draw_fields(generator: random.Random, groups: list[str], degrees: dict[str, int]) -> list[str]:
    """Draw everything else; it may be illegal."""

    def chance(probability: float, *overrides: str) -> list[str]:
        return list(overrides) if generator.random() < probability else []

    def one(field: str, *values: object) -> list[str]:
        return [f"{field}={generator.choice(values)}".replace("True", "true").replace("False", "false")]

    drawn = [f"parallelism.{axis}={degree}" for axis, degree in degrees.items()]
    drawn += one("training.seq_len", 32, 48, 60)
    drawn += one("training.global_batch_size", 4, 8, 8)
    drawn += one("training.local_batch_size", "null", "null", 1, 2, 4)
    drawn += one("training.loss_chunks", 1, 1, 1, 3)
    drawn += chance(0.3, "precision.param_dtype=bfloat16")
    drawn += one("activation_checkpoint.mode", "none", "none", *MODES)
    drawn += chance(0.1, "compile.enable=true", "compile.backend=aot_eager")
    drawn += one("parallelism.reshard_after_forward", *RESHARD)
    drawn += chance(0.2, "parallelism.cpu_offload=true")
    if degrees["pp"] > 1:
        drawn += one("parallelism.pp_schedule", *SCHEDULES)
        drawn += one("parallelism.pp_microbatch_size", 1, 1, 2)
        drawn += one("parallelism.pp_first_stage_less_layers", 0, 1)
    if degrees["cp"] > 1:
        drawn += one("parallelism.cp_method", *CP_METHODS)
        drawn += one("parallelism.cp_rotate_method", *CP_ROTATE_METHODS)
        drawn += one("parallelism.cp_load_balance", True, True, False)
    if degrees["tp"] > 1:
        drawn += one("parallelism.sequence_parallel", True, True, False)
        drawn += one("parallelism.loss_parallel", True, True, False)
    if "model=deepseek_v3_debug" in groups:
        drawn += one("model.mtp.depth", 0, 0, 1)
    if groups[0].removeprefix("model=") in MIXTURES:
        drawn += one("parallelism.ep", 1, 2, 2, 4)
        drawn += one("parallelism.expert_tensor_parallel", True, False) if degrees["tp"] > 1 else []
        drawn += chance(0.2, "model.moe.force_balance=true")
    else:
        drawn += one("model.tied_embeddings", True, False, False)
    if groups[1:]:
        return drawn + one("data.attend_across_documents", True, False)
    return drawn + one("data.mask_fraction", 0.0, 0.3) + one("model.vocab_size", 256, 256, 259)


def _draw_degrees(generator: random.Random, ranks: int) -> dict[str, int]:
    """Draw a degree for every axis: factors of 2, whose product is at most so many ranks."""
    degrees = dict.fromkeys(AXES, 1)
    doublings = ranks.bit_length() - 1
    # Many ranks mostly: they are where layouts go wrong.
    for _ in range(max(generator.randint(0, doublings), generator.randint(0, doublings))):
        degrees[generator.choice(AXES)] *= 2
    return degrees
