"""Rows of ``metrics.jsonl`` for MLflow (mlflow.org)."""

import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from queue import SimpleQueue
from typing import Any

from harness.config.fields import label
from harness.config.metrics import ViewKind
from harness.metrics.views import UPLOAD_SECONDS, ShownRun
from harness.util.encoding import flatten
from harness.util.errors import EXIT_OK, STOPPED
from harness.util.words import plural

_JOB_ID = "harness.job_id"
_FOLDER = "harness.run_dir"
# Limits of MLflow's REST API (mlflow/utils/validation.py).
_PARAMS_PER_REQUEST = 100
_METRICS_PER_REQUEST = 1000
_ROWS_AT_ONCE = 100
_LONGEST_PARAM = 6000
_LONGEST_NAME = 250
_NOT_IN_NAMES = re.compile(r"[^\w.:/ -]")


@dataclass(frozen=True)
class MlflowOptions:
    """Options of the view ``mlflow``."""

    tracking_uri: str | None = label(None)
    """Server or database, such as ``sqlite:///mlflow.db``; null: MLFLOW_TRACKING_URI, or MLflow's
    default."""
    experiment: str | None = label(None)
    """MLflow experiment of the run; null: MLFLOW_EXPERIMENT_NAME, or else ``harness``."""
    tags: dict[str, str] = label(factory=dict)
    """Tags of the MLflow run."""


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
        self._thread.join(UPLOAD_SECONDS)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            lost = plural(self._rows_put - self._rows_sent, "row")
            raise TimeoutError(
                f"the last {lost}, one of them the summary, and the status "
                f"were not sent within {UPLOAD_SECONDS:g} seconds"
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


MLFLOW = ViewKind("harness_extensions.mlflow_view:MlflowView", MlflowOptions)
