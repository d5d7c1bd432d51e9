"""Rules for every string in a job: one line, and no secrets. Imports no torch.

Strings end up in sbatch scripts, files, reports and trackers. Both rules are checked before any is
written.
"""

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from harness.config.fields import leaves
from harness.util.errors import ConfigError

# Unicode categories: control characters, line and paragraph separators, and lone surrogates, which
# UTF-8 cannot encode.
_REFUSED = ("Cc", "Zl", "Zp", "Cs")

_SECRET_NAME = re.compile(
    r"(?:^|[_.-])(?:keys?|sig|signature|jwt|creds?|pw"
    r"|\w*(?:token|secrets?|passwords?|passwd|passphrase|api_?keys?|credentials?|connection_?string))"
    r"(?:$|[_.\d-])|(?:^|_)(?:pat|pass|tok|auth|authorization)\d*$|_pwd$|_webhook(?:_url)?$",
    re.IGNORECASE,
)
_NO_SECRET_NAME = re.compile(r"_(?:file|path|dir|sock)$", re.IGNORECASE)
_SWITCHES = ("0", "1", "true", "false", "yes", "no")
# A variable with a literal value; `export NAME=$(cat file)` does not match. In small letters only
# some names, because `key=5/` and `eos_token=` are no secrets.
_ASSIGNMENT = re.compile(
    r"(?<![\w-])(?P<name>[A-Z_][A-Z0-9_]*)(?:=|:\s*)[\"']?(?P<value>[^\s\"'$`,;{}\[\]*][^\s\"'`,;{}\[\]]*)"
    r"|(?<![\w/-])(?P<small>\w*(?:secret|password|passwd|passphrase|api_?key)(?=[=:])"
    r"|(?:\w*(?:hf|hub|auth|access|api|github|wandb|bearer)_)?token(?==))(?:=|:\s*)[\"']?(?P<quoted>[^\s\"'$`,;/*\]}]{6,})"
)
_URL = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*)://(?:(?P<user>[^/?#\s]*)@)?\S*")
_PARAMETER = re.compile(r"[?&](?P<name>[\w.-]+)=(?P<value>[^&\s]+)")
TOKENS = {
    "hf_": r"hf_(?:(?=[A-Za-z]*\d)[A-Za-z0-9]{16,}|[A-Za-z0-9]{30,})(?!\w)",
    "ghp_": r"gh[a-z]_[A-Za-z0-9]{20,}",
    "github_pat_": r"github_pat_\w{20,}",
    "glpat-": r"glpat-[\w-]{20,}",
    "sk-": r"sk-(?:(?:proj|ant|svcacct|admin|or)-[\w-]{16,}|[A-Za-z0-9]{20,})",
    "AKIA": r"(?:AKIA|ASIA)[A-Z0-9]{12,}",
    "AIza": r"AIza[\w-]{30,}",
    "xox": r"xox[a-z]-[\w-]{10,}",
    "eyJ": r"eyJ[\w-]{16,}(?:\.[\w-]+)*",
    "wandb_v1_": r"wandb_v1_\w{16,}",
    "npm_": r"npm_[A-Za-z0-9]{30,}",
    "pypi-": r"pypi-(?=[a-z]*[A-Z\d])\w{16,}",
    "nvapi-": r"nvapi-[\w-]{20,}",
}
"""How known tokens begin, and the patterns of the complete ones."""
# What looks like a secret wherever it is. Names of runs and files, commit ids, digests of images
# and references to variables ($NAME) do not.
_FORMS = re.compile(
    rf"(?<![A-Za-z0-9])(?P<key>{'|'.join(TOKENS.values())})"
    r"|-----BEGIN (?P<pem>[A-Z ]*PRIVATE KEY.*)"
    r"|\bhooks\.slack\.com/services/(?P<webhook>[\w/]{10,})"
    r"|(?:Account|SharedAccess)Key=(?P<account>[^\s;\"'$]{6,})"
    r"|\b(?i:x-api-key|x-auth-token|private-token):\s*(?P<header>[^\s\"'$]{6,})"
    r"|\baws_(?:secret_access_key|session_token)\s+[\"']?(?P<aws>[^\s\"'$=]{6,})"
    r"|\b(?:mysql|mariadb)[\w-]*\s(?:[^|;&]*\s)?-p[\"']?(?P<mysql>[^\s\"'$]+)"
    r"|\b(?:docker|podman|skopeo|buildah|oras|registry)\s+login\s(?:[^|;&]*\s)?-p\s*[\"']?(?P<registry>[^\s\"'$]+)"
    r"|\blogin\s+\S+\s+password\s+(?P<netrc>[^\s\"'$]+)"
    r"|\b[Bb]earer\s+(?P<bearer>[\w.~+/=-]{6,})"
    r"|--[\w-]*(?:password|passwd|secret)[ =][\"']?(?P<password>[^\s\"'$/-][^\s\"']*)"
    r"|--[\w-]*(?:token|api-?key)[ =][\"']?(?P<token>[\w.+~][\w.+~:=/-]{7,})"
    r"|\bsshpass\s+-p\s*[\"']?(?P<sshpass>[^\s\"'$]+)"
    r"|\bcurl\b[^|;&]*?\s(?:-u|--user)[ =]?[\"']?[^\s:\"']+:(?P<curl>[^\s\"'$]+)"
    r"|\blogin\s(?:[^|;&]*\s)?(?P<login>\w{32,})"
    r"|(?<![\w./:@+-])(?!mailto:)(?P<user>[A-Za-z][\w.+-]*:[^\s/:@,\"'$]{2,})@(?!sha\d)[A-Za-z0-9]"
)
_SHORTEST_VALUE = 8
"""Characters of a variable's value from which on a text that holds it is refused; shorter ones are
words."""
_ELSEWHERE = "the value where its program looks for it, as in the environment"


