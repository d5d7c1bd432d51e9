"""``python -m harness.verify FOLDER...``: compare checkpoints with their recorded checksums.

FOLDER is a run folder, a folder of checkpoints, or one checkpoint. Exit code 0: all are intact; 3: one is
damaged, or a folder has no complete one; 2: there is no checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.app import run_parsed
from harness.arguments import Parser
from harness.errors import EXIT_MACHINE, EXIT_OK


def main() -> None:
    """Entry point of ``python -m harness.verify`` and of the console script."""
    parser = Parser(prog="python -m harness.verify", description="Compare checkpoints with their checksums.")
    text = "a run folder, a folder of checkpoints, or a checkpoint"
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help=text)
    parser.add_argument("--newest", action="store_true", help="only the newest checkpoint of each folder")
    run_parsed(parser, lambda typed: verify_all(typed.folders, newest=typed.newest))


def verify_all(folders: Sequence[str], *, newest: bool) -> int:
    """Compare the checkpoints in folders and print a line for each; return the exit code."""
    from harness.checkpoint.verify import paths_in, verify

    code = EXIT_OK
    for folder in folders:
        states = []
        for path in paths_in(folder)[-1:] if newest else paths_in(folder):
            verdict = verify(path)
            states.append(verdict.state)
            sys.stdout.write(f"{verdict.describe()}\n")
            sys.stdout.flush()
        if "damaged" in states or "ok" not in states:
            code = EXIT_MACHINE
    return code


if __name__ == "__main__":
    main()
