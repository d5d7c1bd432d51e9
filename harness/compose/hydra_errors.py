"""Errors of Hydra and OmegaConf as errors of the user: one line, with what would work."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

from harness.compose.override import QUOTED
from harness.config.failures import chain_of
from harness.util.errors import UserError

# Signs that Hydra reads in quoted texts only.
_UNREADABLE = re.compile(r"[=#~&;!<>`^]")
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
INTERVAL = (
    "interval() is a range for sweepers that optimize (sweep=optuna), and a grid needs points"
)
MISSING = "{}: must be given, on the command line or in a file of the job"


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf into one-line errors."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise to_user_error(error) from error


def to_user_error(error: BaseException) -> UserError:
    """Turn an error of Hydra or OmegaConf into a one-line UserError."""
    import yaml
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, UserError):
        return error
    errors = chain_of(error, suppressed=True)
    lines = list(chain.from_iterable(_lines(error) for error in errors[:2]))
    text = "; ".join(dict.fromkeys(lines))
    for cause in errors:
        if isinstance(cause, yaml.MarkedYAMLError):
            return UserError(
                f"{_marked(cause)}; would work: YAML, indented by spaces, each key once"
            )
        if isinstance(cause, yaml.reader.ReaderError):
            return not_yaml(cause.name, cause)
        if isinstance(cause, OverrideParseException):
            return _of_grammar(cause)
        if isinstance(cause, MissingConfigException) and cause.missing_cfg_file:
            group, _, option = str(cause.missing_cfg_file).rpartition("/")
            place = _after(text, "In '", "'")
            place = f" (in {place}.yaml)" if place and place != "train" else ""
            return UserError(
                f"{group}={option}{place}: no such option; options: {', '.join(cause.options or ())}"
            )
        if isinstance(cause, OmegaConfBaseException):
            if "Missing mandatory value: " in text:
                return UserError(MISSING.format(_after(text, "Missing mandatory value: ", ";")))
            key = "" if cause.full_key is None else str(cause.full_key)
            return UserError(f"{key}: {text}" if key and key not in text else text)
    if text.startswith("Multiple values for "):
        group = _after(text, "Multiple values for ", ".")
        works = f"'- override /{group}: OPTION' in the defaults of the file that comes later"
        return UserError(f"{group}: two files choose an option of this group; would work: {works}")
    return UserError(text or type(error).__name__)


def _of_grammar(error: Any) -> UserError:
    """The error of an override that Hydra's parser cannot read."""
    works = "closed brackets and quotes, and quotes around other signs: field='\"a b\"'"
    message, *more = _lines(error)
    if message.startswith("Error parsing override") and more:
        message = more[0]
    if " while evaluating '" in message:
        message = message.partition("': ")[2]
        works = "a function of Hydra, such as range(1,3), or quotes around a text: field='\"a(b)\"'"
        return UserError(f"{error.override}: {message}; would work: {works}")
    # The lexer only repeats the override, and the parser says what it expects.
    value = str(error.override).partition("=")[2]
    sign = _UNREADABLE.search(re.sub(QUOTED, "", value))
    why = "" if message.startswith("Lexer") else f", {message}"
    if sign is not None:
        why = f", because of the sign {sign[0]} without quotes"
    return UserError(f"{error.override}: cannot be read{why}; would work: {works}")


def not_yaml(file: object, error: Exception) -> UserError:
    return UserError(f"{file}: is not YAML in UTF-8: {'; '.join(_lines(error))}")


def _marked(error: Any) -> str:
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return str(error.problem or error.context)
    return f"{mark.name}:{mark.line + 1}:{mark.column + 1}: {error.problem or error.context}"


def _lines(error: BaseException) -> list[str]:
    """Lines of an error's message, without those about Python or Hydra."""
    lines = [line.strip() for line in str(error).splitlines()]
    return [line for line in lines if line and not line.startswith(_HIDDEN)]


def _after(text: str, start: str, end: str) -> str:
    return text.split(start, 1)[1].split(end, 1)[0] if start in text else ""
