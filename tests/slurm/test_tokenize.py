"""Arrays of ``harness tokenize`` and ``harness encode`` write what one process writes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from commands import ON_SLURM, Commands
from scheduler import Scheduler

from harness.data.corpus import open_shards

DEADLINE_SECONDS = 120.0


def test_an_array_writes_the_corpus_of_one_process(slurm: Scheduler, tmp_path: Path) -> None:
    commands, home = Commands(slurm, tmp_path), tmp_path
    lines = (json.dumps({"text": f"document {number} " * (number % 7)}) for number in range(400))
    (home / "a.jsonl").write_text("\n".join(lines))
    typed = (
        *("data=local_jsonl", f"data.paths=[{home / 'a.jsonl'}]", "data.validation_fraction=0.1"),
        *("tokenizer=bytes", "tokenize.unit_mib=0.002"),
    )
    array = ("tokenize.shards=3", "tokenize.workers=1", f"tokenize.target={home / 'array'}")
    assert "submitted as job" in commands.run("tokenize", *typed, *array, *ON_SLURM)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (home / "array" / "manifest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    logs = "".join(log.read_text() for log in Path(home / "array" / "slurm").glob("*.out"))
    assert (home / "array" / "manifest.json").exists(), logs
    commands.run("tokenize", *typed, f"tokenize.target={home / 'one'}", "tokenize.workers=1")
    for split in ("train", "validation"):
        parts = open_shards(home / "array", split)
        assert len(parts) == 3
        tokens = [token for part in parts for token in part.tokens.tolist()]
        (whole,) = open_shards(home / "one", split)
        assert tokens == whole.tokens.tolist()
    assert "is complete" in commands.run("tokenize", *typed, *array, *ON_SLURM)


@pytest.mark.thorough
def test_an_array_writes_the_latents_of_one_process(slurm: Scheduler, tmp_path: Path) -> None:
    commands, home = Commands(slurm, tmp_path), tmp_path
    typed = ("data=drawn_shapes", "encode.samples=20", "encode.validation_samples=4", "encode.unit=6")
    array = ("encode.shards=2", f"encode.target={home / 'array'}")
    assert "submitted as job" in commands.run("encode", *typed, *array, *ON_SLURM)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (home / "array" / "manifest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    logs = "".join(log.read_text() for log in Path(home / "array" / "slurm").glob("*.out"))
    assert (home / "array" / "manifest.json").exists(), logs
    commands.run("encode", *typed, f"encode.target={home / 'one'}", "cluster.device=cpu")
    for path in (home / "one").glob("*.safetensors"):
        assert path.read_bytes() == (home / "array" / path.name).read_bytes(), path.name
    assert "is complete" in commands.run("encode", *typed, *array, *ON_SLURM)
