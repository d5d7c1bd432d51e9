"""``harness encode`` writes what training would encode, whatever the processes, stops and shards."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from one_line import one_line
from tiny_flux import overrides, save_encoders

from harness.compose.composer import compose_job
from harness.config.training import Sizes
from harness.data.loader import Cursor
from harness.data.samples import EpochOrder
from harness.util.errors import ConfigError, DataError
from harness_flux.encode.verb import EncodeJob, encode
from harness_flux.encode.writer import LatentWriter
from harness_flux.pictures.config import pictures_of
from harness_flux.pictures.encoders import build_text_encoder
from harness_flux.pictures.loader import (
    EncodingLoader,
    LatentSamples,
    PictureLoader,
    check_files,
)
from harness_flux.pictures.sources import open_pictures

CPU = torch.device("cpu")
SHAPES = (
    "data=drawn_shapes",
    "data.options.size=16",
    "encode.samples=20",
    "encode.validation_samples=4",
)
UNITS = ("encode.unit=6", "encode.batch_size=4", "cluster.device=cpu")


@pytest.fixture(autouse=True)
def in_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def job_of(*typed):
    return compose_job([*UNITS, *typed], config_name="encode", schema=EncodeJob)


def run(*typed):
    return encode(job_of(*typed), [*typed])


def drops(number):
    return number % 5 < 2


class Shuffled:
    """As many drawn pictures as were encoded, in the order of the encoded ones."""

    num_per_epoch = 20

    def __init__(self, data):
        self._drawn = open_pictures(data, "train", seed=42)
        self._order = EpochOrder(20, 3, shuffle=True)

    def sample(self, number):
        return self._drawn.sample(self._order.at(number))


@pytest.mark.parametrize("pretrained", [False, True])
def test_latents_are_those_of_training(pretrained, tmp_path):
    more = overrides(save_encoders(tmp_path / "flux")) if pretrained else ()
    result = run(*SHAPES, *more, "encode.target=latents")
    counts = {"target": "latents", "train": 20, "validation": 4, "files": 5}
    assert result.data == counts | {"seconds": result.data["seconds"]}
    data = job_of(*SHAPES, *more).data
    latents = LatentSamples(Path("latents"), "train", seed=3, shuffle=True)
    encoded = PictureLoader(latents, Cursor(range(2, 6), Sizes(8, 1)), drops)
    cursor = Cursor(range(2, 6), Sizes(8, 1))
    online = EncodingLoader(Shuffled(data), cursor, drops, pictures_of(data), CPU)
    dropped = 0
    for _ in range(5):  # two epochs
        found, expected = encoded.next(), online.next()
        assert found.numbers_B.tolist() == expected.numbers_B.tolist()
        assert (found.std_BCHW is None) is (not pretrained)
        for name in ("mean_BCHW", "std_BCHW", "text_BLD", "pooled_BP"):
            pair = getattr(found, name), getattr(expected, name)
            if pair[0] is not None:
                torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-5)  # batches of other sizes
        captions = [encoded.caption(number) for number in found.numbers_B.tolist()]
        assert captions == [online.caption(number) for number in found.numbers_B.tolist()]
        with_captions = build_text_encoder(pictures_of(data), CPU).encode(captions)
        differs = (found.text_BLD - with_captions.text_BLD).abs() > 1e-4
        dropped += int(differs.flatten(1).any(1).sum())
    assert 2 < dropped < 16, "20 samples, two fifths without a caption"


def test_stopped_encoding_continues(monkeypatch):
    typed = (*SHAPES, "encode.target=stopped", "encode.shards=2")
    write, written = LatentWriter.write_unit, list[str]()

    def stop_at_third(self, unit, advance):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(unit.name)
        write(self, unit, advance)

    monkeypatch.setattr(LatentWriter, "write_unit", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        run(*typed)
    assert not Path("stopped/manifest.json").exists() and written == ["train-00000", "train-00001"]
    with one_line(DataError, r"would work: harness encode encode.target=stopped$"):
        LatentSamples(Path("stopped"), "train", seed=0, shuffle=False)
    with one_line(
        ConfigError,
        r"has an unfinished folder of latents with another value of data\.options",
    ):
        run(*typed, "data.options.size=24")
    monkeypatch.setattr(
        LatentWriter, "write_unit", lambda *each: (written.append(each[1].name), write(*each))
    )
    run(*typed)
    assert written == [
        "train-00000",
        "train-00001",
        "train-00002",
        "train-00003",
        "validation-00000",
    ]
    run(*SHAPES, "encode.target=straight")
    names = {path.name for path in Path("stopped").iterdir()}
    assert names == {path.name for path in Path("straight").iterdir()}
    for name in names - {"plan.json", "manifest.json"}:
        assert Path("stopped", name).read_bytes() == Path("straight", name).read_bytes(), name
    first, second = (
        json.loads(Path(each, "manifest.json").read_bytes()) for each in ("stopped", "straight")
    )
    assert first["files"] == second["files"]
    assert "is complete" in run(*typed).text and len(written) == 5 + 5
    with one_line(ConfigError, r"^encode.target=stopped: has latents of data.kind=drawn_shapes"):
        run(*typed, "training.seed=7")


def test_processes_write_the_same():
    few = (*SHAPES, "encode.samples=8", "encode.validation_samples=2")
    for name, workers in (("one", 1), ("two", 2)):
        run(*few, f"encode.target={name}", f"encode.workers={workers}")
    for path in Path("one").iterdir():
        assert path.read_bytes() == Path("two", path.name).read_bytes(), path.name


def test_order_does_not_depend_on_ranks_and_resumes():
    run(*SHAPES, "encode.target=latents")

    def loader(rows):
        samples = LatentSamples(Path("latents"), "train", seed=1, shuffle=True)
        return PictureLoader(samples, Cursor(rows, Sizes(6, 1)), drops)

    whole, parts = loader(range(6)), [loader(range(2)), loader(range(2, 6))]
    for step in range(4):
        if step == 2:
            states = [part.state_dict() for part in parts]
            assert states[0] == states[1] == whole.state_dict()
            parts = [loader(range(4)), loader(range(4, 6))]
            for part in parts:
                part.load_state_dict(states[0])
        batch, pieces = whole.next(), [part.next() for part in parts]
        for name in ("mean_BCHW", "text_BLD", "numbers_B"):
            assert torch.equal(
                getattr(batch, name), torch.cat([getattr(piece, name) for piece in pieces])
            )


def test_the_encoding_loader_resumes_and_does_not_read_ahead_of_its_state():
    data = job_of(*SHAPES).data

    def loader():
        pictures = open_pictures(data, "train", seed=0)
        cursor = Cursor(range(3), Sizes(3, 1))
        return EncodingLoader(pictures, cursor, drops, pictures_of(data), CPU)

    straight = loader()
    batches = [straight.next() for _ in range(4)]
    again = loader()
    again.next()
    state = again.state_dict()
    assert state == {"step": 1, "samples": 3}
    resumed = loader()
    resumed.load_state_dict(state)
    for found, expected in zip([resumed.next(), resumed.next()], batches[1:], strict=False):
        assert found.mean_BCHW.equal(expected.mean_BCHW) and found.text_BLD.equal(expected.text_BLD)
    straight.reset()
    assert straight.next().numbers_B.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(batches[0].numbers_B, [0, 1, 2])


def test_damage_is_found():
    run(*SHAPES, "encode.target=latents")
    folder, path = Path("latents"), Path("latents/train-00001.safetensors")
    check_files(folder)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with one_line(DataError, r"train-00001.safetensors: does not have the checksum"):
        check_files(folder)
    path.write_bytes(content[:-1])
    with one_line(DataError, r"train-00001.safetensors: does not have \d+ bytes"):
        check_files(folder)
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace("train-00000", "../train-00000"))
    with one_line(DataError, r"manifest\.json is damaged: .*'\.\./train-00000' is no name"):
        LatentSamples(folder, "train", seed=0, shuffle=False)
