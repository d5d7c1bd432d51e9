"""Turn errors of Hydra and OmegaConf into one-line errors in our format."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.compose.overrides import check_setting
from harness.compose.paths import config_folders
from harness.config.failures import chain_of
from harness.util.errors import UserError

# Starts of lines that only concern Python or Hydra.
_HIDDEN = (
    "full_key:",
    "object_type=",
    "reference_type=",
    "set_env",
    "See ",
    "Config search path",
    "provider=",
)
INTERVAL = "interval() is a range for sweepers that optimize (hydra/sweeper=optuna), and a grid needs points"
MISSING = "{}: must be given, on the command line or in a file of the job"


def to_user_error(error: BaseException) -> UserError:
    """Turn an error of Hydra or OmegaConf into a one-line UserError."""
    import yaml
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, UserError):
        return error
    chain = chain_of(error, suppressed=True)
    text = "; ".join(dict.fromkeys(part for each in chain[:2] for part in _lines(each)))
    for each in chain:
        if isinstance(each, yaml.MarkedYAMLError):
            return UserError(f"{_marked(each)}; would work: YAML, indented by spaces, each key once")
        if isinstance(each, yaml.YAMLError | UnicodeDecodeError):
            return UserError(f"{_unreadable_file()}: is not YAML in UTF-8: {'; '.join(_lines(each))}")
        if isinstance(each, ValueError) and "integer string conversion" in str(each):
            return UserError("an override or a file of conf/ has a number of more than 4300 digits")
        if isinstance(each, RecursionError):
            return UserError("an override or a file of conf/ is nested too deeply")
        if isinstance(each, OverrideParseException):
            works = "closed brackets and quotes, and quotes around other signs: field='\"a b\"'"
            message, *more = _lines(each)
            if message.startswith("Error parsing override") and more:
                message = more[0]
            if " while evaluating '" in message:
                message = message.partition("': ")[2]
                works = "a function of Hydra, such as range(1,3), or quotes around a text: field='\"a(b)\"'"
                return UserError(f"{each.override}: {message}; would work: {works}")
            # The lexer only repeats the override.
            why = "" if message.startswith("Lexer") else f", {message}"
            return UserError(f"{each.override}: cannot be read{why}; would work: {works}")
        if isinstance(each, MissingConfigException) and each.missing_cfg_file:
            group, _, option = str(each.missing_cfg_file).rpartition("/")
            place = _after(text, "In '", "'")
            place = f" (in {place}.yaml)" if place and place != "train" else ""
            return UserError(
                f"{group}={option}{place}: no such option; options: {', '.join(each.options or ())}"
            )
        if isinstance(each, OmegaConfBaseException):
            if "Missing mandatory value: " in text:
                return UserError(MISSING.format(_after(text, "Missing mandatory value: ", ";")))
            key = "" if each.full_key is None else str(each.full_key)
            return UserError(f"{key}: {text}" if key and key not in text else text)
    if text.startswith("Could not override '") and "No match in the defaults list" in text:
        group, works = _after(text, "'", "'"), _after(text + ";", "use ", ";")
        if group.startswith("hydra/"):
            check_setting(group, f"{group} in a file of the job")
        return UserError(f"{group}: the primary config does not list this group; would work: {works}")
    if text.startswith("Multiple values for "):
        group = _after(text, "Multiple values for ", ".")
        works = f"'- override /{group}: OPTION' in the defaults of the file that comes later"
        return UserError(f"{group}: two files choose an option of this group; would work: {works}")
    return UserError(text or type(error).__name__)


def _marked(error: Any) -> str:
    """Describe the position and problem of invalid YAML."""
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return str(error.problem or error.context)
    # Hydra may read a file into memory before parsing, and then the mark does not name the file.
    file = mark.name if os.path.isfile(mark.name) else _file_with(mark.buffer)
    return f"{file}:{mark.line + 1}:{mark.column + 1}: {error.problem or error.context}"


def _file_with(text: str | None) -> str:
    """Find the file of conf/ with this text."""
    for path in _files_of_conf():
        with contextlib.suppress(OSError, ValueError):
            if text is not None and path.read_text(encoding="utf-8") == text.rstrip("\0"):
                return str(path)
    return "a file of conf/"


def _unreadable_file() -> str:
    """Find the file of conf/ that is not UTF-8 text; Hydra's error does not name it."""
    for path in _files_of_conf():
        try:
            if not path.read_text(encoding="utf-8").replace("\n", "").isprintable():
                return str(path)
        except (OSError, ValueError):
            return str(path)
    return "a file of conf/"


def _files_of_conf() -> Iterator[Path]:
    """All YAML files of configurations, also in linked folders."""
    folders = config_folders()
    yield from (file for path in folders.paths for file in sorted(path.glob("*.yaml")))
    for group in (each for groups in folders.groups.values() for each in groups):
        for folder, _, names in os.walk(group, followlinks=True):
            yield from (Path(folder, name) for name in sorted(names) if name.endswith(".yaml"))


def _lines(error: BaseException) -> list[str]:
    """Lines of an error's message, without those about Python or Hydra."""
    lines = [line.strip() for line in str(error).splitlines()]
    return [line for line in lines if line and not line.startswith(_HIDDEN)]


def _after(text: str, start: str, end: str) -> str:
    """Text between two markers; empty if the first is missing."""
    return text.split(start, 1)[1].split(end, 1)[0] if start in text else ""
