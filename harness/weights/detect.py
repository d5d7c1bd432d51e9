"""Find weights at a path: their format, and the model and tokenizer that they record. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from harness.checkpoint.catalog import (
    MANIFEST,
    Checkpoint,
    CheckpointFolder,
    DamagedCheckpoint,
    is_url,
    open_checkpoint,
    reading,
)
from harness.config.data import DataConfig, TokenizerConfig
from harness.config.fields import LABEL
from harness.config.job import Job, from_dict
from harness.config.model import ModelConfig, named_fields
from harness.config.registry import WEIGHT_FORMATS, load_attribute
from harness.util.errors import ConfigError, UserError
from harness.weights.config_json import model_node
from harness.weights.format import weight_formats

if TYPE_CHECKING:
    from harness.weights.source import WeightSource

Part = TypeVar("Part", DataConfig, TokenizerConfig)
# Files of conf/experiment and conf/sweep may set any group.
_SETS_ANY_GROUP = ("experiment", "sweep")


@dataclass(frozen=True)
class WeightFolder:
    """The detected source, a path or an fsspec URL; the manifest is empty if the harness did not write it."""

    kind: str
    """``hf``, ``dcp`` (ours), or the name of another software's format (``WEIGHT_FORMATS``)."""
    path: str
    manifest: dict[str, Any]
    notes: tuple[str, ...] = ()
    """Lines for the user about checkpoints that were skipped."""
    ema: bool = False
    """Whether the moving average of the weights is meant, and not the weights."""

    def averaged(self, field: str) -> WeightFolder:
        """Return the moving average of the weights (``optimizer.ema_decay``) in place of the weights.

        Raises ConfigError about ``field``, which asked for it, if it is not saved here.
        """
        recorded = (self.manifest.get("job") or {}).get("optimizer") or {}
        if not recorded.get("ema_decay") or self.manifest.get("holds") == "model":
            rule = f"{self.path} has no moving average of the weights"
            works = "false, or a complete checkpoint of a run with optimizer.ema_decay"
            raise ConfigError(field, True, rule, works)
        return dataclasses.replace(self, ema=True)


def find_source(source: str, field: str = "convert.source") -> WeightFolder:
    """Detect the format of the weights in a folder, or of the newest complete checkpoint of a run folder.

    ``field`` is the field of the job that has the path, for messages. UserError if there are no
    weights in a known format, DamagedCheckpoint if the checkpoint is incomplete.
    """
    for folder in (CheckpointFolder(f"{source}/checkpoints"), CheckpointFolder(source)):
        if steps := folder.steps():
            complete, wrong = folder.complete()
            if not complete and folder.steps() != steps:
                return find_source(source, field)  # the run wrote another one and removed this
            if not complete:
                first, reason = next(iter(wrong.items()))
                rule = f"none of its {len(wrong)} checkpoints is complete; {first}: {reason}"
                raise UserError(f"{folder.path}: {rule}")
            notes = tuple(f"{path} is skipped: {reason}" for path, reason in wrong.items())
            return dataclasses.replace(_of_checkpoint(complete[0], field), notes=notes)
    if is_url(source):
        return _of_other_software(source) or _of_checkpoint(open_checkpoint(source), field)
    path = Path(source)
    if not path.exists():
        raise ConfigError(field, source, "no such folder")
    if path.is_file():
        raise ConfigError(field, source, "is a file, must be a folder", str(path.parent))
    if (path / MANIFEST).exists():
        return _of_checkpoint(open_checkpoint(source), field)
    if any(path.glob("*.safetensors")):
        return WeightFolder("hf", source, {})
    if foreign := _of_other_software(source):
        return foreign
    if any(path.glob("*.distcp")):
        raise DamagedCheckpoint("it was not finished: there is no .metadata")
    files = ", ".join(("*.safetensors", *(each.files for each in weight_formats().values())))
    works = f"a folder with {files}, or a run's folder"
    raise ConfigError(field, source, "holds no weights", works)


_READ = contextlib.ExitStack()


def chosen_source(source: str, field: str) -> WeightFolder:
    """As ``find_source``; a run that still trains keeps the checkpoint until this process ends."""
    while True:
        found = find_source(source, field)
        if not found.manifest:
            return found
        # Between the two calls the run may remove it; then there is a newer one.
        with contextlib.suppress(DamagedCheckpoint):
            _READ.enter_context(reading(found.path))
            open_checkpoint(found.path)
            return found


