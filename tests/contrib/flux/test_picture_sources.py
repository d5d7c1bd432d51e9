"""Pictures from files, tar files and datasets: the same pictures, splits, crops, and errors of one line."""

from __future__ import annotations

import io
import json
import resource
import tarfile
from pathlib import Path

import numpy as np
import pytest
from one_line import one_line
from PIL import Image

from harness.config.data import DataConfig
from harness.contrib.flux.pictures.shapes import DrawnShapes
from harness.contrib.flux.pictures.sources import (
    PictureSource,
    RawSamples,
    decode,
    open_pictures,
)
from harness.util.errors import DataError

NUMBER = 12


def picture(number: int) -> Image.Image:
    """Twice as wide as high: the left half has the number's color, the right half is black."""
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:, :16] = 20 * number
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def content(number: int) -> bytes:
    return png(picture(number))


@pytest.fixture(autouse=True)
def in_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_files() -> DataConfig:
    for number in range(NUMBER):
        Path(f"{number:02}.png").write_bytes(content(number))
        if number % 2:
            Path(f"{number:02}.txt").write_text(f"caption {number}\n")
        else:
            Path(f"{number:02}.json").write_text(json.dumps({"text": f"caption {number}"}))
    return DataConfig("pictures", paths=["*"])


def write_tars() -> DataConfig:
    for shard in range(2):
        with tarfile.open(f"{shard}.tar", "w") as file:
            for number in range(shard * 6, shard * 6 + 6):
                text, plain = (
                    f"caption {number}".encode(),
                    json.dumps({"text": f"caption {number}"}).encode(),
                )
                caption = {"txt": text} if number % 2 else {"json": plain}
                for suffix, data in {"json": b"{}", **caption, "PNG": content(number)}.items():
                    member = tarfile.TarInfo(f"folder.a/{number:02}.{suffix}")
                    member.size = len(data)
                    file.addfile(member, io.BytesIO(data))
    return DataConfig("pictures", paths=["*.tar"], cache_dir="cache")


def write_parquet() -> DataConfig:
    import datasets

    rows = {
        "photo": [{"bytes": content(number), "path": None} for number in range(NUMBER)],
        "alt": [f"caption {number}" for number in range(NUMBER)],
    }
    features = datasets.Features({"photo": datasets.Image(), "alt": datasets.Value("string")})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk("saved")
    options = {"image_field": "photo", "caption_field": "alt"}
    return DataConfig("hub_pictures", options, dataset="saved")


def opened(data: DataConfig, split: str = "train", **changed: object) -> PictureSource:
    return open_pictures(DataConfig(**{**vars(data), **changed}), split, seed=0)


@pytest.mark.parametrize("write", [write_files, write_tars, write_parquet])
def test_pictures_and_captions(write):
    data = write()
    data = DataConfig(**{**vars(data), "options": {**data.options, "size": 8}})
    source = opened(data)
    assert source.num == NUMBER
    for number in range(NUMBER):
        pixels, caption = source.read(number, number)
        assert caption == f"caption {number}" and pixels.shape == (8, 8, 3)
        # The center of the picture: half of it has the color.
        assert (pixels[:, 0] == 20 * number).all() and (pixels[:, -1] == 0).all()
    train, held = (
        opened(data, split, validation_fraction=0.4) for split in ("train", "validation")
    )
    found = [{each.read(i, i)[1] for i in range(each.num or 0)} for each in (train, held)]
    assert (
        found[0] | found[1] == {f"caption {i}" for i in range(NUMBER)} and not found[0] & found[1]
    )
    assert found[0] and found[1]


def test_order_and_crops_are_functions_of_seed_and_number():
    data = write_files()
    options = {"size": 8, "crop": "random"}
    samples = RawSamples(opened(data, options=options), seed=3, shuffle=True, skips=False)
    epochs = [[samples.sample(epoch * NUMBER + i) for i in range(NUMBER)] for epoch in range(2)]
    orders = [[caption for _, caption in epoch] for epoch in epochs]
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]
    shares = {
        float((pixels[0] > 0).any(1).mean())
        for pixels, caption in epochs[0]
        if caption != "caption 0"
    }
    assert len(shares) > 3, "crops are at different places"
    again = RawSamples(opened(data, options=options), seed=3, shuffle=True, skips=False)
    for number in (17, 2):
        assert np.array_equal(again.sample(number)[0], samples.sample(number)[0])


def test_resizing_keeps_the_shorter_side():
    high = Image.fromarray(np.arange(40 * 10 * 3, dtype=np.uint8).reshape(40, 10, 3))
    top, bottom = (decode(png(high), 5, place, "x") for place in (0.0, 1.0))
    resized = np.asarray(high.resize((5, 20), Image.Resampling.BICUBIC))
    assert np.array_equal(top, resized[:5]) and np.array_equal(bottom, resized[-5:])


