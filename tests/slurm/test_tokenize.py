"""Arrays of ``harness tokenize`` and ``harness encode`` write what one process writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import ON_SLURM, Commands, until
from scheduler import Scheduler

from harness.data.corpus import open_shards


def check_array(slurm: Scheduler, home: Path, verb: str, shards: int, *typed: str) -> None:
    """Write a folder ``array`` by an array, and ``one`` by one process."""
    commands = Commands(slurm, home)
    array = (*typed, f"{verb}.shards={shards}", f"{verb}.target={home / 'array'}", *ON_SLURM)
    assert "submitted as job" in commands.run(verb, *array)
    until((home / "array" / "manifest.json").exists, "a manifest", 120)
    commands.run(verb, *typed, f"{verb}.target={home / 'one'}", "cluster.device=cpu")
    assert "is complete" in commands.run(verb, *array)


def test_an_array_writes_the_corpus_of_one_process(slurm: Scheduler, tmp_path: Path) -> None:
    lines = (json.dumps({"text": f"document {number} " * (number % 7)}) for number in range(400))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    typed = ("data=local_jsonl", f"data.paths=[{tmp_path / 'a.jsonl'}]", "data.validation_fraction=0.1")
    typed = (*typed, "tokenizer=bytes", "tokenize.unit_mib=0.002", "tokenize.workers=1")
    check_array(slurm, tmp_path, "tokenize", 3, *typed)
    for split in ("train", "validation"):
        parts = open_shards(tmp_path / "array", split)
        assert len(parts) == 3
        tokens = [token for part in parts for token in part.tokens.tolist()]
        (whole,) = open_shards(tmp_path / "one", split)
        assert tokens == whole.tokens.tolist()


@pytest.mark.thorough
def test_an_array_writes_the_latents_of_one_process(slurm: Scheduler, tmp_path: Path) -> None:
    typed = ("data=drawn_shapes", "encode.samples=20", "encode.validation_samples=4", "encode.unit=6")
    check_array(slurm, tmp_path, "encode", 2, *typed)
    for path in (tmp_path / "one").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "array" / path.name).read_bytes(), path.name
