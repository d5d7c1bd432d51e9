"""Jobs of one line, for tests of the plan: fields of a layout are named without ``parallelism.``"""

import shlex
from dataclasses import fields

from harness.compose.composer import compose_job
from harness.config.parallelism import ParallelismConfig

H100 = "cluster=slurm_h100 precision=bf16 data=synthetic tokenizer=bytes"
LLAMA_8B = f"{H100} model=llama3_8b"
LAYOUT = {field.name for field in fields(ParallelismConfig)}


def job_of(line):
    """Compose a job: ``dp_shard=8`` is ``parallelism.dp_shard=8``."""
    words = shlex.split(line)
    return compose_job(
        [f"parallelism.{word}" if word.split("=")[0] in LAYOUT else word for word in words]
    )