def _of_other_software(source: str) -> WeightFolder | None:
    for name, each in weight_formats().items():
        if each.recognizes(source):
            return WeightFolder(name, source, {})
    return None


def _of_checkpoint(checkpoint: Checkpoint, field: str) -> WeightFolder:
    if checkpoint.holds == "hf" and is_url(checkpoint.path):
        rule = "holds Hugging Face's safetensors, which are read from local folders only"
        raise ConfigError(field, checkpoint.path, rule, "a local copy")
    return WeightFolder(
        "hf" if checkpoint.holds == "hf" else "dcp", checkpoint.path, checkpoint.manifest
    )


def choose_model(job: Job, overrides: list[str], found: WeightFolder) -> ModelConfig:
    """The model of the source: the manifest's, or the one in the overrides, which must not contradict it."""
    typed = _typed(overrides, "model")
    recorded = found.manifest.get("model")
    if not recorded:
        if not typed:
            raise _no_model(found)
        return job.model
    stored = ModelConfig.from_stored(recorded)
    theirs = {name: value for name, role, value in named_fields(stored) if role != LABEL}
    for name, role, value in named_fields(job.model):
        if role != LABEL and _covers(typed, name) and value != theirs.get(name):
            rule = f"the checkpoint says model.{name}={theirs.get(name)} (model={stored.name})"
            raise ConfigError(f"model.{name}", value, rule, "no model= at all")
    return stored


def choose_tokenizer(job: Job, overrides: list[str], found: WeightFolder) -> TokenizerConfig | None:
    """The manifest's tokenizer with the overrides applied; None if neither names one, or it is ``none``."""
    chosen = _chosen("tokenizer", job.tokenizer, overrides, found.manifest.get("tokenizer"))
    return None if chosen is not None and chosen.kind == "none" else chosen


def choose_data(job: Job, overrides: list[str], found: WeightFolder) -> DataConfig | None:
    """The data that the source was trained with, with the overrides applied; None if neither names any."""
    recorded = found.manifest.get("job") or {}
    return _chosen("data", job.data, overrides, recorded.get("data"))


def _chosen(
    group: str, composed: Part, overrides: list[str], stored: dict[str, Any] | None
) -> Part | None:
    typed = _typed(overrides, group)
    if not stored:
        return composed if typed else None
    names = [field.name for field in dataclasses.fields(composed) if _covers(typed, field.name)]
    chosen = from_dict(type(composed), stored, f"{group}.")
    return dataclasses.replace(chosen, **{name: getattr(composed, name) for name in names})


def _typed(overrides: list[str], group: str) -> list[str]:
    """Names of the fields of a group in the overrides; an empty name means the complete group."""
    keys = [override.split("=")[0].lstrip("+~") for override in overrides]
    fields = [key.removeprefix(f"{group}.") for key in keys if key.startswith(f"{group}.")]
    return [*fields, *("" for key in keys if key in (group, *_SETS_ANY_GROUP))]


def _covers(typed: list[str], name: str) -> bool:
    return any(field in ("", name) or name.startswith(f"{field}.") for field in typed)


def open_source(
    found: WeightFolder, model: ModelConfig, dequantized: str = "bfloat16"
) -> WeightSource:
    """Open weights; quantized ones are read as ``dequantized``."""
    if found.kind == "hf":
        import torch

        from harness.weights.huggingface import HuggingFaceSource

        return HuggingFaceSource(Path(found.path), model, getattr(torch, dequantized))
    if found.kind == "dcp":
        from harness.weights.dcp import DistributedSource, average_of

        return DistributedSource(
            found.path, found.manifest, model, average_of if found.ema else str
        )
    from harness.weights.source import unfolded

    return unfolded(load_attribute(WEIGHT_FORMATS[found.kind].read)(found.path, model), model)


def recorded_model(source: str, field: str) -> dict[str, Any]:
    """The model that weights record, as an option of the config group ``model``."""
    try:
        found = find_source(source, field)
    except DamagedCheckpoint as error:
        raise ConfigError(field, source, str(error)) from error
    if stored := found.manifest.get("model"):
        node = dataclasses.asdict(ModelConfig.from_stored(stored))
    elif found.kind == "hf":
        node = model_node(found.path)
    else:
        raise _no_model(found)
    return {**node, "path": source}


def _no_model(found: WeightFolder) -> UserError:
    return UserError(
        f"{found.path}: does not record its model; would work: model=NAME, an option of conf/model"
    )
