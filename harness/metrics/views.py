"""Views of ``metrics.jsonl``: the same rows, for W&B, TensorBoard and others.

Keys are those of ``metrics.jsonl``, so a metric has one name everywhere. A view may raise from any
method; ``harness.metrics.recorder`` then switches it off and the run continues.
"""

import netrc
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from harness.config.metrics import MetricsConfig
from harness.util.encoding import dumps, flatten

_DEFAULT_PROJECT = "harness"
UPLOAD_SECONDS = 300.0
_EVENT_FLUSH_SECONDS = 10


@dataclass(frozen=True)
class ShownRun:
    """A run that a view shows.

    Attributes:
        config: the configuration of all views.
        run_dir: the run folder, for local files of the view.
        run_id: the id of the run; a resumed run continues under it.
        name: the name to show.
        job: the resolved job as plain values.
        start_step: the last step already done; rows of later steps that an earlier attempt has
            logged come again.
        options: those of the view in ``metrics.views``, as its own dataclass; None: it has none.
    """

    config: MetricsConfig
    run_dir: Path
    run_id: str
    name: str
    job: dict[str, Any]
    start_step: int = 0
    options: Any = None


class View(Protocol):
    """Shows rows of metrics."""

    name: str

    def log(self, row: Mapping[str, Any]) -> None:
        """Show one row; it has a ``step``."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """Show the final values and flush everything."""


class WandbView:
    """Weights & Biases, on rank 0 only. The local copy of the run is in the run folder's ``wandb``.

    Rows have their own ``step`` and are logged without ``step=``: W&B drops a row whose step is
    below the last one, as after a resume from an older checkpoint.
    """

    name = "wandb"

    def __init__(self, run: ShownRun) -> None:
        import wandb

        config = run.config
        # Capturing stdout interferes with srun and with the progress bar.
        settings: dict[str, Any] = {"console": "off"}
        if "finish_timeout" in wandb.Settings.model_fields:
            # By default `finish` waits for the upload without limit, while the allocation is idle.
            # Data that was not uploaded stays in the run folder, for `wandb sync`.
            settings["finish_timeout"] = UPLOAD_SECONDS
        self._run = wandb.init(
            dir=run.run_dir,
            id=run.run_id,
            resume="allow",
            name=run.name,
            group=config.wandb_group,
            notes=run.job.get("notes") or None,
            tags=run.job.get("tags") or None,
            config=run.job,
            settings=wandb.Settings(**settings),
            project=config.wandb_project or os.environ.get("WANDB_PROJECT") or _DEFAULT_PROJECT,
            mode=wandb_mode(),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, row: Mapping[str, Any]) -> None:
        self._run.log({key: value for key, value in row.items() if value is not None})

    def close(self, summary: Mapping[str, Any]) -> None:
        """An ``exit_code`` in ``summary`` other than 0 marks the run as failed."""
        self._run.summary.update(flatten(dict(summary)))
        self._run.finish(exit_code=int(summary.get("exit_code") or 0))


def wandb_mode() -> Literal["online", "offline"] | None:
    """Return the mode for ``wandb.init``; None if the environment sets WANDB_MODE, which then decides.

    Without an API key it is ``offline``, because ``online`` would ask for one on a terminal and
    raise otherwise.
    """
    if os.environ.get("WANDB_MODE"):
        return None
    return "online" if has_wandb_key() else "offline"


def has_wandb_key() -> bool:
    """Whether wandb would find credentials: in the environment, or in netrc for its server."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    server = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    configured = os.environ.get("NETRC")
    files = [Path(configured)] if configured else [Path.home() / ".netrc", Path.home() / "_netrc"]
    return any(file.is_file() and server in netrc.netrc(file).hosts for file in files)


class TensorBoardView:
    """TensorBoard event files in the run folder's ``tensorboard``.

    Args:
        run: the run to show; events of an earlier attempt after its start_step are purged.
    """

    name = "tensorboard"

    def __init__(self, run: ShownRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            log_dir=str(run.run_dir / "tensorboard"),
            purge_step=run.start_step + 1,
            flush_secs=_EVENT_FLUSH_SECONDS,
        )
        self._writer.add_text("job", f"```json\n{dumps(run.job, indent=2)}\n```", run.start_step)

    def log(self, row: Mapping[str, Any]) -> None:
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                self._writer.add_scalar(key, value, row["step"])

    def close(self, summary: Mapping[str, Any]) -> None:
        self._writer.add_text("summary", f"```json\n{dumps(dict(summary), indent=2)}\n```")
        self._writer.close()
