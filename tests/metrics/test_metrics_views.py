"""W&B, TensorBoard and MLflow, read back from the files they write; a failing view does not stop a run."""

import math
import struct
import threading

import pytest
from cases import rows
from one_line import one_line
from plugins import add_extensions
from processes import PATIENCE, until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness.compose.composer import compose_job
from harness.config.metrics import MetricsConfig
from harness.metrics.jsonl import read_metrics
from harness.metrics.recorder import Recorder
from harness.metrics.views import ShownRun, wandb_mode
from harness.util.errors import ConfigError

JOB = {
    "tags": ["tp2"],
    "model": {"name": "tiny", "dims": [1, 2]},
    "cluster": {"env": {"A*B": "x" * 7000}},
    "training": {f"field{number}": number for number in range(150)},
}


@pytest.fixture(autouse=True)
def no_wandb_account(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def record(run_dir, start_step=0, **fields):
    config = MetricsConfig(console="plain", **fields)
    recorder = Recorder(ShownRun(config, run_dir, "abc123", "my run", JOB), total_steps=9)
    recorder.begin(start_step)
    return recorder


@pytest.mark.parametrize(
    ("environment", "netrc", "mode"),
    # In the last but one row the key is that of another server.
    rows("""
        {}                                                false  offline
        {WANDB_API_KEY: k}                                false  online
        {WANDB_IDENTITY_TOKEN_FILE: f}                    false  online
        {}                                                true   online
        {WANDB_BASE_URL: "https://wandb.example.org"}     true   offline
        {WANDB_MODE: offline}                             false  null
    """),
)
def test_wandb_is_online_with_a_key(monkeypatch, tmp_path, environment, netrc, mode):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if netrc:
        (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert wandb_mode() == mode


# A .wandb file is a LevelDB log (github.com/google/leveldb, doc/log_format.md) after a header of its own.
_WANDB_HEADER, _CHUNK_HEADER, _BLOCK = 7, 7, 32768
_WHOLE, _LAST = 1, 4


def wandb_records(folder):
    """The records of the one offline run below ``folder``."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    content, data, at = path.read_bytes(), b"", _WANDB_HEADER
    while at + _CHUNK_HEADER <= len(content):
        if (
            _BLOCK - at % _BLOCK < _CHUNK_HEADER
        ):  # the rest of a block too small for a header is padding
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        at += _CHUNK_HEADER
        data += content[at : at + length]
        at += length
        if kind in (_WHOLE, _LAST):
            record = Record()
            record.ParseFromString(data)
            yield record
            data = b""


def test_wandb_writes_an_offline_run(tmp_path):
    recorder = record(tmp_path, wandb=True, wandb_group="sweep")
    recorder.log({"step": 7, "loss": 3.5, "mfu": None})
    recorder.log({"step": 5, "loss": 3.25})  # after a resume from an older checkpoint
    recorder.close({"exit_code": 0, "window": {"steps": 2}})

    # W&B's own process may write the file after `finish` has returned.
    until(lambda: any(record.HasField("run") for record in wandb_records(tmp_path)))
    records = list(wandb_records(tmp_path))
    [run] = [each.run for each in records if each.HasField("run")]
    assert (run.run_id, run.display_name, run.run_group) == ("abc123", "my run", "sweep")
    assert (list(run.tags), run.project) == (["tp2"], "harness")
    assert any(update.key == "training" for update in run.config.update)
    rows = [
        {(item.key or "/".join(item.nested_key)): item.value_json for item in each.history.item}
        for each in records
        if each.HasField("history")
    ]
    found = [(row["step"], row["loss"], "mfu" in row) for row in rows]
    assert found == [("7", "3.5", False), ("5", "3.25", False)]


def test_tensorboard_has_the_rows_and_purges_what_a_resume_repeats(tmp_path):
    first = record(tmp_path, tensorboard=True)
    for step in range(1, 6):
        first.log({"step": step, "loss": 1.0, "mfu": None, "note": "text", "tokens": 128})
    first.close({"exit": "done"})
    again = record(tmp_path, start_step=3, tensorboard=True)
    again.log({"step": 4, "loss": 2.0})
    again.close({})
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(1, 1), (2, 1), (3, 1), (4, 2)]
    assert set(found.Tags()["scalars"]) == {"loss", "tokens"}
    assert b"field149" in found.Tensors("job/text_summary")[0].tensor_proto.string_val[0]


@pytest.fixture(scope="module", autouse=True)
def extensions():
    with pytest.MonkeyPatch.context() as patch:
        add_extensions(patch)
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    # Creating the tables takes seconds.
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


def options(store):
    return {
        "views": {"mlflow": {"tracking_uri": store, "experiment": "here", "tags": {"team": "a"}}}
    }


def runs(store, run_dir):
    """The runs of a folder, and MLflow's own client."""
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("here").experiment_id
    return list(client.search_runs([experiment], f"tags.`harness.run_dir` = '{run_dir}'")), client


def history(store, run_dir, key):
    [run], client = runs(store, run_dir)
    return [
        (metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key)
    ]


def test_mlflow_has_a_run_its_failure_and_its_resumption(store, tmp_path, capfd):
    recorder = record(tmp_path, **options(store))
    recorder.log({"step": 1, "loss": 3.5, "mfu": None, "note": "text"})
    recorder.log({"step": 2, "loss": math.nan, "moe.load[0]": 7})
    recorder.close({"exit_code": 3})
    [run], _ = runs(store, tmp_path)
    assert (run.info.status, run.info.run_name) == ("FAILED", "my run")
    assert run.data.tags["harness.job_id"] == "abc123" and run.data.tags["team"] == "a"
    assert run.data.params["model.dims"] == "[1, 2]"
    assert run.data.params["cluster.env.A_B"] == "x" * 6000
    first, (step, value) = history(store, tmp_path, "loss")
    assert first == (1, 3.5) and step == 2 and math.isnan(value)
    assert history(store, tmp_path, "moe.load_0_") == [(2, 7.0)]

    resumed = record(tmp_path, start_step=1, **options(store))
    resumed.log({"step": 2, "loss": 3.0})
    resumed.close({"loss": 3.0, "window": {"steps": 1}})
    [run], _ = runs(store, tmp_path)
    assert run.info.status == "FINISHED"
    assert history(store, tmp_path, "loss")[-1] == (2, 3.0)
    assert run.data.metrics["summary/window.steps"] == 1
    assert "is off" not in capfd.readouterr().out


def test_mlflow_has_another_run_for_one_from_the_beginning(store, tmp_path):
    for summary in ({"exit_reason": "SIGTERM"}, {}):
        record(tmp_path, **options(store)).close(summary)
    assert sorted(run.info.status for run in runs(store, tmp_path)[0]) == ["FINISHED", "KILLED"]


def test_mlflow_gets_rows_together_and_is_waited_for_with_a_limit(
    store, tmp_path, monkeypatch, capsys
):
    """A server that answers late, then not at all."""
    send = pytest.importorskip("mlflow").MlflowClient.log_batch
    answer = threading.Event()
    sizes = []

    def slow(self, ident, **sent):
        sizes.append(len(sent.get("metrics", ())))
        answer.wait(PATIENCE if sizes[-1] else 0)
        send(self, ident, **sent)

    monkeypatch.setattr("mlflow.MlflowClient.log_batch", slow)
    loads = {f"load.{number}": 1.0 for number in range(400)}
    recorder = record(tmp_path, **options(store))
    recorder.log({"step": 0, **loads})
    until(lambda: sizes[-1])
    for step in range(1, 5):
        recorder.log({"step": step, **loads})
    answer.set()
    recorder.close({})
    assert sizes[-3:] == [400, 1000, 600]
    assert history(store, tmp_path, "load.9") == [(step, 1.0) for step in range(5)]
    answer.clear()
    monkeypatch.setattr("harness_extensions.mlflow_view.UPLOAD_SECONDS", 0.2)
    recorder = record(tmp_path, **options(store))
    recorder.log({"step": 1, **loads})
    recorder.close({})
    answer.set()
    lost = "the last 2 rows, one of them the summary, and the status were not sent within 0.2 s"
    assert lost in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (
            "mlflow.server=x",
            "mlflow.server=x: no such field; metrics.views.mlflow has: experiment, tags, ",
        ),
        ("mlflow.tags=x", "mlflow.tags=x: must be a mapping of names to text"),
        ("mlflow=on", "mlflow=on: must be a mapping of the view's options"),
    ],
)
def test_options_of_a_view_are_checked(typed, says):
    with one_line(ConfigError, f"metrics.views.{says}"):
        compose_job(["model=llama3_tiny", f"metrics.views.{typed}"])


