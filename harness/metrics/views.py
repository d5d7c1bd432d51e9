"""Views of ``metrics.jsonl``: the same rows, for W&B, TensorBoard and others.

Keys are those of ``metrics.jsonl``, so a metric has one name everywhere. A view may raise from any
method; ``harness.metrics.recorder`` then switches it off and the run continues.
"""

import netrc
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from harness.config.metrics import MetricsConfig
from harness.util.encoding import dumps, flatten
from harness.util.errors import EXIT_OK, STOPPED
from harness.util.words import plural

_DEFAULT_PROJECT = "harness"
_UPLOAD_SECONDS = 300.0
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
            settings["finish_timeout"] = _UPLOAD_SECONDS
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


_JOB_ID = "harness.job_id"
_FOLDER = "harness.run_dir"
# Limits of MLflow's REST API (mlflow/utils/validation.py).
_PARAMS_PER_REQUEST = 100
_METRICS_PER_REQUEST = 1000
_ROWS_AT_ONCE = 100
_LONGEST_PARAM = 6000
_LONGEST_NAME = 250
_NOT_IN_NAMES = re.compile(r"[^\w.:/ -]")


class MlflowView:
    """MLflow, on rank 0 only: the job as parameters, rows as metrics by step (mlflow.org).

    A thread sends the rows, so that training does not wait for the server. Rows that have come while
    it was sending go together: a slow server gets fewer requests, not a longer queue.

    A resumed run continues its MLflow run, which is found by tags: the job's id and the run folder.
    MLflow cannot remove values, so steps that an attempt has repeated have two.

    Args:
        run: the run to show; its options are ``MlflowOptions``.
    """

    name = "mlflow"

    def __init__(self, run: ShownRun) -> None:
        # Usage statistics that MLflow sends to its authors.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=run.options.tracking_uri)
        self._id = self._begin(run)
        self._step = run.start_step
        self._waiting: SimpleQueue[list[Any] | None] = SimpleQueue()
        """Metrics of rows to send; None ends the thread."""
        self._rows_put = 0
        self._rows_sent = 0
        self._error: Exception | None = None
        # A daemon: the process can end while a request hangs.
        self._thread = threading.Thread(target=self._send, name="mlflow", daemon=True)
        self._thread.start()

    def _begin(self, run: ShownRun) -> str:
        from mlflow.entities import Param

        name = run.options.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "harness"
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        tags = {_JOB_ID: run.run_id, _FOLDER: str(run.run_dir.absolute())}
        others = {**dict.fromkeys(run.job.get("tags", ()), "true"), **run.options.tags}
        if run.job.get("notes"):
            others["mlflow.note.content"] = run.job["notes"]
        if run.start_step > 0:
            same = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
            earlier = self._client.search_runs([experiment], same, max_results=1)
            if earlier:
                self._client.update_run(earlier[0].info.run_id, status="RUNNING")
                return str(earlier[0].info.run_id)
        created = self._client.create_run(experiment, tags={**tags, **others}, run_name=run.name)
        ident = str(created.info.run_id)
        params = [
            Param(_valid(key), str(each)[:_LONGEST_PARAM]) for key, each in flatten(run.job).items()
        ]
        for begin in range(0, len(params), _PARAMS_PER_REQUEST):
            self._client.log_batch(ident, params=params[begin : begin + _PARAMS_PER_REQUEST])
        return ident

    def log(self, row: Mapping[str, Any]) -> None:
        """Send a row in the background; raise an error that sending earlier rows has raised."""
        if self._error is not None:
            raise self._error
        self._step = int(row["step"])
        self._put(row)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Send the rest; ``exit_code`` or ``exit_reason`` in ``summary`` set the status of the MLflow run."""
        self._put({f"summary/{key}": value for key, value in flatten(dict(summary)).items()})
        self._waiting.put(None)
        self._thread.join(_UPLOAD_SECONDS)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            lost = plural(self._rows_put - self._rows_sent, "row")
            raise TimeoutError(
                f"the last {lost}, one of them the summary, and the status "
                f"were not sent within {_UPLOAD_SECONDS:g} seconds"
            )
        code = int(summary.get("exit_code") or EXIT_OK)
        is_stopped = code in STOPPED or "exit_reason" in summary
        status = "FAILED"
        if is_stopped:
            status = "KILLED"
        elif code == EXIT_OK:
            status = "FINISHED"
        self._client.set_terminated(self._id, status)

    def _put(self, row: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        metrics = [
            Metric(_valid(key), float(value), now, self._step)
            for key, value in row.items()
            if key != "step" and isinstance(value, int | float)
        ]
        self._rows_put += 1
        self._waiting.put(metrics)

    def _send(self) -> None:
        """Send rows as they come; those that wait go together."""
        is_last = False
        try:
            while not is_last:
                rows = [self._waiting.get()]
                while len(rows) < _ROWS_AT_ONCE and not self._waiting.empty():
                    rows.append(self._waiting.get())
                is_last = rows[-1] is None
                found = [row for row in rows if row is not None]
                metrics = list(chain.from_iterable(found))
                for begin in range(0, len(metrics), _METRICS_PER_REQUEST):
                    some = metrics[begin : begin + _METRICS_PER_REQUEST]
                    self._client.log_batch(self._id, metrics=some)
                self._rows_sent += len(found)
        except Exception as error:  # raised by log and close
            self._error = error


def _valid(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)[:_LONGEST_NAME]