def test_a_very_long_picture_is_cropped_before_it_is_resized():
    long = png(Image.fromarray(np.repeat(np.arange(200, dtype=np.uint8), 40)[:, None].repeat(3, 1)))
    limit, soft = resource.RLIMIT_AS, resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(limit, (used + (256 << 20), soft[1]))
    try:
        pictures = [decode(long, 256, place, "x") for place in (0.0, 0.5, 1.0)]
    finally:
        resource.setrlimit(limit, soft)
    assert [picture.shape for picture in pictures] == [(256, 256, 3)] * 3
    assert [round(float(picture.mean())) for picture in pictures] == [0, 100, 199]


def test_a_damaged_picture_is_an_error_or_skipped():
    data = write_files()
    Path("03.png").write_bytes(content(3)[:60])
    strict, skipping = (
        RawSamples(opened(data), seed=0, shuffle=False, skips=each) for each in (False, True)
    )
    with one_line(DataError, r"03.png: is no picture .*would work: data.options.on_error=skip$"):
        strict.sample(3)
    assert skipping.sample(3)[1] == "caption 4"
    for number in range(NUMBER):
        Path(f"{number:02}.png").write_bytes(b"")
    with one_line(DataError, "is no picture that can be decoded"):
        skipping.sample(0)


def rolled(content: bytes) -> bytes:
    table = np.load(io.BytesIO(content))
    table[:, 1:3] = np.roll(table[:, 1:3], 1, axis=0)  # each caption gets another picture
    file = io.BytesIO()
    np.save(file, table)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("members.npy", rolled, "do not have the checksum they were written with"),
        ("meta.json", lambda content: b"{}", "'files'"),
    ],
)
def test_a_damaged_table_of_tar_files_is_rebuilt(name, change, says, capsys):
    data = write_tars()

    def captions_of_pictures():
        read = (opened(data, options={"size": 8}).read(i, i) for i in range(NUMBER))
        return [(int(pixels[0, 0, 0]), caption) for pixels, caption in read]

    expected = captions_of_pictures()
    assert expected[:2] == [(0, "caption 0"), (20, "caption 1")]
    (file,) = Path("cache").glob(f"pictures/*/{name}")
    file.write_bytes(change(file.read_bytes()))
    with one_line(DataError, r"picture table .* cannot be read here: "):
        open_pictures(data, "train", seed=0, is_builder=False)
    assert captions_of_pictures() == expected
    warning = capsys.readouterr().err
    assert says in warning and "is damaged and is rebuilt" in warning and warning.count("\n") == 1
    assert captions_of_pictures() == expected
    assert capsys.readouterr().err == "" and len(list(Path("cache/pictures").iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "caption", "message"),
    [
        ("01.txt", None, "01.png: has no caption; would work: a .txt or .json file"),
        ("00.json", b"{}", "no field 'text' among none; set data.options.caption_field"),
        ("00.json", b"{", "00.png: its caption cannot be read"),
    ],
    ids=range(3),
)
def test_captions_that_cannot_be_read(name, caption, message):
    data = write_files()
    if caption is None:
        Path(name).unlink()
    else:
        Path(name).write_bytes(caption)
    with pytest.raises(DataError) as raised:
        for number in range(2):
            opened(data).read(number, number)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_sources_that_cannot_be_opened():
    Path("folder").mkdir()
    Path("no.tar").write_bytes(b"no tar file" * 100)
    for path, says in {
        "*.jpg": r"data.paths=\[\*.jpg\]: no pictures match",
        "folder": r"folder is a folder, write folder/\*\*/\*$",
        "no.tar": r"no\.tar: not a readable tar file",
    }.items():
        with one_line(DataError, says):
            opened(DataConfig("pictures", paths=[path], cache_dir="cache"))
    data = write_parquet()
    with one_line(DataError, r"no column 'image' among alt, photo; set data\.options"):
        opened(data, options={})


def test_drawn_shapes_hold_captions_out():
    sources = {split: DrawnShapes(split, 16, seed=5) for split in ("train", "validation")}
    drawn = {split: {source.read(i, i)[1] for i in range(400)} for split, source in sources.items()}
    assert not drawn["train"] & drawn["validation"]
    first, again = (DrawnShapes("train", 16, seed=5).read(7, 7) for _ in range(2))
    assert np.array_equal(first[0], again[0]) and first[1] == again[1]
    assert not np.array_equal(first[0], DrawnShapes("train", 16, seed=6).read(7, 7)[0])
