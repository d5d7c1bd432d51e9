"""The verb ``convert``."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.checkpoint.catalog import DamagedCheckpoint
from harness.compose.verb import Verb
from harness.config.checkpoint import EXPORT_DTYPES
from harness.config.data import DataConfig, TokenizerConfig
from harness.config.fields import label, part
from harness.config.job import Job
from harness.config.model import FAMILIES, ModelConfig
from harness.config.registry import WEIGHT_FORMATS, Choices, load_attribute
from harness.metrics.console import progress
from harness.util.errors import EXIT_OK, ConfigError, UserError
from harness.weights.detect import (
    WeightFolder,
    choose_data,
    choose_model,
    choose_tokenizer,
    chosen_source,
    open_source,
)

if TYPE_CHECKING:
    from torch import Tensor

    from harness.weights.format import WeightFormat

HELP = """`harness convert`: convert weights between our checkpoints and other formats.

The source's format is detected, the target's is `convert.format`. A checkpoint of the harness records its
model and tokenizer; for other sources, name them with `model=` and `tokenizer=`.
"""

FORMATS = Choices(
    lambda: (
        name for name in WEIGHT_FORMATS if not (of := WEIGHT_FORMATS[name]) or of.write is not None
    )
)
"""Formats that weights are written in: all of ours, and some of other software."""


@dataclass(frozen=True)
class ConvertConfig:
    """Source, target and format of a conversion."""

    source: str | None = label(None)
    """A folder with Hugging Face safetensors (in FP8 or MXFP4 too), Meta's consolidated.*.pth, or a DCP
    checkpoint (ours or torchtitan's); or a run folder, whose newest complete checkpoint is used. A
    DCP checkpoint may also be an fsspec URL."""
    target: str | None = label(None, written="path", works="a path that does not exist")
    """Folder to write, or file with format=torch. Must not exist yet."""
    format: str = label("dcp", choices=FORMATS)
    """``dcp``, to start training from (checkpoint.initial_load_path); ``hf``, for transformers; ``torch``, a
    state dict in one file; or ``torchtitan``, DCP with the rows of wq and wk in torchtitan's order."""
    dtype: str | None = label(None, choices=EXPORT_DTYPES)
    """dtype of the weights, float32, bfloat16 or float16; null keeps the source's, bfloat16 for quantized
    weights."""
    ema: bool = label(False)
    """Convert the moving average of the weights (optimizer.ema_decay) in place of the weights."""
    max_shard_gb: float = label(5.0, above=0)
    """With format=hf: most GB (10^9 bytes) per file of weights."""

    def validate(self) -> None:
        """Check every field, and that the target does not exist."""
        if not self.source:
            raise ConfigError(
                "convert.source", self.source, "must be given", "a folder with weights"
            )
        if not self.target:
            raise ConfigError(
                "convert.target", self.target, "must be given", "a path that does not exist"
            )
        target = self.target
        path = Path(self.target)
        if path.is_dir() and self.format == "torch":
            rule = "is a folder; format=torch writes a file"
            raise ConfigError("convert.target", target, rule, f"{target}/model.pt")
        is_new = not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir()))
        if path.is_symlink() or not is_new:
            raise ConfigError(
                "convert.target", target, "already exists", "a path that does not exist"
            )


@dataclass(frozen=True)
class ConvertJob(Job):
    """A job plus the options of a conversion."""

    feeds_model = False

    convert: ConvertConfig = part(ConvertConfig)
    """Source, target and format."""


def convert(job: ConvertJob, overrides: list[str]) -> int:
    """Convert the weights and print a summary; return the exit code."""
    config = job.convert
    config.validate()
    assert config.source is not None and config.target is not None
    found = None
    try:
        found = chosen_source(config.source, "convert.source")
        found = found.averaged("convert.ema") if config.ema else found
        model = choose_model(job, overrides, found)
        tokenizer = choose_tokenizer(job, overrides, found)
        data = choose_data(job, overrides, found)
        _convert(config, found, model, tokenizer, data, Path(config.target))
    except DamagedCheckpoint as error:
        raise UserError(f"{found.path if found else config.source}: {error}") from error
    return EXIT_OK


