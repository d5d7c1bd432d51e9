"""Every JSON file of a run folder, damaged key by key: a one-line error, no traceback, no data lost."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import xxhash
import yaml
from jobs import tiny

from harness.checkpoint.catalog import encode_manifest
from harness.checkpoint.resume import CONTINUES, can_resume, find_start, is_finished
from harness.config.job import Job
from harness.launch.listing import rows_of, table_of
from harness.launch.rows import completed
from harness.launch.state import FILE as JOB_RECORD
from harness.launch.state import SlurmJobRecord, read_states
from harness.launch.sweep.folder import Point
from harness.run.folder import RunFolder
from harness.train.finish import format_failure
from harness.train.rows import Progress
from harness.util.encoding import dumps
from harness.util.errors import UserError
from harness.util.tables import to_text
from harness.weights.detect import find_source

REMOVED = object()
# Replacements for a value.
WRONG = {
    "removed": REMOVED,
    "null": None,
    "text": "text",
    "negative": -1,
    "fraction": 0.5,
    "true": True,
    "array": [1],
    "object": {"a": 1},
}
TOO_DEEP = b'{"a":' * 100_000
NO_OBJECTS = (TOO_DEEP, b"[1]", b"null", b"\xff", b"", b"7")
JOB = tiny("training.steps=4", "training.seq_len=32", "training.global_batch_size=2")


def manifest_of(step):
    return {
        "format": 1,
        "step": step,
        "holds": "full",
        "job_id": JOB.id,
        "created": 1.5,
        "world_size": 1,
        "options": JOB.checkpoint.options_of_loading(),
        "state": {
            "train_state": Progress(step=step, tokens=64 * step, loss=2.5).saved(),
            "lr_scheduler": {"last_epoch": step},
            "data_loader": {"step": step, "samples": 2 * step},
        },
        "model": {},
        "tokenizer": {},
        "job": {"training": {"steps": 4}, "parallelism": {"tp": 1}},
        "files": {".metadata": {"size": 4, "xxh3_128": xxhash.xxh3_128_hexdigest(b"data")}},
    }


def write_checkpoint(run_dir, step, manifest):
    folder = run_dir / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".metadata").write_bytes(b"data")
    (folder / "manifest.json").write_bytes(manifest)
    return folder


def look(run_dir):
    """Read the run folder like the read-only commands; a damaged file gives at most one line."""
    folder = RunFolder(run_dir)
    error = folder.errors.first()
    if error is not None:
        format_failure(error, 1, folder)
    to_text(table_of(rows_of([Point(JOB.id, run_dir, [])], read_states([run_dir]))))
    completed({"world_size": 1, **folder.row, "state": "completed"})
    is_finished(JOB, run_dir)


class Damaged(NamedTuple):
    """A file, how it is read, and changes that must be refused."""

    plain: dict[str, Any]
    read: Callable[[Path], Any]
    depth: int = 1
    refused: tuple[str, ...] = ()


CONTENTS = yaml.safe_load("""
status: {state: failed, host: h, pid: 7, pid_started: 8, time: 1.5, exit_code: 1}
error:
    {time: 1.5, rank: 0, step: 1, host: h, kind: bug, type: E, message: m, where: null, exit_code: 1,
    traceback: t}
code: {commit: c, dirty: false, versions: {torch: '2'}}
record: {name: n, index: 0, job_id: '7', restarts: 0, cancelled: false}
""")
PARTS = ("model", "training", "cluster", "profiling", "name")  # one for each type of field
FILES = {
    "job.json": Damaged(
        {part: JOB.to_dict()[part] for part in PARTS},
        lambda path: Job.read(path / "job.json"),
        2,
        ("training.steps text",),
    ),
    JOB_RECORD: Damaged(CONTENTS["record"], SlurmJobRecord.read, 2, ("name removed",)),
    "status.json": Damaged(CONTENTS["status"], look),
    "errors/rank0.json": Damaged(CONTENTS["error"], look),
    "code.json": Damaged(CONTENTS["code"], look),
}


def paths_of(value, depth, prefix=()):
    for key, inner in value.items():
        yield (*prefix, key)
        if isinstance(inner, dict) and depth > 1:
            yield from paths_of(inner, depth - 1, (*prefix, key))


def changes(plain, depth):
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


def write(run_dir, name, content):
    (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
    (run_dir / name).write_bytes(dumps(content).encode())


@pytest.mark.parametrize("name", FILES)
def test_every_key_of_every_file(name, tmp_path):
    file, path = FILES[name], tmp_path / name
    for each, beside in FILES.items():
        if beside.read is file.read:
            write(tmp_path, each, beside.plain)
    file.read(tmp_path)
    refused = set()
    for what, changed in changes(file.plain, file.depth):
        write(tmp_path, name, changed)
        try:
            file.read(tmp_path)
        except UserError as error:
            assert file.refused and "\n" not in str(error) and path.name in str(error), what
            refused.add(what)
    assert refused >= set(file.refused)
    for content in (*NO_OBJECTS, *([b"{}"] if file.refused and name != "job.json" else [])):
        path.write_bytes(content)
        if file.refused:
            with pytest.raises(UserError, match="damaged"):
                file.read(tmp_path)
        else:
            file.read(tmp_path)
            assert not is_finished(JOB, tmp_path)


def as_a_folder(manifest):
    manifest.unlink()
    manifest.mkdir()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda manifest: manifest.write_bytes(b'{"format": 1}'),
            "damaged: it does not have the checksum",
        ),
        (lambda manifest: manifest.write_bytes(TOO_DEEP), "nested deeper than"),
        (as_a_folder, ""),
        (lambda manifest: manifest.write_bytes(encode_manifest({})), "damaged: it has no step"),
    ],
    ids=range(4),
)
def test_the_checkpoint_before_is_used(damage, says, tmp_path):
    write_checkpoint(tmp_path, 2, encode_manifest(manifest_of(2)))
    damage(write_checkpoint(tmp_path, 3, b"") / "manifest.json")
    start = find_start(JOB, tmp_path)
    assert [each.step for each in start.candidates] == [2]
    assert "step-3 cannot be used: " in start.warnings[0] and says in start.warnings[0]
    assert can_resume(JOB, tmp_path) and not is_finished(JOB, tmp_path)
    assert find_source(str(tmp_path)).path.endswith("step-2")


@pytest.mark.parametrize("content", [b"{}", b'{"folders": [7]}', b"{"])
def test_the_file_that_names_what_to_continue(tmp_path, content):
    """Ignoring the file could mean starting from step 0."""
    (tmp_path / CONTINUES).write_bytes(content)
    with pytest.raises(UserError, match=r"continues\.json: damaged"):
        find_start(JOB, tmp_path)
