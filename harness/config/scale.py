"""Configuration of a run's scale: model size, tokens and hyperparameters from a few numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from harness.compose.size import COUNTED, count, resized
from harness.config.fields import numerics
from harness.config.model import ModelConfig
from harness.config.optimizer import OptimizerConfig, ScheduleConfig
from harness.config.training import TrainingConfig, parse_count
from harness.model.accounting import account
from harness.util.errors import ConfigError

HYPERPARAMETERS = ("none", "step_law")
SIZES = ("parameters", "tokens_per_parameter", "flops")
# Step Law (arXiv:2503.04715): lr = 1.79 N^-0.713 D^0.307, and a batch of 0.58 D^0.571 tokens.
STEP_LAW_LR = (1.79, -0.713, 0.307)
STEP_LAW_BATCH = (0.58, 0.571)
ROUNDS = 6


@dataclass(frozen=True)
class ScaleConfig:
    """Model size, tokens and hyperparameters from a few numbers, for scaling experiments.

    Resolving the job sets the model's shape, training.tokens and hyperparameters, and these fields to their
    defaults: the run is the same as one with its fields set by hand.
    """

    parameters: int | float | str | None = numerics(None, id_omits_default=True)
    """Resize the model to about this many parameters, like 300M, and keep its proportions: width of heads,
    query heads per key head, and the ratios of all other widths and of depth to width."""
    tokens_per_parameter: float | None = numerics(None, least=1e-3, most=1e9, id_omits_default=True)
    """Train this many tokens for each parameter (about 20: arXiv:2203.15556), in place of
    training.tokens. With flops: also choose the model's size, so that both are met."""
    flops: float | None = numerics(None, above=0, id_omits_default=True)
    """Train as many tokens as this compute allows: tokens x FLOPs per token, with full attention, as MFU
    counts it; about 6 x parameters x tokens."""
    counted: str = numerics("non_embedding", choices=COUNTED, id_omits_default=True)
    """Parameters that count: non_embedding (without the tables of vocabulary), all, or active (those of
    non_embedding that one token uses, for mixtures of experts)."""
    hyperparameters: str = numerics("none", choices=HYPERPARAMETERS, id_omits_default=True)
    """Rule that sets optimizer.lr and training.global_batch_size: step_law (arXiv:2503.04715), fitted with
    60M to 1B parameters; the batch is rounded to a power of two of sequences."""
    lr_exponent: float = numerics(0.0, least=-2, most=2, id_omits_default=True)
    """Multiply optimizer.lr by (parameters / parameters of the model before it is resized) to this power;
    -0.4 is Step Law's at equal tokens per parameter."""
    warmup_ratio: float | None = numerics(None, least=0, most=1, id_omits_default=True)
    """Set schedule.warmup_steps to this fraction of the steps."""

    def apply(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        optimizer: OptimizerConfig,
    ) -> tuple[ModelConfig, TrainingConfig, OptimizerConfig]:
        """Return the parts of a job with the values that follow from these fields, but for the warm-up.

        Args:
            model: the resolved model.
            training: its length may be given by tokens or steps.
            optimizer: its learning rate may be replaced.

        Raises:
            ConfigError: the fields contradict each other or the job, or no model has the size.
        """
        self._validate(training)
        before = count(model, self.counted)
        model = self._sized(model, training.seq_len)
        parameters = count(model, self.counted)
        training = self._with_tokens(model, training, parameters)
        if self.lr_exponent:
            factor = (parameters / before) ** self.lr_exponent
            optimizer = replace(optimizer, lr=_rounded(optimizer.lr * factor))
        if self.hyperparameters == "step_law":
            training, optimizer = self._by_step_law(training, optimizer, count(model, "non_embedding"))
        return model, training, optimizer

    def warmed_up(self, schedule: ScheduleConfig, steps: int) -> ScheduleConfig:
        """Return the schedule with the warm-up of a run of ``steps`` steps."""
        if self.warmup_ratio is None:
            return schedule
        return replace(schedule, warmup_steps=round(self.warmup_ratio * schedule.curve_steps(steps)))

    def _validate(self, training: TrainingConfig) -> None:
        sizes = [name for name in SIZES if getattr(self, name) is not None]
        if len(sizes) == len(SIZES):
            rule = "two of scale.parameters, scale.tokens_per_parameter and scale.flops determine the third"
            raise ConfigError("scale.flops", f"{self.flops:g}", rule, "one of them null")
        given = [name for name in ("tokens", "steps") if getattr(training, name) is not None]
        for name in ("tokens_per_parameter", "flops"):
            if given and name in sizes:
                rule = f"replaces training.{given[0]}, which is {getattr(training, given[0])}"
                raise ConfigError(f"scale.{name}", getattr(self, name), rule, f"training.{given[0]}=null")
        if self.lr_exponent and not ("parameters" in sizes or len(sizes) == 2):
            works = "scale.parameters=100M scale.lr_exponent=-0.4"
            raise ConfigError("scale.lr_exponent", self.lr_exponent, "needs a resized model", works)
        if self.lr_exponent and self.hyperparameters != "none":
            rule = f"has no effect with scale.hyperparameters={self.hyperparameters}, which sets optimizer.lr"
            raise ConfigError("scale.lr_exponent", self.lr_exponent, rule, "0, or scale.hyperparameters=none")
        if self.counted != ScaleConfig.counted and not {"parameters", "tokens_per_parameter"} & {*sizes}:
            rule = "counts the parameters of scale.parameters or scale.tokens_per_parameter"
            raise ConfigError("scale.counted", self.counted, rule, "scale.tokens_per_parameter=20")

    def _sized(self, model: ModelConfig, seq_len: int) -> ModelConfig:
        if self.parameters is not None:
            return resized(model, parse_count("scale.parameters", self.parameters), self.counted)
        if self.flops is None or self.tokens_per_parameter is None:
            return model
        # C = N (C per token and N) (tokens per N) N, where the factor in the middle hardly depends on N.
        made = model
        for _ in range(ROUNDS):
            each = account(made, seq_len).flops_per_token_full / count(made, self.counted)
            wanted = max(1, round(math.sqrt(self.flops / (each * self.tokens_per_parameter))))
            try:
                before, made = made, resized(model, wanted, self.counted)
            except ConfigError as error:
                rule = f"with scale.tokens_per_parameter={self.tokens_per_parameter:g}, {error.rule}"
                raise ConfigError("scale.flops", f"{self.flops:g}", rule, "more FLOPs") from None
            if made == before:
                break
        return made

    def _with_tokens(self, model: ModelConfig, training: TrainingConfig, parameters: int) -> TrainingConfig:
        if self.flops is not None:
            tokens = self.flops / account(model, training.seq_len).flops_per_token_full
        elif self.tokens_per_parameter is not None:
            tokens = self.tokens_per_parameter * parameters
        else:
            return training
        return replace(training, tokens=max(1, round(tokens)))

    def _by_step_law(
        self, training: TrainingConfig, optimizer: OptimizerConfig, parameters: int
    ) -> tuple[TrainingConfig, OptimizerConfig]:
        if training.tokens is None:
            rule = "needs the number of tokens"
            works = "scale.tokens_per_parameter=20, scale.flops=1e19 or training.tokens=20B"
            raise ConfigError("scale.hyperparameters", self.hyperparameters, rule, works)
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
