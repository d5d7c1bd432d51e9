"""A job with a slow rank, which SLURM starts three times."""

from __future__ import annotations

from dataclasses import dataclass

from commands import ON_SLURM, Commands, job_of, misbehaving, read, restarts_of, until


@dataclass(frozen=True)
class Attempt:
    """One start of the job: its nodes, those excluded from it, and what is said about its slow rank."""

    nodes: set[str]
    excluded: set[str]
    slow: str
    status: str


def drag_a_job(commands: Commands) -> list[Attempt]:
    """Requeue the job when its second rank was found slow: first it does so itself, as before its time limit,
    then SLURM does."""
    commands.train(
        *("name=dragged", "training.steps=100000", "metrics.log_interval=100", "metrics.warmup_steps=0"),
        *(
            "parallelism=fsdp",
            "parallelism.dp_shard=2",
            "cluster.ranks_per_node=1",
            "checkpoint.interval=10000",
        ),
        *(*ON_SLURM[:-1], misbehaving("drags"), "profiling.phases=true", "cluster.exclude_slow=true"),
    )
    run = commands.only_run("dragged")
    job = job_of(run)

    def nodes_in(field: str) -> set[str]:
        said = commands.slurm.run("scontrol", "show", "job", "--oneliner", job).split()
        listed = dict(part.split("=", 1) for part in said if "=" in part)[field]
        return set(commands.slurm.run("scontrol", "show", "hostnames", listed).split()) - {"(null)"}

    attempts = []
    for number, end in enumerate(
        (("scancel", "--batch", "--signal=USR2"), ("scontrol", "requeue"), ("scancel",))
    ):
        until(lambda number=number: restarts_of(run) == number, f"start {number + 1}")  # type: ignore[misc]
        [slow] = until(lambda: read(run / "slow_ranks.json").get("slow"), "a slow rank")
        status = commands.run("sweep", "status", str(run))
        attempts.append(Attempt(nodes_in("NodeList"), nodes_in("ExcNodeList"), slow["host"], status))
        commands.slurm.run(*end, job)
    return attempts
