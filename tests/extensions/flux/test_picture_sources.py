"""Pictures from files, tar files and datasets: the same pictures, splits, crops, and errors of one line."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from one_line import one_line
from PIL import Image

from harness.config.data import DataConfig
from harness.util.errors import DataError
from harness_flux.pictures.shapes import DrawnShapes
from harness_flux.pictures.sources import decode, open_pictures

NUMBER = 12


def picture(number):
    """Twice as wide as high: the left half has the number's color, the right half is black."""
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:, :16] = 20 * number
    return Image.fromarray(pixels)


def png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def content(number):
    return png(picture(number))


@pytest.fixture(autouse=True)
def in_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_files():
    for number in range(NUMBER):
        Path(f"{number:02}.png").write_bytes(content(number))
        if number % 2:
            Path(f"{number:02}.txt").write_text(f"caption {number}\n")
        else:
            Path(f"{number:02}.json").write_text(json.dumps({"text": f"caption {number}"}))
    return DataConfig("pictures", paths=["*"])


def write_tars():
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


def write_parquet():
    import datasets

    rows = {
        "photo": [{"bytes": content(number), "path": None} for number in range(NUMBER)],
        "alt": [f"caption {number}" for number in range(NUMBER)],
    }
    features = datasets.Features({"photo": datasets.Image(), "alt": datasets.Value("string")})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk("saved")
    options = {"image_field": "photo", "caption_field": "alt"}
    return DataConfig("hub_pictures", options, dataset="saved")


def opened(data, split="train", shuffle=False, **changed):
    changed = DataConfig(**{**vars(data), **changed})
    return open_pictures(changed, split, seed=3, shuffle=shuffle)


@pytest.mark.parametrize("write", [write_files, write_tars, write_parquet])
def test_pictures_and_captions(write):
    data = write()
    data = DataConfig(**{**vars(data), "options": {**data.options, "size": 8}})
    source = opened(data)
    assert source.num_per_epoch == NUMBER
    for number in range(NUMBER):
        pixels, caption = source.sample(number)
        assert caption == f"caption {number}" and pixels.shape == (8, 8, 3)
        # The center of the picture: half of it has the color.
        assert (pixels[:, 0] == 20 * number).all() and (pixels[:, -1] == 0).all()
    train, held = (
        opened(data, split, validation_fraction=0.4) for split in ("train", "validation")
    )
    found = [{each.sample(i)[1] for i in range(each.num_per_epoch)} for each in (train, held)]
    assert (
        found[0] | found[1] == {f"caption {i}" for i in range(NUMBER)} and not found[0] & found[1]
    )
    assert found[0] and found[1]


def test_order_and_crops_are_functions_of_seed_and_number():
    data = write_files()
    options = {"size": 8, "crop": "random"}
    samples = opened(data, shuffle=True, options=options)
    epochs = [[samples.sample(epoch * NUMBER + i) for i in range(NUMBER)] for epoch in range(2)]
    orders = [[caption for _, caption in epoch] for epoch in epochs]
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]
    shares = {
        float((pixels[0] > 0).any(1).mean())
        for pixels, caption in epochs[0]
        if caption != "caption 0"
    }
    assert len(shares) > 3, "crops are at different places"
    again = opened(data, shuffle=True, options=options)
    for number in (17, 2):
        assert np.array_equal(again.sample(number)[0], samples.sample(number)[0])


def test_resizing_keeps_the_shorter_side():
    high = Image.fromarray(np.arange(40 * 10 * 3, dtype=np.uint8).reshape(40, 10, 3))
    top, bottom = (decode(png(high), 5, place) for place in (0.0, 1.0))
    resized = np.asarray(high.resize((5, 20), Image.Resampling.BICUBIC))
    assert np.array_equal(top, resized[:5]) and np.array_equal(bottom, resized[-5:])


def test_a_damaged_picture_is_an_error_or_skipped():
    data = write_files()
    Path("03.png").write_bytes(content(3)[:60])
    strict, skipping = (opened(data, options={"on_error": each}) for each in ("strict", "skip"))
    with one_line(DataError, r"03.png: is no picture .*would work: data.options.on_error=skip$"):
        strict.sample(3)
    Path("05.png").write_bytes(png(Image.new("RGB", (1, 40))))
    with one_line(DataError, "05.png: .* one side is more than 32 times the other"):
        strict.sample(5)
    assert skipping.sample(3)[1] == "caption 4"
    for number in range(NUMBER):
        Path(f"{number:02}.png").write_bytes(b"")
    with one_line(DataError, "is no picture that can be decoded"):
        skipping.sample(0)


def test_a_table_of_tar_files_is_made_once_and_damage_is_refused():
    data = write_tars()
    opened(data)
    (file,) = Path("cache").glob("pictures/*/members.npy")
    made = file.stat().st_mtime_ns
    opened(data)
    assert file.stat().st_mtime_ns == made
    table = np.load(file)
    table[:, 1:3] = np.roll(table[:, 1:3], 1, axis=0)  # each caption gets another picture
    np.save(file, table)
    for is_builder in (False, True):
        with one_line(
            DataError, "picture table .* do not have the checksum .*would work: remove it"
        ):
            open_pictures(data, "train", seed=0, is_builder=is_builder)


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
            opened(data).sample(number)
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
    drawn = {split: {source.sample(i)[1] for i in range(400)} for split, source in sources.items()}
    assert not drawn["train"] & drawn["validation"]
    first, again = (DrawnShapes("train", 16, seed=5).sample(7) for _ in range(2))
    assert np.array_equal(first[0], again[0]) and first[1] == again[1]
    assert not np.array_equal(first[0], DrawnShapes("train", 16, seed=6).sample(7)[0])
