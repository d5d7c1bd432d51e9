"""Damaged and forged checkpoints cost the steps since the one before, and no code that they name is run."""

import ast
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from conversions import refused
from local_runs import failed, flip, start
from one_line import one_line
from torch.distributed.checkpoint import metadata as theirs
from torch.distributed.checkpoint.filesystem import _StorageInfo

import harness
from harness.checkpoint.catalog import DamagedCheckpoint, encode_manifest
from harness.checkpoint.metadata import CHECKSUM, parse_metadata
from harness.checkpoint.storage import Writer

OPTIONS = ("model.n_layers=1", "checkpoint.interval=2", "metrics.console=plain")


class Payload:
    """Creates a folder when unpickled without restriction."""

    def __init__(self, folder):
        self.folder = str(folder / "ran")

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def forge(step, change):
    """Change ``.metadata``, with its size and checksum in the manifest."""
    metadata = pickle.loads((step / ".metadata").read_bytes())
    change(metadata)
    content = pickle.dumps(metadata)
    (step / ".metadata").write_bytes(content)
    manifest = json.loads((step / "manifest.json").read_text())
    del manifest["checksum"]
    digest = xxhash.xxh3_128_hexdigest(content)
    manifest["files"][".metadata"] = {"size": len(content), CHECKSUM: digest}
    (step / "manifest.json").write_bytes(encode_manifest(manifest))


def with_payload(step):
    forge(step, lambda metadata: setattr(metadata, "planner_data", Payload(step.parent)))


def with_entry(step, content, *index, as_bytes=False):
    """Put another object in the place of a weight, or declare the weight as a pickled object."""
    torch.save(content, step / "other.distcp")
    place = _StorageInfo("other.distcp", 0, (step / "other.distcp").stat().st_size)

    def change(metadata):
        metadata.storage_data[theirs.MetadataIndex("norm.weight", *index)] = place
        if as_bytes:
            metadata.state_dict_metadata["norm.weight"] = theirs.BytesStorageMetadata()

    forge(step, change)


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def flip_the_step(step):
    flip(step / "manifest.json", (step / "manifest.json").read_bytes().index(b'"step": 8') + 8)