def _convert(
    config: ConvertConfig,
    found: WeightFolder,
    model: ModelConfig,
    tokenizer: TokenizerConfig | None,
    data: DataConfig | None,
    target: Path,
) -> None:
    import torch

    from harness.checkpoint.state import is_finite, non_finite_warning
    from harness.train.process import keep_freed_memory
    from harness.weights.source import (
        atomic_target,
        cast,
        folded,
        total_bytes,
        watched,
        write_torch,
    )

    keep_freed_memory()
    started = time.monotonic()
    notes = list(found.notes)
    foreign: WeightFormat | None = WEIGHT_FORMATS[found.kind]
    if foreign and foreign.note:
        notes.append(f"{found.path} {foreign.note}")
    if config.format == "hf" and tokenizer is None and not FAMILIES[model.family].is_diffusers:
        notes.append(
            "no tokenizer is written: the source does not record one; would work: tokenizer=NAME"
        )
    for note in notes:
        _print(f"note: {note}")
    # cast rounds float32 values once.
    source = open_source(found, model, "float32" if config.dtype else "bfloat16")
    source = cast(source, getattr(torch, config.dtype) if config.dtype else None)
    nbytes = total_bytes(source)
    not_finite: list[str] = []
    with (
        atomic_target(target, nbytes) as temporary,
        progress(len(source.tensors), seconds=5.0) as show,
    ):

        def look(name: str, tensor: Tensor) -> None:
            show(name)
            if not is_finite(tensor):
                not_finite.append(name)

        shown = watched(source, look)
        remark = ""  # what a user has to know of the written weights
        if config.format == "hf":
            from harness.weights.generation import Origin
            from harness.weights.huggingface import write_huggingface

            trained = (found.manifest.get("job") or {}).get("checkpoint") or {}
            folder = trained.get("initial_load_path") if trained.get("initial_load_in_hf") else None
            folder = found.path if found.kind == "hf" else folder
            origin = Origin(None if folder is None else Path(folder), data)
            write_huggingface(
                shown, model, tokenizer, temporary, config.max_shard_gb, origin=origin
            )
        elif config.format == "torch":
            write_torch(folded(shown, model), temporary, tied=model.tied_embeddings)
        elif config.format == "dcp":
            from harness.weights.dcp import write_distributed

            write_distributed(shown, temporary, model_manifest(found, model, tokenizer))
        else:
            write = load_attribute(WEIGHT_FORMATS[config.format].write)
            remark = str(write(folded(shown, model), model, temporary))
    seconds = time.monotonic() - started
    _print(
        f"{len(source.tensors)} tensors, {nbytes / 1e9:.3f} GB in {seconds:.1f} s "
        f"({nbytes / 1e9 / seconds:.2f} GB/s): {target}"
    )
    if warning := non_finite_warning(not_finite, len(source.tensors)):
        _print(warning)
    if remark:
        _print(f"note: {remark}")


def model_manifest(
    found: WeightFolder, model: ModelConfig, tokenizer: TokenizerConfig | None
) -> dict[str, Any]:
    """Manifest of a converted checkpoint."""
    return {
        "step": found.manifest.get("step", 0),
        "holds": "model",
        "world_size": 1,
        "model": dataclasses.asdict(model),
        "tokenizer": tokenizer and dataclasses.asdict(tokenizer),
        "job": found.manifest.get("job"),
        "state": {},
        "options": {},
        "created": time.time(),
    }


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _end_with_interrupt() -> None:
    """Remove partly written files also when a scheduler ends the process."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


VERB = Verb("convert", convert, help=HELP, job=ConvertJob, prepare=_end_with_interrupt)
