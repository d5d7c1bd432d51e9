"""A collective that one rank does not reach: the run folder names it, and both ranks' positions."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

from launching import LONG, TWO_RANKS, Launch
from torch.distributed.flight_recorder.components.loader import read_dump

from harness.util.errors import EXIT_MACHINE, EXIT_RESUMABLE

ABSENT = """
import os
if os.environ.get("RANK") == "1":
    import time
    import harness.train.engine as engine
    original, calls = engine.Engine.gradients, []
    def gradients(self, *args, **kwargs):
        calls.append(0)
        if len(calls) == 3:
            somewhere_else()
        return original(self, *args, **kwargs)
    def somewhere_else():
        time.sleep(600)
    engine.Engine.gradients = gradients
"""


def test_a_rank_that_does_not_reach_a_collective_is_located_also_after_a_resume(
    launch: Callable[..., Launch],
) -> None:
    """The short timeout holds from the second step of this process on, whichever step that is."""
    job = [*TWO_RANKS, *LONG, "metrics.log_interval=1", "cluster.step_timeout_seconds=4"]
    first = launch(*job)
    first.wait_for_step()
    first.process.send_signal(signal.SIGTERM)
    assert first.finish() == EXIT_RESUMABLE
    assert not (first.run_dir / "flight_recorder").exists()
    reached = first.read("result.json")["step"]

    second = launch(*job, patch=ABSENT)
    assert second.finish() == EXIT_MACHINE
    row, folder = second.read("result.json"), second.run_dir / "flight_recorder"
    assert (row["error.kind"], row["error.rank"], row["step"]) == ("collective_timeout", 0, reached + 2)
    assert row["error.absent_ranks"] == [1]
    assert "rank 1 did not reach the collective that rank 0 waited in: " in second.err
    assert f"the collective and each rank's position: {folder.relative_to(second.folder)}" in second.err
    waiting, absent = ((folder / f"stacks-rank{rank}.txt").read_text() for rank in (0, 1))
    for rank, text in enumerate((waiting, absent)):
        assert text.startswith(f"rank {rank}, step {reached + 3}: ")
        assert "last collective begun: gloo:" in text and "default_pg" in text
        assert text.count("hread 0x") >= 2, "not all threads"
    assert "gloo:all_reduce" in waiting and "in world_total" in waiting
    assert "in somewhere_else" in absent and "in world_total" not in absent
    # Read the files as torch's own analysis does.
    dumps = [read_dump("gloo_", str(folder / f"gloo_{rank}")) for rank in (0, 1)]
    ends = [dump["entries"][-1]["collective_seq_id"] for dump in dumps]  # type: ignore[index]
    assert ends[0] == ends[1] + 1
    analysis = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", "--prefix", "gloo_"]
    done = subprocess.run([*analysis, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert f"Not all ranks joining collective, sequence number: {ends[0]}" in said
    assert "missing_ranks" in said or "{1}" in said
