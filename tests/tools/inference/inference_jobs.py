"""Jobs of ``harness generate`` and ``harness evaluate`` on the CPU."""

from harness.compose.composer import compose_job
from harness.tools.inference.evaluate import EvaluateJob
from harness.tools.inference.generate import GenerateJob


def generation(folder, *overrides):
    typed = [f"checkpoint={folder}", "tokenizer=bytes", "cluster.device=cpu", *overrides]
    return compose_job(typed, config_name="generate", schema=GenerateJob)


def evaluation(folder, *overrides):
    typed = [f"checkpoint={folder}", "tokenizer=bytes", "cluster.device=cpu", *overrides]
    return compose_job(typed, config_name="evaluate", schema=EvaluateJob)
