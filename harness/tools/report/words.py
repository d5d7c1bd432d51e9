"""Format jobs and values for tables."""

from __future__ import annotations

from harness.config.job import Job


def layout_in_words(job: Job) -> str:
    """Format degrees as the published tables do: ``FSDP8 TP8 PP8``; one rank is ``single``."""
    layout = job.parallelism
    words = []
    if layout.dp_replicate > 1:
        shards = f"HSDP{layout.dp_replicate}x{layout.dp_shard}"
        words.append(shards if layout.dp_shard > 1 else f"DDP{layout.dp_replicate}")
    elif layout.dp_shard > 1:
        words.append(f"FSDP{layout.dp_shard}")
    for axis in ("cp", "tp", "ep", "pp"):
        degree = getattr(layout, axis)
        words += [f"{axis.upper()}{degree}"] if degree > 1 else []
    return " ".join(words) or "single"


def layout_and_schedule(job: Job) -> str:
    """Format degrees and the pipeline schedule, if any."""
    schedule = "" if job.parallelism.pp == 1 else f" {job.parallelism.pp_schedule}"
    return f"{layout_in_words(job)}{schedule}"