CODE = "is not trusted: it names 'posix.mkdir', which no checkpoint needs; no code of it was run"
CHECKSUM_OF = r"__0_0\.distcp: bytes \d+ to \d+ do not have the.* checksum .*\(found by rank 0\)"
UNFINISHED = r"it was not finished: there is no manifest\.json"
DAMAGES = {
    "data cut": (
        lambda step: cut(step / "__0_0.distcp"),
        r"__0_0.distcp has \d+ bytes instead of \d+",
    ),
    "bit of the data": (lambda step: flip(step / "__0_0.distcp"), CHECKSUM_OF),
    "bit of .metadata": (
        lambda step: flip(step / ".metadata"),
        r"\.metadata does not have the checksum",
    ),
    ".metadata gone": (lambda step: (step / ".metadata").unlink(), r"\.metadata is missing"),
    "bit of the manifest": (flip_the_step, r"manifest\.json is damaged: .*checksum"),
    "manifest gone": (lambda step: (step / "manifest.json").unlink(), UNFINISHED),
    "payload": (with_payload, rf"\.metadata {CODE}"),
    "payload in an entry": (
        lambda step: with_entry(step, {"weight": Payload(step.parent)}, [0]),
        f"the entry {CODE}",
    ),
    "weight that is an object": (
        lambda step: with_entry(step, Payload(step.parent), as_bytes=True),
        "norm.weight is not a tensor in this checkpoint",
    ),
    "weight of another shape": (
        lambda step: with_entry(step, torch.tensor(1.0), [0]),
        r"the tensor has shape \[\]",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_costs_the_steps_since_the_checkpoint_before(name, tmp_path, finished, capsys):
    run = finished(tmp_path, *OPTIONS)
    whole = run.losses
    damage, says = DAMAGES[name]
    damage(run.step(8))
    run.forget_the_end()
    capsys.readouterr()
    run = start(tmp_path, *OPTIONS)
    assert run.row["resumed_from"] == str(run.step(6)) and run.losses == whole
    [line] = [line for line in capsys.readouterr().out.splitlines() if "cannot be used" in line]
    assert re.search(rf"WARNING .*step-8 cannot be used: .*{says}.*; using .*step-6", line)
    assert run.checkpoints.complete()[0][0].step == 8
    assert not list(tmp_path.rglob("ran"))


def test_damage_to_several_and_files_of_others(tmp_path, finished):
    run = finished(tmp_path, *OPTIONS)
    for name in ("step-best", "superseded"):
        (run.step(8).parent / name).mkdir()
    shutil.copytree(run.step(6), run.step(8).parent / "backup-of-step-12")
    (run.step(8) / "README").write_text("the good one")
    (run.path / "result.json").unlink()
    assert start(tmp_path, *OPTIONS).start_step == 8
    cut(run.step(8) / "__0_0.distcp")
    flip(run.step(6) / "__0_0.distcp")
    (run.path / "result.json").unlink()
    assert start(tmp_path, *OPTIONS).start_step == 4
    for step in (2, 4, 6, 8):
        flip(run.step(step) / "__0_0.distcp")
    (run.path / "result.json").unlink()
    said = failed(tmp_path, *OPTIONS)
    assert re.search(
        r"no checkpoint can be used \(.*step-8.* .*step-2.* .*: checkpoint\.resume=false", said
    )


def test_forged_checkpoints_of_others(tmp_path, finished):
    """In a shared folder, of a run of the same numerics, to convert, and to start from."""
    run = finished(tmp_path, *OPTIONS)
    step = run.step(8)
    with_payload(step)
    shutil.copytree(step.parent, tmp_path / "shared")
    run.forget_the_end()
    run.folder.set_status("interrupted")
    neighbour = start(tmp_path, *OPTIONS, "training.local_batch_size=2", adopt=True)
    sharing = start(tmp_path / "sharing", *OPTIONS, f"checkpoint.folder={tmp_path / 'shared'}")
    assert neighbour.row["resumed_from"] == str(run.step(6))
    assert sharing.row["resumed_from"] == f"{tmp_path / 'shared'}/step-6"
    said = failed(tmp_path / "other", *OPTIONS, f"checkpoint.initial_load_path={step}")
    assert f".metadata {CODE}" in said
    (step / "manifest.json").unlink()
    (tmp_path / "out").mkdir()
    assert f".metadata {CODE}" in refused(step, tmp_path / "out" / "new", "model=llama3_tiny")
    assert not list(tmp_path.rglob("ran"))


def test_a_link_in_the_place_of_a_step(tmp_path):
    """The next save replaces it, and what it points at stays."""
    target = tmp_path / "target"
    place = tmp_path / "checkpoints" / "step-4"
    for folder in (target, place.parent):
        folder.mkdir()
    (target / "own").touch()
    place.symlink_to(target)
    Writer(str(place), {}).prepare_global_plan([])
    assert not place.is_symlink() and (target / "own").is_file()


# -- .metadata ----

INDEX = theirs.MetadataIndex("w", [0], 0)
WHOLE = theirs.ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
INT8 = theirs.TensorProperties(torch.int8)


def metadata(**fields):
    entry = theirs.TensorStorageMetadata(
        theirs.TensorProperties(torch.bfloat16), torch.Size([4]), [WHOLE]
    )
    place = _StorageInfo("__0_0.distcp", 3, 7)
    setattr(place, CHECKSUM, "abc")
    values = {
        "state_dict_metadata": {"w": entry, "step": theirs.BytesStorageMetadata()},
        "planner_data": {"w": ("model", "w")},
        "storage_data": {INDEX: place},
        "storage_meta": theirs.StorageMeta(checkpoint_id=Path("/x"), save_id="a", modules=["m"]),
    }
    return theirs.Metadata(**{**values, **fields})


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_metadata_is_read_as_torch_reads_it(protocol):
    read = parse_metadata(pickle.dumps(metadata(), protocol))
    assert read.state_dict_metadata == metadata().state_dict_metadata
    assert read.storage_data == metadata().storage_data
    assert getattr(read.storage_data[INDEX], CHECKSUM) == "abc"


def test_only_classes_of_metadata_are_made():
    """A pickle cannot set the state of a class either, only of objects."""
    sets_a_class = (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
        b"N}X\x01\x00\x00\x00aK\x01s\x86b."
    )
    with pytest.raises(DamagedCheckpoint):
        parse_metadata(sets_a_class)
    assert not hasattr(theirs.Metadata, "a")
    for name in ("builtins\neval", "torch\nload", "torch\nTensor", "os.path\njoin"):
        with one_line(DamagedCheckpoint, f"names '{name.replace(chr(10), '[.]')}', which no"):
            parse_metadata(b"\x80\x02c" + name.encode() + b"\n.")


def stored_at(*place):
    return metadata(storage_data={INDEX: _StorageInfo(*place)})


@pytest.mark.parametrize(
    ("damaged", "says"),
    [
        ([], "list is in the place of Metadata"),
        (metadata(storage_data={"w": 1}), "str is in the place of MetadataIndex"),
        (stored_at("../../other", 0, 1), "'../../other' is not a file in the"),
        (stored_at("a", -1, 1), "a size or position is negative: [-1, 1]"),
        (
            metadata(
                state_dict_metadata={
                    "w": theirs.TensorStorageMetadata(INT8, torch.Size([8]), [WHOLE])
                }
            ),
            "the chunks of w do not add up to the tensor",
        ),
    ],
)
def test_what_is_no_metadata_is_damaged(damaged, says):
    with one_line(DamagedCheckpoint, f"^.metadata cannot be read: {re.escape(says)}"):
        parse_metadata(pickle.dumps(damaged))


def test_cut_and_flipped_metadata_is_damaged():
    """Any lost or changed bytes give metadata, or a one-line error."""
    content = pickle.dumps(metadata())
    for at in range(len(content)):
        with pytest.raises(DamagedCheckpoint):
            parse_metadata(content[:at])
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        try:
            parse_metadata(bytes(flipped))
        except DamagedCheckpoint as error:
            assert "\n" not in str(error)


# Modules that may unpickle: with the restricted unpickler, or data of this process or its parent.
MAY_UNPICKLE = {
    "checkpoint/metadata.py": {"Unpickler"},
    "train/observers/flight_recorder.py": {"loads"},
}


def test_nothing_else_unpickles():
    package = Path(harness.__file__).parent
    for path in package.rglob("*.py"):
        allowed = MAY_UNPICKLE.get(str(path.relative_to(package)), set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                options = {each.arg: ast.unparse(each.value) for each in node.keywords}
                assert called != "torch.load" or options.get("weights_only") == "True", path
                # torch's reader unpickles whatever it finds.
                assert not called.endswith("FileSystemReader"), path
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle":
                assert node.attr in ("UnpicklingError", "Pickler", "dumps", *allowed), path
