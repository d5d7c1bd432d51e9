"""Errors of Hydra, OmegaConf and YAML as errors of the user: their words, in one line."""

import contextlib
from collections.abc import Iterator

from harness.compose.overrides import LISTED
from harness.config.failures import chain_of
from harness.util.errors import UserError

# Starts of lines that only concern Python or Hydra.
_HIDDEN = (
    "Error parsing override",
    "full_key:",
    "object_type=",
    "reference_type=",
    "set_env",
    "See ",
    "Config search path",
    "provider=",
)
MULTIPLE = "Multiple values for "
MISSING = "{}: must be given, on the command line or in a file of the job"


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn errors of Hydra, OmegaConf and YAML into one-line errors."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise _to_user_error(error) from error


def _to_user_error(error: Exception) -> UserError:
    import yaml
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    for cause in chain_of(error, suppressed=True):
        text = "; ".join(_lines(cause))
        if isinstance(cause, yaml.YAMLError):
            works = "YAML in UTF-8, indented by spaces, each key once"
            return UserError(f"{text}; would work: {works}")
        if isinstance(cause, OverrideParseException):
            works = "closed brackets and quotes, and quotes around other signs: field='\"a b\"'"
            return UserError(f"{cause.override}: cannot be read: {text}; would work: {works}")
        if isinstance(cause, MissingConfigException) and cause.missing_cfg_file:
            group, _, option = str(cause.missing_cfg_file).rpartition("/")
            # Hydra names the primary file also where another one overrides the option.
            file = text.split("'")[1]
            place = "" if file == "train" else f" (in {file}.yaml)"
            options = ", ".join(cause.options or ())
            return UserError(f"{group}={option}{place}: no such option; options: {options}")
        group = text.removeprefix(MULTIPLE).partition(". To override")[0]
        # No other file chooses an experiment, so Hydra's words are about what was typed.
        if text.startswith(MULTIPLE) and group not in LISTED:
            works = f"'- override /{group}: OPTION' in a file, {group}=OPTION without +"
            return UserError(f"{group}: two files choose an option of it; would work: {works}")
        if isinstance(cause, OmegaConfBaseException):
            key = "" if cause.full_key is None else str(cause.full_key)
            return UserError(f"{key}: {text}" if key and key not in text else text)
    return UserError("; ".join(_lines(error)) or type(error).__name__)


def _lines(error: BaseException) -> list[str]:
    """Lines of an error's message, without those about Python or Hydra."""
    lines = [line.strip() for line in str(error).splitlines()]
    return [line for line in dict.fromkeys(lines) if line and not line.startswith(_HIDDEN)]
