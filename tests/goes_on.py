"""What a run that goes on after losses must share with one that lost nothing."""

import functools
import json
import tempfile
import zlib
from collections import defaultdict
from pathlib import Path

import pytest
from jobs import batches_of, train

from harness.metrics.jsonl import read_metrics
from harness.tools.parity.parity import TOLERANCES

PATCH = Path(__file__).parent / "witness.py"
STEPS = 6
ROWS = 12
WITNESSED = (
    *("model.n_layers=1", "model.vocab_size=258", "data.mask_fraction=0.3"),
    *(f"training.global_batch_size={ROWS}", "training.seq_len=16", f"training.steps={STEPS}"),
    "metrics.log_interval=1",
)
LOSING = ("checkpoint.interval=2", "cluster.on_node_loss=continue")


@functools.cache
def without_a_loss():
    """Rows and loss of each step of one process."""
    with tempfile.TemporaryDirectory() as folder:
        run = train(folder, *WITNESSED, "checkpoint.enable=false")
        assert run.code == 0
        losses = [row["loss"] for row in run.rows]
    loader = batches_of(run.job, range(ROWS))
    batches = [loader.next() for _ in range(STEPS)]
    rows = [sorted(zlib.crc32(row.numpy().tobytes()) for row in each.inputs_BT) for each in batches]
    return rows, losses


def check_witness(run_dir):
    """Check the rows and the loss of each step, and that the weights loaded are those that were saved."""
    rows = {}
    saved = {}
    for attempt in sorted({path.name[0] for path in (run_dir / "witness").iterdir()}):
        notes = []
        for path in sorted((run_dir / "witness").glob(f"{attempt}-*")):
            notes += map(json.loads, path.read_text().splitlines())
        done = defaultdict(list)
        for note in notes:
            if "step" in note:
                done[note["step"]] += note["rows"]
            if "saved" in note:
                saved[note["saved"]] = note["weights"]
        rows |= done  # the last attempt at a step is the one that counts
        for note in notes:
            if "loaded" in note:
                assert note["weights"] == saved[note["loaded"]], "weights other than were saved"
    expected, losses = without_a_loss()
    assert [sorted(rows[step]) for step in range(1, STEPS + 1)] == expected
    counted = read_metrics(run_dir / "metrics.jsonl")
    assert [row["step"] for row in counted] == list(range(1, STEPS + 1))
    tolerance, _ = TOLERANCES["float32"]
    assert [row["loss"] for row in counted] == pytest.approx(losses, rel=tolerance)
