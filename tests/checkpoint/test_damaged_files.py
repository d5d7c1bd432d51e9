"""Every JSON file of a run folder, damaged key by key: a one-line error, no traceback, no data lost."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from harness.checkpoint.catalog import CheckpointFolder, DamagedCheckpoint, encode_manifest
from harness.checkpoint.load import _ranks
from harness.checkpoint.resume import CONTINUES, can_resume, find_start, is_finished
from harness.checkpoint.storage import Writer
from harness.compose.composer import compose_job
from harness.config.fields import from_dict
from harness.config.job import Job
from harness.config.model import ModelConfig
from harness.launch.rows import completed
from harness.launch.state import FILE as JOB_RECORD
from harness.launch.state import SlurmJobRecord, read_states
from harness.launch.sweep.registry import Point
from harness.launch.sweep.study import table_of_states
from harness.run.folder import RunFolder
from harness.train.finish import format_failure
from harness.train.rows import Progress
from harness.util.errors import UserError
from harness.util.tables import to_text
from harness.weights.detect import find_source

REMOVED = object()
# Replacements for a value.
WRONG: dict[str, Any] = {
    "removed": REMOVED,
    "null": None,
    "text": "text",
    "negative": -1,
    "fraction": 0.5,
    "true": True,
    "array": [1],
    "object": {"a": 1},
}
# Keys that every usable checkpoint needs.
NEEDED = ("step", "files", "state", "options", "format", "state.train_state", "state.data_loader")
TOO_DEEP = b'{"a":' * 100_000


@pytest.fixture(scope="module")
def job() -> Job:
    typed = ["model=llama3_tiny", "data=synthetic", "tokenizer=bytes", "training.steps=4"]
    return compose_job([*typed, "training.seq_len=32", "training.global_batch_size=2", "cluster.device=cpu"])


def manifest_of(job: Job, step: int) -> dict[str, Any]:
    return {
        "format": 1,
        "step": step,
        "holds": "full",
        "job_id": job.id,
        "created": 1.5,
        "world_size": 1,
        "options": job.checkpoint.options_of_loading(),
        "state": {
            "train_state": Progress(step=step, tokens=64 * step, loss=2.5).saved(),
            "lr_scheduler": {"last_epoch": step},
            "data_loader": {"step": step, "samples": 2 * step},
        },
        "model": job.to_dict()["model"],
        "tokenizer": job.to_dict()["tokenizer"],
        "job": job.to_dict(),
        "files": {".metadata": {"size": 4, "xxh3_128": xxhash.xxh3_128_hexdigest(b"data")}},
    }


def write_checkpoint(run_dir: Path, step: int, manifest: bytes) -> Path:
    folder = run_dir / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".metadata").write_bytes(b"data")
    (folder / "manifest.json").write_bytes(manifest)
    return folder


def paths_of(value: dict[str, Any], depth: int, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, inner in value.items():
        yield (*prefix, key)
        if isinstance(inner, dict) and depth > 1:
            yield from paths_of(inner, depth - 1, (*prefix, key))


def changes(plain: dict[str, Any], depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield copies of an object with one value removed or replaced."""
    for path in paths_of(plain, depth):
        for what, wrong in WRONG.items():
            changed = copy.deepcopy(plain)
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            if wrong is REMOVED:
                del inner[path[-1]]
            else:
                inner[path[-1]] = wrong
            yield f"{'.'.join(path)} {what}", changed


def use(run_dir: Path, step: int) -> None:
    """Read what resuming, converting and naming read from a checkpoint."""
    checkpoint = CheckpointFolder(str(run_dir / "checkpoints")).find(step)
    state = checkpoint.state
    Progress().resume(state["train_state"])
    assert isinstance(state["lr_scheduler"]["last_epoch"], int)
    assert isinstance(state["data_loader"].get("samples", 0), int)
    _ranks(checkpoint)


