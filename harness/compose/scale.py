"""Apply ``scale``: model size, tokens and hyperparameters from a few numbers (no torch)."""

from __future__ import annotations

import math
from dataclasses import replace

from harness.compose.size import count, resized
from harness.config.model import ModelConfig
from harness.config.optimizer import OptimizerConfig
from harness.config.training import ScaleConfig, TrainingConfig, parse_count
from harness.model.accounting import account
from harness.util.errors import ConfigError

SIZES = ("parameters", "tokens_per_parameter", "flops")
# Step Law (arXiv:2503.04715): lr = 1.79 N^-0.713 D^0.307, and a batch of 0.58 D^0.571 tokens.
STEP_LAW_LR = (1.79, -0.713, 0.307)
STEP_LAW_BATCH = (0.58, 0.571)
ROUNDS = 6


def apply_scale(
    scale: ScaleConfig,
    model: ModelConfig,
    training: TrainingConfig,
    optimizer: OptimizerConfig,
) -> tuple[ModelConfig, TrainingConfig, OptimizerConfig]:
    """Return the parts of a job with the values that follow from these fields, but for the warm-up.

    Args:
        scale: the fields.
        model: the resolved model.
        training: its length may be given by tokens or steps.
        optimizer: its learning rate may be replaced.

    Raises:
        ConfigError: the fields contradict each other or the job, or no model has the size.
    """
    _validate(scale, training)
    before = count(model, scale.counted)
    model = _sized(scale, model, training.seq_len)
    parameters = count(model, scale.counted)
    training = _with_tokens(scale, model, training, parameters)
    if scale.lr_exponent:
        factor = (parameters / before) ** scale.lr_exponent
        optimizer = replace(optimizer, lr=_rounded(optimizer.lr * factor))
    if scale.hyperparameters == "step_law":
        training, optimizer = _by_step_law(scale, training, optimizer, count(model, "non_embedding"))
    return model, training, optimizer


def _validate(scale: ScaleConfig, training: TrainingConfig) -> None:
    sizes = [name for name in SIZES if getattr(scale, name) is not None]
    if len(sizes) == len(SIZES):
        rule = "two of scale.parameters, scale.tokens_per_parameter and scale.flops determine the third"
        raise ConfigError("scale.flops", f"{scale.flops:g}", rule, "one of them null")
    given = [name for name in ("tokens", "steps") if getattr(training, name) is not None]
    for name in ("tokens_per_parameter", "flops"):
        if given and name in sizes:
            rule = f"replaces training.{given[0]}, which is {getattr(training, given[0])}"
            raise ConfigError(f"scale.{name}", getattr(scale, name), rule, f"training.{given[0]}=null")
    if scale.lr_exponent and not ("parameters" in sizes or len(sizes) == 2):
        works = "scale.parameters=100M scale.lr_exponent=-0.4"
        raise ConfigError("scale.lr_exponent", scale.lr_exponent, "needs a resized model", works)
    if scale.lr_exponent and scale.hyperparameters != "none":
        rule = f"has no effect with scale.hyperparameters={scale.hyperparameters}, which sets optimizer.lr"
        raise ConfigError("scale.lr_exponent", scale.lr_exponent, rule, "0, or scale.hyperparameters=none")
    if scale.counted != ScaleConfig.counted and not {"parameters", "tokens_per_parameter"} & {*sizes}:
        rule = "counts the parameters of scale.parameters or scale.tokens_per_parameter"
        raise ConfigError("scale.counted", scale.counted, rule, "scale.tokens_per_parameter=20")


def _sized(scale: ScaleConfig, model: ModelConfig, seq_len: int) -> ModelConfig:
    if scale.parameters is not None:
        return resized(model, parse_count("scale.parameters", scale.parameters), scale.counted)
    if scale.flops is None or scale.tokens_per_parameter is None:
        return model
    # C = N (C per token and N) (tokens per N) N, where the factor in the middle hardly depends on N.
    made = model
    for _ in range(ROUNDS):
        each = account(made, seq_len).flops_per_token_full / count(made, scale.counted)
        wanted = max(1, round(math.sqrt(scale.flops / (each * scale.tokens_per_parameter))))
        try:
            before, made = made, resized(model, wanted, scale.counted)
        except ConfigError as error:
            rule = f"with scale.tokens_per_parameter={scale.tokens_per_parameter:g}, {error.rule}"
            raise ConfigError("scale.flops", f"{scale.flops:g}", rule, "more FLOPs") from None
        if made == before:
            break
    return made


def _with_tokens(
    scale: ScaleConfig, model: ModelConfig, training: TrainingConfig, parameters: int
) -> TrainingConfig:
    if scale.flops is not None:
        tokens = scale.flops / account(model, training.seq_len).flops_per_token_full
    elif scale.tokens_per_parameter is not None:
        tokens = scale.tokens_per_parameter * parameters
    else:
        return training
    return replace(training, tokens=max(1, round(tokens)))


def _by_step_law(
    scale: ScaleConfig, training: TrainingConfig, optimizer: OptimizerConfig, parameters: int
) -> tuple[TrainingConfig, OptimizerConfig]:
    if training.tokens is None:
        rule = "needs the number of tokens"
        works = "scale.tokens_per_parameter=20, scale.flops=1e19 or training.tokens=20B"
        raise ConfigError("scale.hyperparameters", scale.hyperparameters, rule, works)
    tokens = parse_count("training.tokens", training.tokens)
    factor, of_parameters, of_tokens = STEP_LAW_LR
    lr = _rounded(factor * parameters**of_parameters * tokens**of_tokens)
    factor, of_tokens = STEP_LAW_BATCH
    sequences = factor * tokens**of_tokens / training.seq_len
    size = 2 ** max(0, round(math.log2(sequences)))
    return replace(training, global_batch_size=size), replace(optimizer, lr=lr)


def _rounded(value: float) -> float:
    """Round to four digits, so that the job is readable."""
    return float(f"{value:.4g}")
