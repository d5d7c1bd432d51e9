"""Path of the configuration tree, in a checkout and in an installed wheel."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from harness.errors import UserError


def conf_dir() -> str:
    """Return the absolute path of ``conf/``: ``$HARNESS_CONF_DIR``, the checkout's, or the wheel's copy.

    Raises:
        UserError: ``$HARNESS_CONF_DIR`` or this installation has no ``train.yaml``.
    """
    return _conf_dir(os.environ.get("HARNESS_CONF_DIR"))


@functools.cache
def _conf_dir(chosen: str | None) -> str:
    package = Path(__file__).resolve().parent
    for candidate in [Path(chosen)] if chosen else [package.parent / "conf", package / "_conf"]:
        if os.path.isfile(candidate / "train.yaml"):
            return str(candidate.resolve())
    if chosen:
        raise UserError(f"HARNESS_CONF_DIR={chosen}: holds no train.yaml; would work: a copy of conf/")
    raise UserError("no conf/ found; would work: HARNESS_CONF_DIR=FOLDER, the folder that holds train.yaml")
