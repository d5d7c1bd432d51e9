"""MLflow as a view of ``metrics.jsonl``: the job as parameters, rows as metrics by step (mlflow.org)."""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.metrics.views import ShownRun
from harness.util.encoding import flatten
from harness.util.errors import EXIT_OK, STOPPED

_JOB_ID, _FOLDER = "harness.job_id", "harness.run_dir"
_UPLOAD_SECONDS = 300.0
# Rows that come while a request is on its way are sent by the next one.
_ROWS_PER_REQUEST = 50
# Limits of MLflow's REST API (mlflow/utils/validation.py).
_PARAMS_PER_REQUEST, _METRICS_PER_REQUEST, _LONGEST_PARAM, _LONGEST_NAME = 100, 1000, 6000, 250
_NOT_IN_NAMES = re.compile(r"[^\w.:/ -]")
_Row = tuple[int, int, Mapping[str, Any]]


class MlflowView:
    """MLflow, on rank 0 only. A thread sends the rows, so that training does not wait for the server.

    A resumed run continues its MLflow run, which is found by tags: the job's id and the run folder. MLflow
    cannot remove values, so steps that an attempt has repeated have two.

    Args:
        run: the run to show; its options are ``MlflowOptions``.

    Raises:
        Exception: anything that mlflow raises when it is missing, misused or cannot reach its server.
    """

    name = "mlflow"

    def __init__(self, run: ShownRun) -> None:
        # Usage statistics that MLflow sends to its authors.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=run.options.tracking_uri)
        self._id = self._begin(run)
        self._rows: queue.SimpleQueue[_Row | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._step = run.start_step
        self._thread = threading.Thread(target=self._send_rows, name="mlflow", daemon=True)
        self._thread.start()

    def _begin(self, run: ShownRun) -> str:
        """Continue the run's MLflow run, or create one with the job as parameters; return its id."""
        name = run.options.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "harness"
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        tags = {_JOB_ID: run.run_id, _FOLDER: str(run.run_dir.absolute())}
        if run.start_step > 0:
            same = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
            earlier = self._client.search_runs([experiment], same, max_results=1)
            if earlier:
                self._client.update_run(earlier[0].info.run_id, status="RUNNING")
                return str(earlier[0].info.run_id)
        created = self._client.create_run(experiment, tags={**tags, **run.options.tags}, run_name=run.name)
        ident = str(created.info.run_id)
        for some in _batches(_params(run.job), _PARAMS_PER_REQUEST):
            self._client.log_batch(ident, params=some)
        return ident

    def log(self, row: Mapping[str, Any]) -> None:
        """Send a row in the background; raise an error that sending earlier rows has raised."""
        if self._error is not None:
            raise self._error
        self._step = int(row["step"])
        self._rows.put((self._step, time.time_ns() // 1_000_000, row))

    def close(self, summary: Mapping[str, Any]) -> None:
        """Send the rest; ``exit_code`` or ``exit_reason`` in ``summary`` set the status of the MLflow run."""
        final = {f"summary/{key}": value for key, value in flatten(dict(summary)).items()}
        self._rows.put((self._step, time.time_ns() // 1_000_000, final))
        self._rows.put(None)
        self._thread.join(_UPLOAD_SECONDS)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"rows were not sent within {_UPLOAD_SECONDS:.0f} seconds")
        code = int(summary.get("exit_code") or EXIT_OK)
        is_stopped = code in STOPPED or "exit_reason" in summary
        status = "KILLED" if is_stopped else "FINISHED" if code == EXIT_OK else "FAILED"
        self._client.set_terminated(self._id, status)

    def _send_rows(self) -> None:
        try:
            for rows in self._waiting_rows():
                metrics = [metric for row in rows for metric in _metrics(*row)]
                for some in _batches(metrics, _METRICS_PER_REQUEST):
                    self._client.log_batch(self._id, metrics=some)
        except Exception as error:  # raised by log and close
            self._error = error

    def _waiting_rows(self) -> Iterator[list[_Row]]:
        """Yield the rows that wait, some at a time, until the end."""
        while True:
            rows = [self._rows.get()]
            while len(rows) < _ROWS_PER_REQUEST and not self._rows.empty():
                rows.append(self._rows.get())
            yield [row for row in rows if row is not None]
            if rows[-1] is None:
                return


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[begin : begin + size] for begin in range(0, len(items), size))


def _params(job: dict[str, Any]) -> list[Any]:
    from mlflow.entities import Param

    return [Param(_valid(key), str(value)[:_LONGEST_PARAM]) for key, value in flatten(job).items()]


def _metrics(step: int, milliseconds: int, row: Mapping[str, Any]) -> Iterator[Any]:
    from mlflow.entities import Metric

    for key, value in row.items():
        if key != "step" and isinstance(value, int | float):
            yield Metric(_valid(key), float(value), milliseconds, step)


def _valid(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)[:_LONGEST_NAME]