class SecretError(ConfigError):
    """A field contains something that looks like a secret; the message does not repeat it."""

    def __init__(self, field: str, what: str, works: str) -> None:
        rule = f"holds {what}, and a job's fields are written to files, reports and trackers"
        super().__init__(field, "***", rule, works)


def validate_texts(config: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Check all strings of a config dataclass, also in lists and mappings.

    Raises:
        SecretError: a string contains something that looks like a secret.
        ConfigError: a string is not one printable line.
    """
    texts = []
    for name, _, value in leaves(config):
        if isinstance(value, str | list | tuple | dict):
            texts += [(field, text, value) for field, text in _texts(name, value)]
    # First, because the other error repeats the text.
    refuse_secrets(((field, text) for field, text, _ in texts), environment)
    for field, text, value in texts:
        for sign in "" if text.isprintable() else text:
            if unicodedata.category(sign) in _REFUSED:
                rule = f"must be one line of printable text, and holds U+{ord(sign):04X}"
                works = "one element for each line, like [a,b]" if isinstance(value, list) else ""
                raise ConfigError(field, text, rule, works)


def _texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _texts(name, element)
    elif isinstance(value, dict):
        for key, element in value.items():
            yield name, str(key)
            yield from _texts(f"{name}.{key}", element)


def refuse_secrets(
    texts: Iterable[tuple[str, str]], environment: Mapping[str, str] = os.environ
) -> None:
    """Check texts, each with the field that it is for.

    Raises:
        SecretError: a text contains something that looks like a secret, or one of ``environment``.
    """
    values = _values_of_secrets(environment)
    for field, text in texts:
        for _, what, works in _secrets(text, values):
            raise SecretError(field, what, works)
        variable = field.rpartition(".")[2]
        is_variable = variable.isupper() or field.startswith("cluster.env.")
        if text and is_variable and _is_secret(variable, text):
            raise SecretError(field, *_of_variable(variable))


def masked(message: str) -> str:
    """Return a message in which secrets are replaced by ``***``."""
    secrets = {
        re.escape(secret) for secret, _, _ in _secrets(message, _values_of_secrets(os.environ))
    }
    # Longer ones first, and no parts of words, because a password may be one letter.
    pattern = "|".join(sorted(secrets, key=len, reverse=True))
    return re.sub(rf"(?<!\w)(?:{pattern})(?!\w)", "***", message) if secrets else message


def _secrets(text: str, values: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the secrets in a text: each with what it is, and what would work."""
    for value, name in values.items():
        if value in text and not os.path.lexists(value):
            yield value, f"the value of {name} of the environment", _ELSEWHERE
    if "=" in text or ":" in text:
        for found in _ASSIGNMENT.finditer(text):
            name = found["name"] or found["small"]
            value = found["value"] or found["quoted"]
            if _is_secret(name, value):
                yield value, *_of_variable(name)
    for url in _URL.finditer(text) if "://" in text else ():
        user = url["user"] or ""
        parameters = [
            found["value"] for found in _PARAMETER.finditer(url[0]) if _is_secret(found["name"])
        ]
        if ":" in user or (user and "http" in url["scheme"].lower()):
            parameters.append(user)
        for parameter in parameters:
            works = (
                "the URL without it, and credentials where its client looks for them, as in the "
                "environment"
            )
            yield parameter, "a URL with a password or token", works
    for found in _FORMS.finditer(text):
        yield found[str(found.lastgroup)], "what looks like a password or token", _ELSEWHERE


def _of_variable(name: str) -> tuple[str, str]:
    works = f"export {name} in the shell that starts the job; SLURM passes it on"
    return f"a value of {name}, which looks like a secret", works


def _values_of_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        value: name
        for name, value in environment.items()
        if len(value) >= _SHORTEST_VALUE and _is_secret(name, value)
    }


def _is_secret(name: str, value: str = "") -> bool:
    """Whether a variable or URL parameter of this name holds a secret, rather than the path of one."""
    is_secret = _SECRET_NAME.search(name) is not None and _NO_SECRET_NAME.search(name) is None
    return is_secret and value.lower() not in _SWITCHES
