"""The formats of weights that this package adds. Imports no torch."""

from pathlib import Path

from harness.checkpoint.catalog import is_foreign
from harness.weights.format import WeightFormat

META = WeightFormat(
    files="consolidated.*.pth",
    recognizes=lambda path: any(Path(path).glob("consolidated.*.pth")),
    read="harness.contrib.formats.meta:LlamaSource",
)
TORCHTITAN = WeightFormat(
    files="a DCP checkpoint",
    recognizes=is_foreign,
    read="harness.contrib.formats.torchtitan:read_torchtitan",
    note="has no manifest, so its content cannot be verified; it is read as torchtitan's",
    write="harness.contrib.formats.torchtitan:write_torchtitan",
)
