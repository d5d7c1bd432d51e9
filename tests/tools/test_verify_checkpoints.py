"""``harness verify``: which file of a checkpoint is damaged."""

import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from jobs import tiny

from harness.checkpoint import verify as module
from harness.checkpoint.catalog import CheckpointFolder
from harness.checkpoint.storage import Writer
from harness.checkpoint.verify import verify
from harness.compose.verb import guarded
from harness.run.folder import RunFolder
from harness.tools.verify import VERB
from harness.util.errors import EXIT_MACHINE, EXIT_OK, EXIT_USER

MANIFEST = {"step": 4, "holds": "model", "state": {}, "options": {}}


def write(folder, step):
    path = folder / f"step-{step}"
    state = {"a": torch.arange(1000.0), "b": torch.ones(1000)}
    dcp.save(state, storage_writer=Writer(str(path), {**MANIFEST, "step": step}), no_dist=True)
    return path


def flip(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def run(*arguments):
    return guarded(lambda: VERB.run_line([*map(str, arguments)]))


def test_a_flipped_bit_is_found_and_named(tmp_path, capsys):
    run_dir = tmp_path / "run"
    write(run_dir / "checkpoints", 2)
    path = write(run_dir / "checkpoints", 4)
    assert run(run_dir) == EXIT_OK
    output = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in output] == ["ok", "ok"]
    assert "2 files, 0.000 GB" in output[0]
    flip(path / "__0_0.distcp", -1)
    assert run(run_dir, "--json") == EXIT_MACHINE
    verdicts = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [each["state"] for each in verdicts] == ["ok", "damaged"] and verdicts[1]["path"] == str(
        path
    )
    says = f"{path}: damaged: __0_0.distcp does not have the checksum it was written with"
    for folder in (run_dir, run_dir / "checkpoints", path):
        assert run(folder) == EXIT_MACHINE
        assert capsys.readouterr().out.splitlines()[-1] == says
    assert run("--newest", run_dir) == EXIT_MACHINE
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_what_else_can_be_damaged(tmp_path, monkeypatch):
    path = write(tmp_path, 4)
    flip(path / ".metadata", 9)
    assert verify(str(path)).reason == ".metadata does not have the checksum it was written with"
    read = []
    monkeypatch.setattr(
        module, "_checksum", lambda fs, file: read.append(Path(file).name) or "other"
    )
    assert verify(str(path)).state == "damaged"
    assert sorted(read) == [".metadata", "__0_0.distcp"], (
        "a damaged file is read once for its checksum"
    )
    (path / "__0_0.distcp").unlink()
    assert verify(str(path)).reason == "__0_0.distcp is missing"
    (path / "manifest.json").write_text("{}")
    assert verify(str(path)).state == "damaged"
    (path / "manifest.json").unlink()
    assert verify(str(path)).state == "unfinished"
    monkeypatch.setitem(MANIFEST, "state", {"train_state": {"step": 4}})
    write(tmp_path / "other", 4).rename(tmp_path / "step-24")
    assert verify(str(tmp_path / "step-24")).reason == "manifest.json is of step 4"
    assert CheckpointFolder(str(tmp_path)).complete()[0] == []


def test_what_a_killed_writer_leaves_and_what_not(tmp_path, capsys):
    folder = tmp_path / "run" / "checkpoints"
    write(folder, 2)
    newest = folder / "step-4"
    newest.touch()
    assert run(tmp_path / "run") == EXIT_MACHINE
    assert capsys.readouterr().out.endswith(f"{newest}: damaged: is no folder\n")
    newest.unlink()
    newest.mkdir()
    assert (run(folder), run("--newest", folder)) == (EXIT_OK, EXIT_MACHINE)
    for state, code in (("interrupted", EXIT_OK), ("completed", EXIT_MACHINE)):
        RunFolder(tmp_path / "run").set_status(state)
        assert run(tmp_path / "run") == code
    assert (
        "no manifest.json, and status.json says that the run has completed"
        in capsys.readouterr().out
    )


def test_a_checkpoint_folder_outside_of_the_run_folder(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.json").write_text(
        tiny(f"checkpoint.folder={tmp_path}/elsewhere").to_json()
    )
    write(tmp_path / "elsewhere", 4)
    assert run(tmp_path / "run") == EXIT_OK
    assert "elsewhere/step-4: ok" in capsys.readouterr().out


def test_a_foreign_checkpoint_has_no_checksums(tmp_path, capsys):
    dcp.save({"a": torch.ones(2)}, checkpoint_id=str(tmp_path), no_dist=True)
    assert run(tmp_path) == EXIT_USER
    assert "there are no checksums to compare with" in capsys.readouterr().err
