"""The verb ``verify``."""

from collections.abc import Sequence
from dataclasses import asdict

from harness.compose.arguments import Argument
from harness.compose.verb import Result, Verb

HELP = """`harness verify FOLDER...`: compare checkpoints with their recorded checksums.

FOLDER is a run folder, a folder of checkpoints, or one checkpoint. Exit code 0: all are intact, apart from
those that a stopped run has not finished; 3: one is damaged, or a folder has no complete one; 2: there is no
checkpoint.
"""


def verify(folders: Sequence[str], *, newest: bool) -> Result:
    """Compare checkpoints with their checksums."""
    from harness.checkpoint.verify import verify_all

    verdicts, code = verify_all(folders, newest=newest)
    return Result({"checkpoints": [asdict(each) for each in verdicts]}, code=code)


VERB = Verb(
    "verify",
    verify,
    help=HELP,
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
