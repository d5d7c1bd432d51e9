"""Faults in files that are there when the command starts: damaged, missing and foreign ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from bench import STEPS, Bench, Expected, Fault

from harness.checkpoint.catalog import MANIFEST, METADATA
from harness.util.errors import EXIT_OK, EXIT_USER

WEIGHT, MOMENT = "layers.0.attention.wq.weight", "optimizer.state.layers.1.feed_forward.w1.weight.exp_avg"
Injection = Callable[[Bench], object]


def damage(
    name: str,
    inject: Injection,
    resumed: int | None,
    *reads: str,
    ranks: int = 1,
    code: int = EXIT_OK,
) -> Fault:
    """Return a fault that is injected before the command starts."""

    def happen(bench: Bench) -> None:
        inject(bench)
        bench.command(Expected(resumed, code, reads))
        if code == EXIT_OK:
            bench.require(bench.complete()[-1] == STEPS, "the last checkpoint is not complete again")

    return Fault(name, happen, ranks, needs_processes=ranks > 1)


def truncate(path: Path, share: float = 0.5) -> None:
    """Shorten a file."""
    os.truncate(path, int(path.stat().st_size * share))


def flip(path: Path, offset: int | None = None) -> None:
    """Flip one bit of a file, by default in its middle; a negative offset counts from the end."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if offset is None else offset] ^= 1
    path.write_bytes(content)


def flip_entry(name: str, step: int = STEPS) -> Injection:
    """Return an injection that flips a bit in the middle of a tensor."""
    return lambda bench: flip(*locate(bench.step(step), name))


def locate(checkpoint: Path, name: str) -> tuple[Path, int]:
    """Return file and offset of the middle of a tensor's last piece; ``name`` may be a prefix."""
    from torch.distributed.checkpoint import FileSystemReader

    stored = FileSystemReader(checkpoint).read_metadata().storage_data
    pieces = [(key.fqn, piece) for key, piece in stored.items() if key.fqn.startswith(name)]
    _, piece = max(pieces, key=lambda each: (each[0], each[1].relative_path))
    return checkpoint / piece.relative_path, piece.offset + piece.length // 2


def in_all(inject: Callable[[Bench, int], object]) -> Injection:
    """Return an injection into the checkpoint of every step."""
    return lambda bench: [inject(bench, step) for step in bench.steps()]


def damage_newest_two(bench: Bench) -> None:
    """The size shows the damage of the newest; reading shows that of the one before."""
    truncate(bench.data_file(8))
    flip_entry(WEIGHT, 6)(bench)


def put_unrelated(bench: Bench) -> None:
    """Add files and folders that people and tools leave."""
    (bench.checkpoints / "notes.txt").write_text("do not touch")
    (bench.checkpoints / "step-best").mkdir()
    (bench.checkpoints / ".nfs0001").write_bytes(b"x")
    (bench.checkpoints / "superseded").mkdir()
    (bench.step(8) / "README").write_text("the good one")


def empty(bench: Bench) -> None:
    """Remove all files of the newest checkpoint."""
    for file in bench.step(8).iterdir():
        file.unlink()


def manifest(bench: Bench) -> Path:
    return bench.step(8) / MANIFEST


def metadata(bench: Bench) -> Path:
    return bench.step(8) / METADATA


def checksum(rank: int) -> str:
    """Pattern of the message about an entry whose checksum differs."""
    return rf"__\d_0\.distcp: bytes \d+ to \d+ do not have the.* checksum .*\(found by rank {rank}\)"


