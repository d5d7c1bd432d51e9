"""The job of a checkpoint: its weights, its model, its tokenizer. Imports no torch."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from harness.checkpoint.catalog import DamagedCheckpoint
from harness.config.data import TokenizerConfig
from harness.data.tokenizer import build_tokenizer
from harness.tools.inference.ranks import is_first
from harness.util.errors import ConfigError, DataError, UserError
from harness.weights.detect import WeightFolder, choose_tokenizer, find_source
from harness.weights.tokenizer import gives_same_ids


@dataclass(frozen=True)
class Used:
    """A job with the tokenizer of its weights, and the weights."""

    job: Any
    found: WeightFolder


def use_checkpoint(job: Any, overrides: list[str], field: str, *, has_text: bool = True) -> Used:
    """Find the weights of a job; the model in the job is theirs already.

    Args:
        job: an ``InferenceJob``.
        overrides: the overrides that composed it.
        field: its field with the path.
        has_text: whether a tokenizer is needed.

    Raises:
        UserError: there are no weights, they are damaged, or no tokenizer is known and one is needed.
    """
    path = attrgetter(field)(job)
    if path is None:
        raise ConfigError(
            "checkpoint", None, "must be given", "checkpoint=runs/NAME/ID, or a folder with weights"
        )
    try:
        found = find_source(path, field)
    except DamagedCheckpoint as error:
        raise UserError(f"{path}: {error}") from error
    if job.ema:
        found = found.averaged("ema")
    if is_first():
        sys.stderr.write("".join(f"note: {note}\n" for note in found.notes))
    if not has_text:
        return Used(job, found)
    own = choose_tokenizer(job, [], found) or _tokenizer_beside(found)
    tokenizer = choose_tokenizer(job, overrides, found) or own
    if own and tokenizer and tokenizer != own and is_first():
        _warn_of_another(tokenizer, own, found)
    if tokenizer is None:
        works = "tokenizer=NAME, an option of conf/tokenizer"
        raise UserError(f"{found.path}: has no tokenizer, and records none; would work: {works}")
    return Used(dataclasses.replace(job, tokenizer=tokenizer), found)


def _warn_of_another(chosen: TokenizerConfig, own: TokenizerConfig, found: WeightFolder) -> None:
    """Warn if a tokenizer gives other ids than the one that the weights were trained with."""
    try:
        theirs = build_tokenizer(dataclasses.replace(own, bos="", eos=""))
        is_same = gives_same_ids(build_tokenizer(chosen), theirs)
    except DataError:  # the file is not where it was; one that is chosen is read again, and its error shown
        return
    if not is_same:
        own_name, name = (each.path or each.kind for each in (own, chosen))
        rule = f"the tokenizer of {found.path} is {own_name}, and {name} gives other ids"
        sys.stderr.write(f"WARNING {rule}; would work: no tokenizer= at all\n")


def _tokenizer_beside(found: WeightFolder) -> TokenizerConfig | None:
    """The tokenizer in a folder of safetensors, if there is one."""
    file = Path(found.path) / "tokenizer.json"
    return (
        TokenizerConfig(kind="huggingface", path=str(file)) if found.kind == "hf" and file.is_file() else None
    )
