"""Random valid jobs, small enough for a laptop, for ``harness parity parity.random``. Imports no torch.

A seed determines one job. Values are sampled field by field; a sample that the job's validation
rejects is sampled again, so that no rule is repeated here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from harness.compose.composer import Composer
from harness.config.job import Job
from harness.config.parallelism import AXES, CP_METHODS, CP_ROTATE_METHODS, RESHARD
from harness.config.pipeline import SCHEDULES
from harness.config.training import MODES
from harness.launch.inputs import require_vocabulary
from harness.util.errors import ConfigError, UserError

DENSE = ("llama3_tiny", "qwen3_debug")
MIXTURES = (
    "qwen3_moe_debug",
    "gpt_oss_debug",
    "deepseek_v2_debug",
    "deepseek_v3_debug",
    "llama4_debug",
)
DOCUMENTS = (
    "data=python_stdlib",
    "data.paths=['{stdlib}/json/*.py']",
    "data.validation_fraction=0",
    "model.vocab_size=258",
)
SAMPLES = 500
SAMPLES_PER_DEGREES = 25


def random_job(
    composer: Composer, seed: int, ranks: int, fixed: Sequence[str]
) -> tuple[list[str], Job]:
    """Sample a valid job.

    Args:
        composer: composes the primary config ``parity``.
        seed: determines the job.
        ranks: largest world size.
        fixed: overrides that are not sampled; with ``data`` among them no field of the data is.

    Returns:
        The overrides, and the job that they compose.
    """
    generator = random.Random(seed)
    # One model for all samples: composing another takes a fifth of a second.
    groups = _sample_groups(generator)
    sizes = random.Random(f"sizes {seed}")
    fixed_names = {override.partition("=")[0] for override in fixed}
    if "experiment" in fixed_names:
        fixed_names |= {"model", "data", "training.seq_len"}
    # The vocabulary is sampled for the data: fields of a typed model are, unless the data is typed
    # too.
    whole = {"data", "model"} if fixed_names >= {"data", "model"} else fixed_names & {"data"}

    def is_fixed(override: str) -> bool:
        name = override.partition("=")[0]
        return name in fixed_names or name.partition(".")[0] in whole

    rejected = ""
    for number in range(SAMPLES):
        # Try each set of degrees several times; otherwise most accepted jobs would have one rank,
        # which is valid most often.
        if number % SAMPLES_PER_DEGREES == 0:
            degrees = _sample_degrees(generator, ranks)
        sampled = [*groups, *_sample_fields(generator, groups, degrees), *_sample_sizes(sizes)]
        overrides = [*(each for each in sampled if not is_fixed(each)), *fixed]
        try:
            job: Job = composer.job(overrides)
            require_vocabulary(job)
        except ConfigError as error:
            rejected = str(error)
            continue
        if job.world_size <= ranks:
            return overrides, job
    raise UserError(f"parity.seed={seed}: none of {SAMPLES} samples is valid; the last: {rejected}")


def _sample_groups(generator: random.Random) -> list[str]:
    model = generator.choice(DENSE if generator.random() < 0.4 else MIXTURES)
    return [f"model={model}", *(DOCUMENTS if generator.random() < 0.2 else ())]


def _sample_fields(
    generator: random.Random, groups: list[str], degrees: dict[str, int]
) -> list[str]:

    def chance(probability: float, *overrides: str) -> list[str]:
        return list(overrides) if generator.random() < probability else []

    def one(field: str, *values: object) -> list[str]:
        return [
            f"{field}={generator.choice(values)}".replace("True", "true").replace("False", "false")
        ]

    sampled = [f"parallelism.{axis}={degree}" for axis, degree in degrees.items()]
    sampled += one("training.seq_len", 32, 48, 60)
    sampled += one("training.global_batch_size", 4, 8, 8)
    sampled += one("training.local_batch_size", "null", "null", 1, 2, 4)
    sampled += one("training.loss_chunks", 1, 1, 1, 3)
    sampled += chance(0.3, "precision.param_dtype=bfloat16")
    sampled += one("activation_checkpoint.mode", "none", "none", *MODES)
    sampled += chance(0.1, "compile.enable=true", "compile.backend=aot_eager")
    sampled += one("parallelism.reshard_after_forward", *RESHARD)
    sampled += chance(0.2, "parallelism.cpu_offload=true")
    if degrees["pp"] > 1:
        sampled += one("parallelism.pp_schedule", *SCHEDULES)
        sampled += one("parallelism.pp_microbatch_size", 1, 1, 2)
        sampled += one("parallelism.pp_first_stage_less_layers", 0, 1)
    if degrees["cp"] > 1:
        sampled += one("parallelism.cp_method", *CP_METHODS)
        sampled += one("parallelism.cp_rotate_method", *CP_ROTATE_METHODS)
        sampled += one("parallelism.cp_load_balance", True, True, False)
    if degrees["tp"] > 1:
        sampled += one("parallelism.sequence_parallel", True, True, False)
        sampled += one("parallelism.loss_parallel", True, True, False)
    if "model=deepseek_v3_debug" in groups:
        sampled += one("model.mtp.depth", 0, 1, 1)
    if groups[0].removeprefix("model=") in MIXTURES:
        sampled += one("parallelism.ep", 1, 2, 2, 4)
        if degrees["tp"] > 1:
            sampled += one("parallelism.expert_tensor_parallel", True, False)
        sampled += chance(0.2, "model.moe.force_balance=true")
    else:
        sampled += one("model.tied_embeddings", True, False, False)
    if groups[1:]:
        return sampled + one("data.attend_across_documents", True, False)
    return (
        sampled
        + one("data", "synthetic", "synthetic_masked")
        + one("model.vocab_size", 256, 256, 259)
    )


def _sample_sizes(generator: random.Random) -> list[str]:
    sampled = []
    if generator.random() < 0.2:
        sampled.append(
            f"schedule.batch_size=[{{until_step:1,sequences:{generator.choice((2, 4))}}}]"
        )
    if generator.random() < 0.2:
        sampled.append(f"schedule.seq_len=[{{until_step:1,tokens:{generator.choice((12, 16))}}}]")
    return sampled


def _sample_degrees(generator: random.Random, ranks: int) -> dict[str, int]:
    """Sample a power of 2 for every axis, with a product of at most ``ranks``."""
    degrees = dict.fromkeys(AXES, 1)
    doublings = ranks.bit_length() - 1
    # The larger of two numbers: errors in layouts mostly need many ranks.
    for _ in range(max(generator.randint(0, doublings), generator.randint(0, doublings))):
        degrees[generator.choice(AXES)] *= 2
    return degrees
