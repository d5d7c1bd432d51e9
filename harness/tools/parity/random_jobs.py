"""Random valid jobs, small enough for a laptop, for ``harness parity parity.random``. Imports no torch.

A seed determines one job. Values are sampled field by field; a sample that the job's validation
rejects is sampled again, so that no rule is repeated here.
"""

import random
from collections.abc import Sequence

from harness.compose.composer import Composer
from harness.config.job import Job
from harness.config.parallelism import AXES, CP_METHODS, CP_ROTATE_METHODS, RESHARD
from harness.config.pipeline import SCHEDULES
from harness.config.training import MODES, ROUTINGS
from harness.launch.inputs import require_vocabulary
from harness.util.errors import ConfigError, UserError

DENSE = ("llama3_tiny", "qwen3_debug")
ASSIGNED = ["model.moe.force_balance=true", *(f"debug.routing={name}" for name in ROUTINGS)]
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
    groups = [f"model={generator.choice(DENSE if generator.random() < 0.4 else MIXTURES)}"]
    if generator.random() < 0.2:
        groups += DOCUMENTS
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


def _sample_fields(
    generator: random.Random, groups: list[str], degrees: dict[str, int]
) -> list[str]:

    sampled = [f"parallelism.{axis}={degree}" for axis, degree in degrees.items()]

    def chance(probability: float, *overrides: str) -> None:
        sampled.extend(overrides if generator.random() < probability else ())

    def one(field: str, *values: object) -> None:
        value = str(generator.choice(values))
        sampled.append(f"{field}={value.lower() if value in ('True', 'False') else value}")

    one("training.seq_len", 32, 48, 60)
    one("training.global_batch_size", 4, 7, 8)
    one("training.local_batch_size", "null", "null", 1, 2, 4)
    one("training.loss_chunks", 1, 1, 1, 3)
    chance(0.3, "precision.param_dtype=bfloat16")
    one("activation_checkpoint.mode", "none", "none", *MODES)
    chance(0.1, "compile.enable=true", "compile.backend=aot_eager")
    one("parallelism.reshard_after_forward", *RESHARD)
    chance(0.2, "parallelism.cpu_offload=true")
    if degrees["pp"] > 1:
        one("parallelism.pp_schedule", *SCHEDULES)
        one("parallelism.pp_microbatch_size", 1, 1, 2)
        one("parallelism.pp_first_stage_less_layers", 0, 1)
    if degrees["cp"] > 1:
        one("parallelism.cp_method", *CP_METHODS)
        one("parallelism.cp_rotate_method", *CP_ROTATE_METHODS)
        one("parallelism.cp_load_balance", True, True, False, "documents")
    if degrees["tp"] > 1:
        one("parallelism.sequence_parallel", True, True, False)
        one("parallelism.loss_parallel", True, True, False)
    if "model=deepseek_v3_debug" in groups:
        one("model.mtp.depth", 0, 1, 1)
    if groups[0].removeprefix("model=") in MIXTURES:
        one("parallelism.ep", 1, 2, 2, 4)
        if degrees["tp"] > 1:
            one("parallelism.expert_tensor_parallel", True, False)
        chance(0.3, generator.choice(ASSIGNED))
    else:
        one("model.tied_embeddings", True, False, False)
    if groups[1:]:
        one("data.attend_across_documents", True, False)
    else:
        one("data", "synthetic", "synthetic_masked")
        one("model.vocab_size", 256, 256, 259)
    return sampled


def _sample_sizes(generator: random.Random) -> list[str]:
    sampled = []
    if generator.random() < 0.2:
        rows = generator.choice((2, 4))
        sampled.append(f"schedule.batch_size=[{{until_step:1,sequences:{rows}}}]")
    if generator.random() < 0.2:
        length = generator.choice((12, 16))
        sampled.append(f"schedule.seq_len=[{{until_step:1,tokens:{length}}}]")
    return sampled


def _sample_degrees(generator: random.Random, ranks: int) -> dict[str, int]:
    """Sample a power of 2 for every axis, with a product of at most ``ranks``."""
    degrees = dict.fromkeys(AXES, 1)
    doublings = ranks.bit_length() - 1
    # The larger of two numbers: errors in layouts mostly need many ranks.
    for _ in range(max(generator.randint(0, doublings), generator.randint(0, doublings))):
        degrees[generator.choice(AXES)] *= 2
    return degrees
