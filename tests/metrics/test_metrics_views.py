"""W&B and TensorBoard write files into the run folder, offline."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness.config.metrics import MetricsConfig
from harness.metrics.views import ShownRun, TensorBoardView, WandbView, has_wandb_key, wandb_mode


@pytest.fixture(autouse=True)
def no_wandb_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def shown(
    run_dir: Path, job: dict[str, Any], *, config: MetricsConfig | None = None, start_step: int = 0
) -> ShownRun:
    return ShownRun(config or MetricsConfig(), None, run_dir, "abc123", "my run", job, start_step)


def test_offline_without_a_key() -> None:
    assert wandb_mode(None) == "offline"
    assert wandb_mode("online") == "offline"
    assert wandb_mode("disabled") == "disabled"


def test_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert wandb_mode(None) == "online"
    assert wandb_mode("offline") == "offline"


def test_key_in_netrc_is_that_of_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert has_wandb_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_wandb_key()


def test_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_mode("online") is None


# A .wandb file is a LevelDB log (github.com/google/leveldb, doc/log_format.md) after a header of its own.
_WANDB_HEADER, _CHUNK_HEADER, _BLOCK = 7, 7, 32768
_WHOLE, _LAST = 1, 4


def wandb_records(folder: Path) -> Iterator[Any]:
    """The records of the one offline run below ``folder``."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    content, data, at = path.read_bytes(), b"", _WANDB_HEADER
    while at + _CHUNK_HEADER <= len(content):
        if _BLOCK - at % _BLOCK < _CHUNK_HEADER:  # the rest of a block too small for a header is padding
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


def test_wandb_writes_an_offline_run(tmp_path: Path) -> None:
    config = MetricsConfig(wandb=True, wandb_group="sweep", wandb_tags=["tp2"])
    view = WandbView(shown(tmp_path, {"training": {"steps": 2}}, config=config))
    view.log({"step": 7, "loss": 3.5, "mfu": None})
    view.log({"step": 5, "loss": 3.25})  # after a resume from an older checkpoint
    view.close({"exit_code": 0, "window": {"steps": 2}})

    deadline = time.monotonic() + 30
    records: list[Any] = []
    # W&B's own process may write the file after `finish` has returned.
    while not any(record.HasField("run") for record in records):
        assert time.monotonic() < deadline, "the file never holds the run"
        records = list(wandb_records(tmp_path))
    (run,) = [r.run for r in records if r.HasField("run")]
    assert (run.run_id, run.display_name, run.run_group) == ("abc123", "my run", "sweep")
    assert (list(run.tags), run.project) == (["tp2"], "harness")
    assert any(update.key == "training" for update in run.config.update)
    rows = [
        {(item.key or "/".join(item.nested_key)): item.value_json for item in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    assert [(row["step"], row["loss"], "mfu" in row) for row in rows] == [
        ("7", "3.5", False),
        ("5", "3.25", False),
    ]


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return accumulator


def test_tensorboard_writes_what_can_be_read_back(tmp_path: Path) -> None:
    view = TensorBoardView(shown(tmp_path, {"training": {"steps": 2}}))
    view.log({"step": 1, "loss": 3.5, "mfu": None, "note": "text"})
    view.log({"step": 2, "loss": 3.0, "tokens": 128})
    view.close({"exit": "done"})
    found = events(tmp_path)
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(1, 3.5), (2, 3.0)]
    assert set(found.Tags()["scalars"]) == {"loss", "tokens"}
    assert b"steps" in found.Tensors("job/text_summary")[0].tensor_proto.string_val[0]


def test_tensorboard_purges_what_a_resume_repeats(tmp_path: Path) -> None:
    first = TensorBoardView(shown(tmp_path, {}))
    for step in range(1, 6):
        first.log({"step": step, "loss": 1.0})
    first.close({})
    again = TensorBoardView(shown(tmp_path, {}, start_step=3))
    again.log({"step": 4, "loss": 2.0})
    again.close({})
    assert [(e.step, e.value) for e in events(tmp_path).Scalars("loss")] == [(1, 1), (2, 1), (3, 1), (4, 2)]
