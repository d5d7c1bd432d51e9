"""Where the configuration tree lies, in a checkout and in an installed wheel."""

from __future__ import annotations

import os
from pathlib import Path


def conf_dir() -> str:
    """Returns the absolute path of ``conf/``: ``$HARNESS_CONF_DIR``, the checkout's, or the wheel's copy.

    Hydra finds a relative path only while the task function lives in ``__main__``; an absolute one
    works for ``python -m``, console scripts and wheels alike.

    Raises:
        FileNotFoundError: none of the three holds a ``train.yaml``.
    """
    package = Path(__file__).resolve().parent
    for candidate in (os.environ.get("HARNESS_CONF_DIR"), package.parent / "conf", package / "_conf"):
        if candidate and (Path(candidate) / "train.yaml").is_file():
            return str(Path(candidate).resolve())
    raise FileNotFoundError("no conf/ found: set HARNESS_CONF_DIR to the folder that holds train.yaml")