UNFINISHED = r"it was not finished: there is no manifest\.json"
DAMAGED = r"manifest\.json is damaged: .*"
METADATA_DIFFERS = r"\.metadata does not have the checksum .*"
UNUSABLE = (
    r"^error: .*no checkpoint can be used \(.*step-8.* .*step-2.* .*would work: checkpoint\.resume=false"
)
# Damage to the newest checkpoint: the run resumes from step 6. The last column is the reason in the message.
NEWEST: list[tuple[str, int, Injection, str]] = [
    (
        "data file truncated",
        1,
        lambda b: truncate(b.data_file(8)),
        r"__0_0.distcp has \d+ bytes instead of \d+",
    ),
    ("bit flipped in a weight", 1, flip_entry(WEIGHT), checksum(0)),
    ("bit flipped in optimizer state", 1, flip_entry(MOMENT), checksum(0)),
    ("bit flipped in random states", 1, flip_entry("rng."), checksum(0)),
    ("first bit of a data file flipped", 1, lambda b: flip(b.data_file(8), 0), checksum(0)),
    ("last bit of a data file flipped", 1, lambda b: flip(b.data_file(8), -1), checksum(0)),
    ("bit flipped in `.metadata`", 1, lambda b: flip(metadata(b)), METADATA_DIFFERS),
    ("`.metadata` deleted", 1, lambda b: metadata(b).unlink(), r"\.metadata is missing"),
    ("manifest truncated", 1, lambda b: truncate(manifest(b)), DAMAGED),
    ("manifest empty", 1, lambda b: truncate(manifest(b), 0.0), DAMAGED),
    (
        "bit flipped in the manifest",
        1,
        lambda b: flip(manifest(b), manifest(b).read_bytes().index(b'"step": 8') + 8),
        DAMAGED + "checksum.*",
    ),
    ("manifest overwritten with other JSON", 1, lambda b: manifest(b).write_text("[]"), DAMAGED),
    ("manifest deleted (half-written)", 1, lambda b: manifest(b).unlink(), UNFINISHED),
    ("data file deleted", 1, lambda b: b.data_file(8).unlink(), r"__0_0\.distcp is missing"),
    ("step folder empty", 1, empty, UNFINISHED),
    ("one rank's file deleted", 4, lambda b: b.data_file(8, 2).unlink(), r"__2_0\.distcp is missing"),
    ("bit flipped in one rank's random states", 4, flip_entry("rng.dp_shard3of4"), checksum(3)),
    ("bit flipped in `.metadata`, 4 ranks", 4, lambda b: flip(metadata(b)), METADATA_DIFFERS),
]
flip_in_all = in_all(lambda bench, step: flip_entry(WEIGHT, step)(bench))
truncate_all = in_all(lambda bench, step: truncate(bench.data_file(step)))
unlink_manifests = in_all(lambda bench, step: (bench.step(step) / MANIFEST).unlink())
DAMAGES = [
    *(
        damage(name, inject, 6, rf"WARNING .*step-8 cannot be used: {reason}; using .*step-6", ranks=ranks)
        for name, ranks, inject, reason in NEWEST
    ),
    damage(
        "newest truncated, a bit flipped in the one before",
        damage_newest_two,
        4,
        r"step-8 cannot be used: .* bytes instead of",
        r"step-6 cannot be used: .* checksum .*using .*step-4",
    ),
    damage("all truncated", truncate_all, None, UNUSABLE, code=EXIT_USER),
    damage("a bit flipped in all", flip_in_all, None, UNUSABLE, code=EXIT_USER),
    damage("a bit flipped in all, 4 ranks", flip_in_all, None, UNUSABLE, ranks=4, code=EXIT_USER),
    damage("no manifest in any", unlink_manifests, None, rf"step-8 cannot be used: {UNFINISHED}"),
    damage("unrelated files and folders beside and in it", put_unrelated, 8),
    damage(
        "a file called `step-99` beside it",
        lambda b: (b.checkpoints / "step-99").write_text("not a folder"),
        8,
        rf"step-99 cannot be used: {UNFINISHED}; using .*step-8",
    ),
    damage(
        "a copy called `backup-of-step-12` beside it",
        lambda b: shutil.copytree(b.step(8), b.checkpoints / "backup-of-step-12"),
        8,
    ),
]


def folder_that_cannot_be(bench: Bench) -> None:
    """Name a folder where not even root can write."""
    reads = (r"^error: checkpoint\.folder=/proc/.*cannot be written.*would work",)
    bench.command(Expected(None, EXIT_USER, reads), "checkpoint.folder=/proc/harness-checkpoints")


NOWHERE = [Fault("`checkpoint.folder=/proc/...`", folder_that_cannot_be, needs_processes=False)]
