"""What Flux is trained on (no torch until it is built)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.config.data_kinds import DATA_KINDS
from harness.metrics.columns import Metric
from harness.train.objective import Objective
from harness.util.errors import ConfigError, divisors
from harness_flux.config import (
    PATCH,
    PIXELS,
    FlowConfig,
    SheetConfig,
    flow_of,
    flux_of,
    sheet_of,
)

if TYPE_CHECKING:
    import torch

    from harness.config.data import DataConfig
    from harness.config.job import Job
    from harness.config.model import ModelConfig
    from harness.config.training import TrainingConfig
    from harness.data.loader import Loader
    from harness.data.tokenizer import Tokenizer
    from harness.parallelism.mesh import Mesh
    from harness_flux.objective import FlowExecutor, FlowLoss


class FlowMatching(Objective):
    """Predict the direction from noise to a picture."""

    options = FlowConfig
    validation_options = SheetConfig
    metrics = (
        Metric(
            "images_per_second", "images/s", "Pictures of all ranks.", "`model.architecture=flux`"
        ),
    )

    def rates(self, samples_per_second: float | None) -> dict[str, float | None]:
        return {"images_per_second": samples_per_second}

    def check(self, job: Job) -> None:
        layout = job.parallelism
        training = job.training
        flux = flux_of(job.model)
        text = flux.text_length
        side = math.isqrt(max(0, training.seq_len - text))
        if not side or training.seq_len != text + side**2:
            near = max(1, side)
            pixels = PATCH * PIXELS
            rule = f"must be model.options.text_length={text} and the tokens of a square picture"
            works = [
                f"{text + n**2} ({pixels * n} x {pixels * n} pixels)" for n in (near, near + 1)
            ]
            raise ConfigError("training.seq_len", training.seq_len, rule, works)
        unit = layout.cp * (layout.tp if layout.uses_sequence_parallel else 1)
        if text % unit or side**2 % unit:
            rule = (
                f"its {text} tokens of the caption and {side**2} of the picture are each split into {unit}, "
                f"parallelism.cp={layout.cp}, tp={layout.tp}"
            )
            divides = f"degrees whose product divides {math.gcd(text, side**2)}"
            raise ConfigError("training.seq_len", training.seq_len, rule, divides)
        if flux.token_width % layout.tp:
            rule = f"must divide the {flux.token_width} values of a token"
            raise ConfigError("parallelism.tp", layout.tp, rule, divisors(flux.token_width))
        guidance = flow_of(job).guidance
        usual = FlowConfig().guidance
        for field, value, only, why in (
            ("training.attention", training.attention, "sdpa", "attention is not causal"),
            ("training.loss_chunks", training.loss_chunks, 1, "the loss has no vocabulary"),
            ("training.z_loss", training.z_loss, 0.0, "the loss has no vocabulary"),
            ("schedule.seq_len", job.schedule.seq_len, [], "a picture cannot be cut"),
            ("evaluation.interval", job.evaluation.interval, 0, "the tasks are texts"),
            (
                "parallelism.pp",
                layout.pp,
                1,
                "stages pass on one tensor, and blocks need a second one",
            ),
            (
                "training.objective_options.guidance",
                usual if flux.guidance else guidance,
                usual,
                "the model has no such input without model.options.guidance=true",
            ),
        ):
            if value != only:
                rule = f"is not possible with model.architecture=flux: {why}"
                raise ConfigError(field, value, rule, str(only))

    def for_generation(
        self, data: DataConfig, training: TrainingConfig, model: ModelConfig
    ) -> dict[str, Any]:
        """The smallest picture, and only the encoders of the data."""
        kind = data.kind if DATA_KINDS[data.kind].batches == "images" else "latents_synthetic"
        return {
            "data": replace(data, kind=kind),
            "training": replace(training, seq_len=flux_of(model).text_length + 1),
        }

    def observers(self, job: Job) -> Sequence[str]:
        return ["samples"] if job.validation.interval and sheet_of(job).pictures else []

    def build_loss(self, job: Job, mesh: Mesh, parts: Sequence[Any]) -> FlowLoss:
        from harness_flux.objective import FlowLoss

        return FlowLoss()

    def build_executor(
        self, job: Job, mesh: Mesh, parts: Sequence[Any], loss: FlowLoss, device: torch.device
    ) -> FlowExecutor:
        from harness_flux.objective import FlowExecutor

        return FlowExecutor(job, parts[0], loss)

    def build_loader(
        self, job: Job, tokenizer: Tokenizer, rows: range, split: str, **process: Any
    ) -> Loader:
        from harness_flux.pictures.loader import build_loader

        return build_loader(job, rows, split, **process)
