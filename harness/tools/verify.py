"""``harness verify FOLDER...``: compare checkpoints with their recorded checksums.

FOLDER is a run folder, a folder of checkpoints, or one checkpoint. Exit code 0: all are intact, apart from
those that a stopped run has not finished; 3: one is damaged, or a folder has no complete one; 2: there is no
checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from harness.compose.arguments import Argument
from harness.compose.verb import Result, Verb
from harness.run.status import STATUS, RunStatus
from harness.util.errors import EXIT_MACHINE, EXIT_OK


def verify_all(folders: Sequence[str], *, newest: bool) -> Result:
    """Compare checkpoints with their checksums."""
    from harness.checkpoint.verify import paths_in, verify

    code, verdicts = EXIT_OK, []
    for folder in folders:
        states, paths = [], paths_in(folder)
        for path in paths[-1:] if newest else paths:
            verdict = verify(path)
            if verdict.state == "unfinished" and path == paths[-1] and _has_completed(Path(path)):
                reason = f"{verdict.reason}, and {STATUS} says that the run has completed"
                verdict = replace(verdict, state="damaged", reason=reason)
            states.append(verdict.state)
            verdicts.append(asdict(verdict))
            sys.stdout.write(f"{verdict.describe()}\n")
            sys.stdout.flush()
        if "damaged" in states or "ok" not in states:
            code = EXIT_MACHINE
    return Result({"checkpoints": verdicts}, code=code)


def _has_completed(checkpoint: Path) -> bool:
    """Whether the run of a checkpoint in ``RUN/checkpoints`` has completed; false if there is no such run."""
    return RunStatus(checkpoint.parent.parent).state == "completed"


VERB = Verb(
    "verify",
    verify_all,
    arguments=(
        Argument(
            "folders",
            nargs="+",
            metavar="FOLDER",
            help="a run folder, a folder of checkpoints, or a checkpoint",
        ),
        Argument("--newest", help="only the newest checkpoint of each folder"),
    ),
    has_json=True,
)