@pytest.mark.parametrize(
    ("option", "shown"),
    rows("""
        default      {}
        wandb        {wandb: {}}
        tensorboard  {tensorboard: {}}
        all          {wandb: {}, tensorboard: {}}
    """),
)
def test_shipped_views(option, shown):
    assert compose_job(["model=llama3_tiny", f"metrics={option}"]).metrics.shown == shown


class BrokenView:
    """A view that fails from step 2 on."""

    name = "wandb"

    def __init__(self, *args): ...

    def log(self, row):
        if row["step"] >= 2:
            raise ConnectionError("the server\nis gone")

    def close(self, summary):
        raise ConnectionError("still gone")


def fail(*_, **__):
    raise RuntimeError("no server")


@pytest.mark.parametrize(
    ("view", "broken", "replacement", "rows", "reason"),
    [
        ("wandb", "wandb.init", fail, 3, "RuntimeError: no server"),
        (
            "wandb",
            "harness.metrics.views.WandbView",
            BrokenView,
            3,
            "ConnectionError: the server is gone",
        ),
        ("wandb", "harness.metrics.views.WandbView", BrokenView, 1, "ConnectionError: still gone"),
        ("mlflow", "mlflow.MlflowClient.log_batch", fail, 3, "RuntimeError: no server"),
    ],
)
def test_a_view_that_fails_is_switched_off_once(
    store, tmp_path, monkeypatch, capsys, view, broken, replacement, rows, reason
):
    """When it starts, logs or closes; the file and the other view continue."""
    pytest.importorskip(view)
    monkeypatch.setattr(broken, replacement)
    fields = {"wandb": True} if view == "wandb" else options(store)
    recorder = record(tmp_path, tensorboard=True, **fields)
    for step in range(1, rows + 1):
        recorder.log({"step": step, "loss": 2.0})
    recorder.close({})
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert warnings == [f"warning: {view} is off, metrics.jsonl continues: {reason}"]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == rows
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert len(found.Scalars("loss")) == rows
