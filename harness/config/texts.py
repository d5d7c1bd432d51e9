"""Rules for every string in a job: one line, and no secrets. Imports no torch.

Strings end up in sbatch scripts, files, reports and trackers. Both rules are checked before any is written.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from harness.config.fields import leaves
from harness.util.errors import ConfigError

# Unicode categories: control characters, line and paragraph separators, and lone surrogates, which UTF-8
# cannot encode.
_REFUSED = ("Cc", "Zl", "Zp", "Cs")

_SECRET_NAME = re.compile(
    r"(?:^|[_.-])(?:key|sig|signature|\w*(?:token|secret|password|passwd|passphrase|api_?key|credentials?))"
    r"(?:$|[_.\d-])",
    re.IGNORECASE,
)
_FILE_NAME = re.compile(r"_(?:file|path|dir)$", re.IGNORECASE)
# A variable with a literal value; `export NAME=$(cat file)` does not match.
_ASSIGNMENT = re.compile(r"(?<![\w-])(?P<name>[A-Z_][A-Z0-9_]*)=[\"']?[^\s\"'$`,;]")
_URL = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*)://(?:(?P<user>[^/?#\s]*)@)?\S*")
_PARAMETER = re.compile(r"[?&](?P<name>[\w.-]+)=[^&\s]")


class SecretError(ConfigError):
    """A field contains something that looks like a secret; the message does not repeat it."""

    def __init__(self, field: str, what: str, works: str) -> None:
        rule = f"holds {what}, and a job's fields are written to files, reports and trackers"
        super().__init__(field, "***", rule, works)


def validate_texts(config: Any) -> None:
    """Check all strings of a config dataclass, also in lists and mappings.

    Raises:
        SecretError: a string contains something that looks like a secret.
        ConfigError: a string is not one printable line.
    """
    fields = [
        (name, value) for name, _, value in leaves(config) if isinstance(value, str | list | tuple | dict)
    ]
    texts = [(field, text, value) for name, value in fields for field, text in _texts(name, value)]
    # First, because the other error repeats the text.
    for field, text, _ in texts:
        _refuse_secrets(field, text)
    for field, text, value in texts:
        if not text.isprintable():
            _refuse_control_characters(field, text, in_list=isinstance(value, list))


def _refuse_control_characters(field: str, text: str, *, in_list: bool) -> None:
    found = next((each for each in text if unicodedata.category(each) in _REFUSED), None)
    if found is not None:
        rule = f"must be one line of printable text, and holds U+{ord(found):04X}"
        raise ConfigError(field, text, rule, "one element for each line, like [a,b]" if in_list else "")


def _texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, string) for all strings in a value, including the keys of mappings."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(name, each)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield name, str(key)
            yield from _texts(f"{name}.{key}", each)


def _refuse_secrets(field: str, text: str) -> None:
    variable = field.rpartition(".")[2]
    is_variable = variable.isupper() or field.startswith("cluster.env.")
    names = [variable] if text and is_variable else []
    if "=" in text:
        names += [found["name"] for found in _ASSIGNMENT.finditer(text)]
    for name in names:
        if _is_secret(name):
            works = f"export {name} in the shell that starts the job; SLURM passes it on"
            raise SecretError(field, f"a value of {name}, which looks like a secret", works)
    for url in _URL.finditer(text) if "://" in text else ():
        user, scheme = url["user"] or "", url["scheme"].lower()
        secret = ":" in user or (user and scheme.startswith("http"))
        if secret or any(_is_secret(each["name"]) for each in _PARAMETER.finditer(url[0])):
            works = (
                "the URL without it, and credentials where its client looks for them, as in the environment"
            )
            raise SecretError(field, "a URL with a password or token", works)


def _is_secret(name: str) -> bool:
    """Whether a variable or URL parameter of this name holds a secret, rather than the path of one."""
    return _SECRET_NAME.search(name) is not None and _FILE_NAME.search(name) is None
