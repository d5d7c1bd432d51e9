"""Token files of other programs, written by their published formats."""

import struct
from pathlib import Path

import numpy as np
from loaders import BOS, EOS

from harness.config.data import DataConfig


def files_of_documents(count=3):
    """Documents of ``count`` files, uneven, some shorter and some longer than a sample, none empty."""
    random = np.random.RandomState(7)
    lengths = [[40, 1, 3, 90, 2, 17], [5, 5], [64, 30, 1, 1, 200]]
    return [
        [[BOS, *random.randint(0, 256, n), EOS] for n in lengths[file % 3]] for file in range(count)
    ]


# Writers of each format, by its published description. Each writes the documents of one file.


def write_megatron(
    stem, documents, code=8, dtype="<u2", modes=False, head=b"MMIDIDX\0\0", version=1
):
    """As Megatron-Core: int32 lengths, int64 pointers, int64 first sequences; two sequences in a document."""
    sequences = [half for each in documents for half in (each[:2], each[2:])]
    sizes = np.array([len(each) for each in sequences], "<i4")
    pointers = (np.cumsum(sizes, dtype="<i8") - sizes) * np.dtype(dtype).itemsize
    firsts = np.arange(0, len(sequences) + 1, 2, dtype="<i8")
    header = head + struct.pack("<QBQQ", version, code, len(sizes), len(firsts))
    arrays = [sizes, pointers, firsts, *([np.zeros(len(sizes), "i1")] if modes else [])]
    Path(f"{stem}.idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    np.concatenate(documents).astype(dtype).tofile(f"{stem}.bin")


def write_datatrove(stem, documents, dtype="<u2", metadata="org/name|2"):
    np.concatenate(documents).astype(dtype).tofile(f"{stem}.ds")
    np.cumsum([len(each) for each in documents]).astype("<u8").tofile(f"{stem}.ds.index")
    Path(f"{stem}.ds.metadata").write_text(f"{metadata}\n{sum(map(len, documents))}\n1 T")


def write_llmc(stem, documents, magic=20240520, version=1, dtype="<u2", count=None):
    ids = np.concatenate(documents).astype(dtype)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    Path(f"{stem}.bin").write_bytes(header.tobytes() + ids.tobytes())


def write_memmap(stem, documents, dtype="<u2"):
    np.concatenate(documents).astype(dtype).tofile(f"{stem}.bin")


def write_npy(stem, documents, dtype="<u2"):
    np.save(f"{stem}.npy", np.concatenate(documents).astype(dtype))


def with_int32(write, **settings):
    return lambda stem, documents: write(stem, documents, dtype="<i4", **settings)


FORMATS = {
    "megatron": (write_megatron, {}),
    "megatron int32 with modes": (with_int32(write_megatron, code=4, modes=True), {}),
    "datatrove": (write_datatrove, {}),
    "datatrove, 4 bytes": (lambda s, d: write_datatrove(s, d, "<u4", "org/name|4"), {}),
    "memmap": (write_memmap, {}),
    "memmap, 4 bytes": (with_int32(write_memmap), {"dtype": "int32"}),
    "npy": (write_npy, {}),
    "llmc": (write_llmc, {"boundaries": "eos"}),
    "llmc for llama 3": (lambda s, d: write_llmc(s, d, 20240801, 7, "<u4"), {}),
}


def config(**settings):
    return DataConfig(
        kind="tokens", shuffle=False, cache_dir="cache", **{"paths": ["*.*"], **settings}
    )