def test_every_key_of_a_manifest(job: Job, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 2, encode_manifest(manifest_of(job, 2)))
    damaged: set[str] = set()
    manifest = manifest_of(job, 3)
    # Other fields of the job are only compared, so any value is valid.
    manifest["job"] = {"training": {"steps": 4}, "parallelism": {"tp": 1}}
    manifest["model"] = manifest["tokenizer"] = {}
    for what, changed in changes(manifest, depth=3):
        encode = without_format if what == "format removed" else encode_manifest
        write_checkpoint(tmp_path, 3, encode(changed))
        try:
            use(tmp_path, 3)
        except DamagedCheckpoint as error:
            assert "\n" not in str(error), what
            damaged.add(what)
        else:
            find_start(job, tmp_path)
    for key in NEEDED:
        assert {f"{key} removed", f"{key} null", f"{key} array"} <= damaged, key
    del manifest["state"]
    write_checkpoint(tmp_path, 3, encode_manifest(manifest))
    start = find_start(job, tmp_path)
    assert [each.step for each in start.candidates] == [2]
    assert "step-3 cannot be used: manifest.json is damaged: state is missing" in start.warnings[0]
    assert can_resume(job, tmp_path) and not is_finished(job, tmp_path)
    assert find_source(str(tmp_path)).path.endswith("step-2")


def without_format(manifest: dict[str, Any]) -> bytes:
    """The manifest with a correct checksum but no format, which ``encode_manifest`` would add."""
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())
    return json.dumps({**manifest, "checksum": checksum}).encode()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (TOO_DEEP, "nested deeper than"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "nested deeper than"),
        (b"[" * 200 + b"]" * 200, "an array, not an object"),
        (b"[1]", "an array, not an object"),
        (b"\xff\xfe", "manifest.json is damaged"),
        (b"", "manifest.json is damaged"),
        (b'{"step": 3}', "checksum"),
    ],
)
def test_manifests_that_are_no_object(job: Job, tmp_path: Path, content: bytes, says: str) -> None:
    write_checkpoint(tmp_path, 2, encode_manifest(manifest_of(job, 2)))
    write_checkpoint(tmp_path, 3, content)
    start = find_start(job, tmp_path)
    assert [each.step for each in start.candidates] == [2]
    assert says in start.warnings[0]


def test_a_manifest_that_is_a_folder_or_a_loop(job: Job, tmp_path: Path) -> None:
    for step, place in ((3, lambda path: path.mkdir()), (4, lambda path: path.symlink_to(path))):
        folder = write_checkpoint(tmp_path, step, b"")
        (folder / "manifest.json").unlink()
        place(folder / "manifest.json")
    write_checkpoint(tmp_path, 2, encode_manifest(manifest_of(job, 2)))
    assert [each.step for each in find_start(job, tmp_path).candidates] == [2]


def result_of(job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "numerics_id": job.numerics_id,
        "name": job.name,
        "world_size": 1,
        "exit_reason": "completed",
        "exit_code": 0,
        "step": 4,
        "start_step": 0,
        "tokens": 64,
        "loss": 2.5,
        "mfu": 0.1,
        "memory_gib": 1.0,
        "flops_per_token_full": 9,
        "peak_flops": 1e12,
        "window.tokens_per_second": 5.0,
        "window.tokens_per_second_median": 5.0,
        "window.step_seconds_median": 0.1,
        "window.step_seconds_spread": 0.1,
        "error.kind": "bug",
        "error.message": "text",
        "error.rank": 0,
    }


STATUS = {"state": "failed", "host": "h", "pid": 7, "pid_started": 8, "time": 1.5, "exit_code": 1}
ERROR = {
    "time": 1.5,
    "rank": 0,
    "step": 1,
    "host": "h",
    "kind": "bug",
    "type": "E",
    "message": "m",
    "where": None,
    "exit_code": 1,
    "traceback": "t",
}


