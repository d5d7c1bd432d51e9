"""Untrusted checkpoints: code named by a pickle in them is not run."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
import xxhash
from resumable_runs import SMALL
from torch.distributed.checkpoint import metadata as theirs
from torch.distributed.checkpoint.filesystem import _StorageInfo

import harness
from harness.checkpoint.catalog import DamagedCheckpoint, encode_manifest
from harness.checkpoint.metadata import CHECKSUM, parse_metadata
from harness.compose.composer import compose_job
from harness.run.folder import RunFolder
from harness.tools.convert import ConvertJob, convert
from harness.util.errors import EXIT_OK, EXIT_USER, UserError


class Payload:
    """Creates a folder when unpickled without restriction."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def train(runs: Path, *overrides: str, adopt: bool = False) -> tuple[int, RunFolder]:
    """Train like the user's command, in this process; return the exit code."""
    options = ["model.n_layers=1", "training.steps=3", "checkpoint.interval=1", "metrics.console=plain"]
    done = jobs.train(runs, *SMALL, *options, *overrides, adopt=adopt)
    return done.code, done.folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with checkpoints of steps 1, 2 and 3."""
    code, folder = train(tmp_path_factory.mktemp("runs"))
    assert code == EXIT_OK
    return folder


def rewrite(checkpoint: Path, content: bytes) -> None:
    """Replace ``.metadata``, with its size and checksum in the manifest."""
    (checkpoint / ".metadata").write_bytes(content)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["checksum"]
    digest = xxhash.xxh3_128_hexdigest(content)
    manifest["files"][".metadata"] = {"size": len(content), CHECKSUM: digest}
    (checkpoint / "manifest.json").write_bytes(encode_manifest(manifest))


def with_payload(checkpoint: Path, ran: Path) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.planner_data = Payload(ran)
    rewrite(checkpoint, pickle.dumps(metadata))


def as_bytes(checkpoint: Path, ran: Path) -> None:
    """Declare a weight as a pickled object in metadata that names no unusual class."""
    place = add_file(checkpoint, Payload(ran))
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.state_dict_metadata["norm.weight"] = theirs.BytesStorageMetadata()
    metadata.storage_data[theirs.MetadataIndex("norm.weight")] = place
    rewrite(checkpoint, pickle.dumps(metadata))


def in_an_entry(checkpoint: Path, ran: Path) -> None:
    """Replace a tensor by the payload."""
    place = add_file(checkpoint, {"weight": Payload(ran)})
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.storage_data[theirs.MetadataIndex("norm.weight", [0])] = place
    rewrite(checkpoint, pickle.dumps(metadata))


def of_another_shape(checkpoint: Path, ran: Path) -> None:
    """Replace a weight by a tensor with fewer dimensions than in the metadata."""
    place = add_file(checkpoint, torch.tensor(1.0))
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.storage_data[theirs.MetadataIndex("norm.weight", [0])] = place
    rewrite(checkpoint, pickle.dumps(metadata))


def add_file(checkpoint: Path, content: Any) -> _StorageInfo:
    torch.save(content, checkpoint / "other.distcp")
    return _StorageInfo("other.distcp", 0, (checkpoint / "other.distcp").stat().st_size)


Forge = Callable[[Path, Path], None]
NAMES_IT = "is not trusted: it names 'posix.mkdir', which no checkpoint needs; no code of it was run"


def refusal_of_converting(trained: RunFolder, tmp_path: Path, forge: Forge) -> str:
    """The error of ``harness convert`` for a forged checkpoint without a manifest."""
    source = Path(shutil.copytree(trained.path / "checkpoints" / "step-3", tmp_path / "given"))
    forge(source, tmp_path / "ran")
    (source / "manifest.json").unlink()
    typed = [SMALL[0], f"convert.source={source}", f"convert.target={tmp_path / 'out'}"]
    with pytest.raises(UserError) as caught:
        convert(compose_job(typed, config_name="convert", schema=ConvertJob), typed)
    return str(caught.value)


def refusal_of_starting(trained: RunFolder, tmp_path: Path, forge: Forge) -> str:
    source = Path(shutil.copytree(trained.path / "checkpoints" / "step-3", tmp_path / "given"))
    forge(source, tmp_path / "ran")
    code, folder = train(tmp_path, f"checkpoint.initial_load_path={source}")
    assert code == EXIT_USER
    error = folder.first_error()
    assert error is not None
    return error["message"]


def in_a_shared_folder(trained: RunFolder, tmp_path: Path, forge: Forge) -> str:
    shared = Path(shutil.copytree(trained.path / "checkpoints", tmp_path / "shared"))
    forge(shared / "step-3", tmp_path / "ran")
    return f"checkpoint.folder={shared}"


def in_the_own_folder(trained: RunFolder, tmp_path: Path, forge: Forge) -> str:
    own = shutil.copytree(trained.path, tmp_path / trained.path.relative_to(trained.path.parents[1]))
    forge(Path(own) / "checkpoints" / "step-3", tmp_path / "ran")
    return "training.local_batch_size=null"


def in_a_neighbour(trained: RunFolder, tmp_path: Path, forge: Forge) -> str:
    """The plain command resumes from a run with the same numerics on another layout."""
    in_the_own_folder(trained, tmp_path, forge)
    RunFolder(tmp_path / trained.path.relative_to(trained.path.parents[1])).set_status("interrupted")
    return "training.local_batch_size=2"


@pytest.mark.parametrize("refusal", [refusal_of_converting, refusal_of_starting])
def test_a_forged_checkpoint_is_refused(
    trained: RunFolder, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    message = refusal(trained, tmp_path, with_payload)
    assert f".metadata {NAMES_IT}" in message
    assert "\n" not in message
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("place", "forge", "reason"),
    [
        (in_a_shared_folder, with_payload, f".metadata {NAMES_IT}"),
        (in_the_own_folder, with_payload, f".metadata {NAMES_IT}"),
        (in_a_neighbour, with_payload, f".metadata {NAMES_IT}"),
        (in_a_shared_folder, as_bytes, "norm.weight is not a tensor in this checkpoint"),
        (in_a_shared_folder, in_an_entry, f"the entry {NAMES_IT}"),
        (in_a_shared_folder, of_another_shape, "the tensor has shape []"),
    ],
)
def test_a_run_goes_on_from_the_one_before(
    trained: RunFolder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    place: Callable[..., str],
    forge: Forge,
    reason: str,
) -> None:
    code, folder = train(tmp_path, place(trained, tmp_path, forge), adopt=True)
    assert code == EXIT_OK
    assert folder.row["resumed_from"].endswith("/step-2")
    assert not (tmp_path / "ran").exists()
    [line] = [line for line in capsys.readouterr().out.splitlines() if "cannot be used" in line]
    assert reason in line


# -- the file itself ----

INDEX = theirs.MetadataIndex("w", [0], 0)
WHOLE = theirs.ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))


def metadata(**fields: Any) -> theirs.Metadata:
    entry = theirs.TensorStorageMetadata(theirs.TensorProperties(torch.bfloat16), torch.Size([4]), [WHOLE])
    place = _StorageInfo("__0_0.distcp", 3, 7)
    setattr(place, CHECKSUM, "abc")
    return theirs.Metadata(
        **{
            "state_dict_metadata": {"w": entry, "step": theirs.BytesStorageMetadata()},
            "planner_data": {"w": ("model", "w")},
            "storage_data": {INDEX: place},
            "storage_meta": theirs.StorageMeta(checkpoint_id=Path("/x"), save_id="a", modules=["m"]),
            **fields,
        }
    )


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_metadata_is_read_as_torch_reads_it(protocol: int) -> None:
    read = parse_metadata(pickle.dumps(metadata(), protocol))
    assert read.state_dict_metadata == metadata().state_dict_metadata
    assert read.storage_data == metadata().storage_data
    assert getattr(read.storage_data[INDEX], CHECKSUM) == "abc"


def test_only_classes_of_metadata_are_made() -> None:
    """A pickle cannot set the state of a class either, only of objects."""
    sets_a_class = (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x01\x00\x00\x00aK\x01s\x86b."
    )
    with pytest.raises(DamagedCheckpoint):
        parse_metadata(sets_a_class)
    assert not hasattr(theirs.Metadata, "a")
    for name in ("builtins\neval", "torch\nload", "torch\nTensor", "os.path\njoin"):
        with pytest.raises(DamagedCheckpoint, match=f"names '{name.replace(chr(10), '[.]')}', which no"):
            parse_metadata(b"\x80\x02c" + name.encode() + b"\n.")


@pytest.mark.parametrize(
    ("damaged", "says"),
    [
        ([], "an object is list"),
        (metadata(storage_data=[]), "storage_data is list"),
        (metadata(storage_data={"w": 1}), "an object is str"),
        (
            metadata(storage_data={INDEX: _StorageInfo("../../other", 0, 1)}),
            "'../../other' is not a file in the",
        ),
        (metadata(storage_data={INDEX: _StorageInfo("a\0", 0, 1)}), "'a\\x00' is not a file in the"),
        (metadata(storage_data={INDEX: _StorageInfo("a", -1, 1)}), "a position is negative"),
        (metadata(state_dict_metadata={"w": theirs.TensorProperties(torch.int8)}), "an object is Properties"),
        (
            metadata(
                state_dict_metadata={
                    "w": theirs.TensorStorageMetadata(
                        theirs.TensorProperties(torch.int8), torch.Size([8]), [WHOLE]
                    )
                }
            ),
            "the chunks of w do not add up to the tensor",
        ),
    ],
)
def test_what_is_no_metadata_is_damaged(damaged: Any, says: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=f"^.metadata is damaged: {re.escape(says)}"):
        parse_metadata(pickle.dumps(damaged))


def test_cut_and_flipped_metadata_is_damaged() -> None:
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
    "data/read_ahead.py": {"loads"},
}


def test_nothing_else_unpickles() -> None:
    package = Path(harness.__file__).parent
    for path in package.rglob("*.py"):
        allowed, text = MAY_UNPICKLE.get(str(path.relative_to(package)), set()), path.read_text()
        if not any(name in text for name in ("pickle", "torch.load", "FileSystemReader")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                restricted = {each.arg: ast.unparse(each.value) for each in node.keywords}
                assert restricted.get("weights_only") == "True", f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle":
                assert node.attr in ("UnpicklingError", "Pickler", "dumps", *allowed), f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("FileSystemReader"):
                raise AssertionError(f"{path}:{node.lineno}: torch's reader unpickles whatever it finds")
