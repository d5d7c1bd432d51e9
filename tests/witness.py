"""Read by Python at its start: ranks note their rows and weights, and one of an attempt dies, as told.

``TEST_DEATHS`` has for each attempt a rank and where: ``2@step1 1@save4 1@load``. Before a ``~`` the
rank waits for SIGTERM first. Notes are lines of JSON in ``witness/`` of the run folder.
"""

import json
import os
import signal
import sys
import zlib
from pathlib import Path


def attempt():
    return len(list(Path(sys.argv[-1]).glob("attempts/*")))


def rank():
    return int(os.environ["RANK"])


def die_at(place):
    deaths = os.environ.get("TEST_DEATHS", "").split()
    due = deaths[attempt()] if attempt() < len(deaths) else ""
    if due.rstrip("~") == f"{rank()}@{place}":
        if due.endswith("~"):
            Path(sys.argv[-1], f"held-{attempt()}").touch()
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            signal.sigwait([signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGKILL)


def note(**facts):
    folder = Path(sys.argv[-1]) / "witness"
    folder.mkdir(exist_ok=True)
    with (folder / f"{attempt()}-{rank()}.jsonl").open("a") as file:
        file.write(json.dumps(facts) + "\n")


def digest_of(tensors):
    found = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[name] = zlib.crc32(full.numpy().tobytes())
    return found


def watch():
    from harness.checkpoint.load import CheckpointLoader
    from harness.checkpoint.save import Saver
    from harness.checkpoint.state import model_state
    from harness.checkpoint.storage import Writer
    from harness.train.engine import Engine

    gradients, load = Engine.gradients, CheckpointLoader._load
    save, write = Saver.save, Writer.write_data

    def watched_gradients(self, batch, **options):
        step = self.schedule.last_epoch + 1
        note(step=step, rows=[zlib.crc32(row.numpy().tobytes()) for row in batch.inputs_BT])
        die_at(f"step{step}")
        return gradients(self, batch, **options)

    def watched_save(self, step, *arguments, **options):
        note(saved=step, weights=digest_of(model_state(self.engine)))
        watched_save.step = step
        save(self, step, *arguments, **options)

    def watched_write(self, *arguments):
        die_at(f"save{watched_save.step}")
        return write(self, *arguments)

    def watched_load(self, checkpoint):
        die_at("load")
        state = load(self, checkpoint)
        note(loaded=checkpoint.step, weights=digest_of(model_state(self.engine)))
        return state

    Engine.gradients, CheckpointLoader._load = watched_gradients, watched_load
    Saver.save, Writer.write_data = watched_save, watched_write


if "harness.train.rank" in Path("/proc/self/cmdline").read_text():
    watch()