def look(job: Job, folder: RunFolder) -> None:
    """Read the run folder like the read-only commands; a damaged file gives at most one line."""
    error = folder.first_error()
    if error is not None:
        format_failure(error, 1, folder)
    to_text(table_of_states([Point(job.id, folder.path, [])], read_states([folder.path])))
    completed({"world_size": 1, **folder.row, "state": "completed"})


@pytest.mark.parametrize("name", ["result.json", "status.json", "errors/rank0.json", "code.json"])
def test_every_key_of_what_an_attempt_leaves(job: Job, tmp_path: Path, name: str) -> None:
    folder = RunFolder(tmp_path)
    files = {
        "result.json": result_of(job),
        "status.json": STATUS,
        "errors/rank0.json": ERROR,
        "code.json": {"commit": "c", "dirty": False, "versions": {"torch": "2"}},
    }

    def write() -> None:
        (tmp_path / "errors").mkdir(exist_ok=True)
        for each, plain in files.items():
            (tmp_path / each).write_text(json.dumps(plain))

    write()
    is_finished(job, tmp_path)
    for _, plain in changes(files[name], depth=1):
        (tmp_path / name).write_text(json.dumps(plain))
        look(job, folder)
    for content in (TOO_DEEP, b"[1]", b"null", b"\xff", b""):
        (tmp_path / name).write_bytes(content)
        look(job, folder)
        assert not is_finished(job, tmp_path)


READERS: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "job.json": (lambda path: Job.read(path / "job.json"), {}),
    JOB_RECORD: (
        SlurmJobRecord.read,
        {"name": "n", "index": 0, "job_id": "7", "restarts": 0, "cancelled": False},
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_every_key_of_what_describes_a_run(job: Job, tmp_path: Path, name: str) -> None:
    read, plain = READERS[name]
    if not plain:  # a part for each type of field
        parts = ("model", "training", "cluster", "profiling", "name")
        plain = {part: value for part, value in job.to_dict().items() if part in parts}
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    contents = [TOO_DEEP, b"[1]", b"null", b"\xff", b"", b"{}" if name == JOB_RECORD else b"7"]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(UserError, match="damaged"):
            read(tmp_path)
    refused = set()
    for what, changed in changes(plain, depth=2):
        path.write_text(json.dumps(changed))
        try:
            read(tmp_path)
        except UserError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            refused.add(what)
    required = {"job.json": "training.steps text", JOB_RECORD: "name removed"}
    assert required[name] in refused


def test_another_versions_model_in_a_manifest() -> None:
    with pytest.raises(UserError, match=r"attention\.sinks=text: must be true or false"):
        from_dict(ModelConfig, {"attention": {"sinks": "text"}})


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"folders": 7}', b'{"folders": [7]}', b"{", TOO_DEEP])
def test_the_file_that_names_what_to_continue(job: Job, tmp_path: Path, content: bytes) -> None:
    """Ignoring the file could mean starting from step 0."""
    (tmp_path / CONTINUES).write_bytes(content)
    with pytest.raises(UserError, match=r"continues\.json: damaged"):
        find_start(job, tmp_path)


@pytest.mark.parametrize("kind", ["dangling link", "link to a folder", "file"])
def test_other_entries_named_like_a_step(tmp_path: Path, kind: str) -> None:
    """The next save replaces it; the target of a link stays."""
    target, place = tmp_path / "target", tmp_path / "checkpoints" / "step-4"
    place.parent.mkdir()
    if kind == "file":
        place.write_text("")
    else:
        place.symlink_to(target)
    if kind == "link to a folder":
        target.mkdir()
        (target / "own").write_text("")
    folder = CheckpointFolder(str(place.parent))
    assert folder.steps() == [4]
    with pytest.raises(DamagedCheckpoint, match="there is no manifest"):
        folder.find(4)
    Writer(str(place), {}).prepare_global_plan([])
    assert not place.is_symlink() and not place.is_file()
    assert kind != "link to a folder" or (target / "own").is_file()
