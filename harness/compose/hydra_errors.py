"""Errors of Hydra, OmegaConf and YAML as errors of the user: what is wrong, where, and what would work."""

import contextlib
import re
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from harness.compose.overrides import LISTED, groups, no_such_option, options_of
from harness.compose.paths import config_folders
from harness.config.elsewhere import answer
from harness.config.failures import chain_of
from harness.config.fields import leaf_fields
from harness.config.job import Job
from harness.util.errors import ConfigError, UserError
from harness.util.words import meant

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
_CHOICE = re.compile(r"^ *(- *(?:\w+ +)?/?([\w./-]+)[\w@.]* *[:=] *([^\s#]+).*)$", re.MULTILINE)
"""A line of a defaults list, its group without slash and place, and its option."""


@contextlib.contextmanager
def user_errors(files: Iterable[str] = ()) -> Iterator[None]:
    """Turn errors of Hydra, OmegaConf and YAML into one-line errors.

    Args:
        files: names of the files that the user has chosen, such as ``experiment/mine``.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise _to_user_error(error, list(files)) from error


def _to_user_error(error: Exception, files: list[str]) -> UserError:
    import yaml
    from hydra.errors import ConfigCompositionException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    for cause in chain_of(error, suppressed=True):
        text = "; ".join(_lines(cause))
        if isinstance(cause, yaml.YAMLError):
            works = "YAML in UTF-8, indented by spaces, each key once"
            return UserError(f"{text}; would work: {works}")
        if isinstance(cause, OverrideParseException):
            # The rest is the grammar's own words.
            of_function = re.search("while evaluating '.*?': (.*)", text)
            why = f": {of_function[1]}" if of_function else ""
            works = _readable(cause.override)
            return UserError(f"{cause.override}: cannot be read{why}; would work: {works}")
        if isinstance(cause, ConfigCompositionException):
            return _of_choice(cause, text, files)
        if isinstance(cause, OmegaConfBaseException):
            return _of_reference(cause, text, files)
    return UserError("; ".join(_lines(error)) or type(error).__name__)


def _readable(override: str) -> str:
    """Return the override with the brackets and quotes that Hydra's grammar needs, as a shell reads it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, _, value = override.partition("=")
    tried = [value.strip("=,"), value.rstrip("]}"), f"{value}]", f"{value}}}", f'"{value}"']
    if value.startswith("["):
        elements = '","'.join(each.strip() for each in value.strip("[]").split(","))
        tried[-1] = f'["{elements}"]'
    for each in tried:
        try:
            OverridesParser.create().parse_override(f"{key}={each}")
        except HydraException:
            continue
        return shlex.quote(f"{key}={each}")
    return "closed brackets and quotes, and quotes around other signs: 'field=\"a b\"'"


def _of_choice(error: Any, text: str, files: list[str]) -> UserError:
    """The error of a choice in a defaults list: its file, its line, and one that would work."""
    # Hydra names what is wrong: a missing file, a group with two options, or a name in quotes.
    missing = str(getattr(error, "missing_cfg_file", None) or "")
    multiple = text.removeprefix(MULTIPLE).partition(". To override")[0]
    quoted = re.findall("'([^']+)'", text) or [""]
    if text.startswith("In '"):
        files = [quoted[0], *files]
    if missing:
        wrong = missing
    elif text.startswith(MULTIPLE):
        wrong = multiple.partition("@")[0]
    else:
        wrong = quoted[-1].partition("@")[0]
    for file in files:
        for line, group, option in _CHOICE.findall(_text_of(file)):
            rule = _rule_of_choice(line, group, option)
            ends = (f"/{group}", f"/{group}/{option}", f"/{group}={option}")
            if rule and f"/{wrong}".endswith(ends):
                return UserError(f'{file}.yaml, "{line}": {rule}')
    group, _, option = missing.rpartition("/")
    if group in groups():
        place = "" if files[:1] in ([], ["train"]) else f" (in {files[0]}.yaml)"
        return UserError(f"{group}={option}{place}: {no_such_option(group, option)}")
    # No other file chooses an experiment, so Hydra's words are about what was typed.
    if multiple not in (text, *LISTED):
        works = f"'- override /{multiple}: OPTION' in a file, {multiple}=OPTION without +"
        return UserError(f"{multiple}: two files choose an option of it; would work: {works}")
    return UserError(text)


def _rule_of_choice(line: str, group: str, option: str) -> str:
    """Return the mistake in a line of a defaults list, and a line that would work; nothing if it is right."""
    if group in groups() and option not in options_of(group):
        return no_such_option(group, option)
    known = [group] if group in groups() else meant(group, groups()) or ["GROUP"]
    works = f"- override /{known[0]}: {option}"
    if line == works:
        return ""
    rule = f"does not override /{group}" if group in groups() else "no such group"
    return answer(group, option, Job) or f"{rule}; would work: {works}"


def _of_reference(error: Any, text: str, files: list[str]) -> UserError:
    """The error of a value with ``${...}``: its file, the value, and what would work."""
    key = re.sub(r"\[(\d+)\]", r".\1", str(error.full_key or ""))
    value = str(error.value if error.child_node is None else error.child_node._value())
    if "${" not in value:
        return UserError(f"{key}: {text}" if key and key not in text else text)
    rule = "refers to itself" if "Recursive" in text else "is no reference that can be read"
    works = "${GROUP.FIELD} such as ${model.name}, or ${oc.env:NAME,VALUE}"
    missing = re.search("Interpolation key '(.+)' not found|variable '(.+)' not found", text)
    if missing and missing[2]:
        rule = f"{missing[2]} is not set in the environment"
        works = f"${{oc.env:{missing[2]},VALUE}}, or export {missing[2]}=VALUE"
    elif missing:
        rule = f"there is no {missing[1]}"
        close = meant(missing[1], [name for name, _, _ in leaf_fields(Job())])
        if close not in ([], [key]):
            works = f"${{{close[0]}}}"
    for file in files:
        if value in _text_of(file):
            rule += f" (in {file}.yaml)"
    return ConfigError(key, value, rule, works)


def _text_of(file: str) -> str:
    path = config_folders().find(file)
    return path.read_text("utf-8") if path else ""


def _lines(error: BaseException) -> list[str]:
    """Lines of an error's message, without those about Python or Hydra."""
    lines = [line.strip() for line in str(error).splitlines()]
    return [line for line in dict.fromkeys(lines) if line and not line.startswith(_HIDDEN)]
