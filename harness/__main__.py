"""The command ``harness``."""

import difflib
import sys
from typing import NoReturn

from harness.compose.verb import VERBS, Verb, prepare_process, reported
from harness.util.errors import EXIT_OK, UserError

HELP = """`harness VERB`: run a verb of the harness, or of a package that extends it.

    harness train model=llama3_8b
    harness --help                          list all verbs

`python -m harness` is the same command.
"""

ADDED = {"encode": "./experiments/extensions/flux"}
"""Verbs that packages of this repository add, and what pip installs each with."""


def main() -> NoReturn:
    """Run the verb that the first argument names, and exit."""
    prepare_process()
    try:
        name, *arguments = sys.argv[1:] or ["--help"]
        if name in ("-h", "--help"):
            sys.stdout.write(f"{HELP}\n{_table()}")
            code = EXIT_OK
        else:
            code = _verb(name).run_line(arguments, own_process=True)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        code = reported(error)
    sys.exit(code)


def _verb(name: str) -> Verb:
    if name not in VERBS:
        if name in ADDED:
            raise UserError(f"{name}: no such verb; would work: pip install {ADDED[name]}")
        close = difflib.get_close_matches(name, list(VERBS), n=1)
        works = f"did you mean {close[0]}?" if close else f"would work: {', '.join(VERBS)}"
        raise UserError(f"{name}: no such verb; {works}")
    return VERBS[name]


def _table() -> str:
    """All verbs, each with the first line of its help."""
    width = max(map(len, VERBS))
    return "".join(f"  {name:<{width}}  {_purpose(name)}\n" for name in VERBS)


def _purpose(name: str) -> str:
    try:
        verb: Verb = VERBS[name]
    except UserError as error:
        return str(error)
    first = verb.help.strip().split("\n\n")[0].replace("\n", " ")
    return first.partition("`: ")[2] or first


if __name__ == "__main__":
    main()
