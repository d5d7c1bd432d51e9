"""The verb ``bench``."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from harness.compose.composer import compose_job
from harness.compose.verb import Result, Verb
from harness.config.fields import label, part
from harness.config.job import Job
from harness.launch.begin import begin
from harness.metrics.console import progress
from harness.metrics.jsonl import MetricsFile
from harness.run.folder import RunFolder
from harness.util.encoding import flatten
from harness.util.errors import EXIT_INTERRUPTED, EXIT_OK, STOPPED, ConfigError, UserError
from harness.util.tables import Table, plural, to_text

HELP = """`harness bench`: measure the speed of a job on this machine, alone or against variants.

Every round runs each job once, from a cold start, as `harness train` would start it. The order alternates
between rounds, so that a drift of the machine's speed affects all jobs. Compare jobs by their ratio within a
round. The first steps of a run do not count (`metrics.warmup_steps`).
"""

EXIT_FAILED = 1
BASE = "base"
Row = dict[str, Any]
Name = TypeVar("Name")

RATE = "tokens_per_second"
# Measured quantities: label on the screen, name in the file, field of a run's row, number format.
QUANTITIES = (
    ("tokens/s", RATE, "window.tokens_per_second", ",.1f"),
    ("tokens/s per rank", "tokens_per_second_per_rank", "tokens_per_second_per_rank", ",.1f"),
    ("step seconds", "step_seconds", "window.step_seconds_median", ".4g"),
    ("seconds to the first step", "first_step_seconds", "first_step_seconds", ".1f"),
    ("peak memory, GiB", "memory_gib", "memory_gib", ".2f"),
    ("MFU", "mfu", "mfu", ".1%"),
    ("MFU, causal half", "mfu_causal", "mfu_causal", ".1%"),
)
RATE_OF_RUN = QUANTITIES[0][2]
# Fields that a row of bench.jsonl copies from the row of a run.
FACTS = (
    *("id", "numerics_id", "name", "exit_reason", "world_size", "device", "parameters"),
    *("flops_per_token_full", "flops_per_token_causal", "peak_flops", "peak_origin"),
)
GROUPS_OF_FACTS = ("error.", "job.", "code.", "host.")


@dataclass(frozen=True)
class BenchConfig:
    """Number of rounds, variants and output file of a measurement."""

    rounds: int = label(3, least=1)
    """Number of runs of every job."""
    variants: dict[str, str] = label(factory=dict)
    """Variants to compare with the job: name -> additional overrides, separated by spaces."""
    out: str = label("runs/bench.jsonl", written="file")
    """File to append a row per job to."""

    def validate(self) -> None:
        """Raise ConfigError for a variant named like the job itself."""
        if BASE in self.variants:
            rule = "this is the name of the job itself"
            raise ConfigError(f"bench.variants.{BASE}", self.variants[BASE], rule, "another name")


@dataclass(frozen=True)
class BenchJob(Job):
    """A job plus the options of the measurement."""

    varies: ClassVar[bool] = True

    bench: BenchConfig = part(BenchConfig)
    """Rounds, variants and output file."""


@dataclass(frozen=True)
class Variant:
    """A job to measure, and the overrides that compose it."""

    job: Job
    overrides: list[str]


@dataclass(frozen=True)
class Spread:
    """Median and range of one quantity over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """Summarize the values that are not None; None if there are none."""
        known = [value for value in values if value is not None]
        return cls(statistics.median(known), min(known), max(known)) if known else None

    def as_text(self, form: str) -> tuple[str, str]:
        """Format the median, and the range."""
        return format(self.median, form), f"{self.low:{form}} to {self.high:{form}}"


def bench(job: BenchJob, overrides: list[str]) -> int | Result:
    """Measure a job and its variants; append a row for each to ``bench.out``."""
    config = job.bench
    config.validate()
    variants = compose_variants(config, overrides)
    out = Path(config.out)
    sys.stderr.write(
        f"{job.name}: {plural(config.rounds, 'round')} of {', '.join(variants)}; "
        f"the first {job.metrics.warmup_steps} of {job.steps} steps do not count\n"
    )
    began, rows = time.time(), measure(variants, config.rounds)
    if rows is None:
        return EXIT_INTERRUPTED
    summaries = [{"time": began, **summary(name, rows, each.overrides)} for name, each in variants.items()]
    file = MetricsFile(out)
    for row in summaries:
        file.write(row)
    file.close()
    return Result(
        {"rows": summaries, "out": out},
        f"{report(rows)}rows appended to {out}\n",
        EXIT_FAILED if any(failure_of(each) for each in rows.values()) else EXIT_OK,
    )


def compose_variants(config: BenchConfig, overrides: list[str]) -> dict[str, Variant]:
    """Compose the job and then its variants, each with a run folder of its own."""
    variants, common = {}, [each for each in overrides if not each.lstrip("+").startswith("bench.")]
    for name, additional in {BASE: "", **config.variants}.items():
        own = [*common, *additional.split()]
        try:
            composed = compose_job(own, config_name="bench", schema=BenchJob)
            check_measurable(composed)
        except UserError as error:
            raise error if name == BASE else UserError(f"bench.variants.{name}: {error}") from error
        runs_dir = str(Path(composed.runs_dir) / "bench")
        variants[name] = Variant(replace(composed.plain, runs_dir=runs_dir), own)
    return variants


def check_measurable(job: Job) -> None:
    """Raise ConfigError for jobs that run elsewhere, resume from an earlier round, or have too few steps."""
    if job.cluster.kind != "local":
        rule = "bench measures the machine that it runs on, also inside a SLURM allocation"
        raise ConfigError("cluster.kind", job.cluster.kind, rule, "cluster=local, in an allocation")
    if job.checkpoint.enable:
        rule = "a round would resume from the checkpoint of the round before"
        raise ConfigError("checkpoint.enable", True, rule, "false")
    if job.steps <= job.metrics.warmup_steps:
        rule = f"the first metrics.warmup_steps={job.metrics.warmup_steps} do not count"
        raise ConfigError("training.steps", job.steps, rule, f"at least {job.metrics.warmup_steps + 1}")


def order_of(names: Sequence[Name], number: int) -> list[Name]:
    """The order of jobs in a round: as given in even rounds, reversed in odd ones."""
    return list(names) if number % 2 == 0 else list(reversed(names))


def measure(variants: Mapping[str, Variant], rounds: int) -> dict[str, dict[int, Row]] | None:
    """Run all jobs round by round; a job that fails is left out of further rounds.

    Returns:
        The rows of the runs by name and round; None if the user interrupted.
    """
    rows: dict[str, dict[int, Row]] = {name: {} for name in variants}
    turns = [(number, name) for number in range(rounds) for name in order_of(list(variants), number)]
    with progress(len(turns), bar=False) as show:
        for number, name in turns:
            show(f"round {number + 1} of {rounds}: {name}")
            if failure_of(rows[name]):
                continue
            code, row = run_once(variants[name])
            if code in STOPPED:
                return None
            rows[name][number] = row
            failure = failure_of(rows[name])
            sys.stderr.write(f"{name}: {failure or f'{row[RATE_OF_RUN]:,.1f} tokens/s'}\n")
    return rows


def run_once(variant: Variant) -> tuple[int, Row]:
    """Run a job from a cold start, in new processes; return its exit code and its row."""
    from harness.launch.local import launch

    folder = RunFolder(variant.job.run_dir)
    begin(folder, variant.job, variant.overrides)
    code = launch(variant.job, folder, apart=True)
    return code, folder.row


def failure_of(rows: Mapping[int, Row]) -> str:
    """Error of a job's last run in one line; empty if it completed."""
    row = rows[max(rows)] if rows else {}
    if row.get("exit_reason", "completed") == "completed":
        return ""
    message = str(row.get("error.message", "")).strip()
    return f"FAILED ({row.get('error.kind', 'unknown')}): {message.splitlines()[0] if message else ''}"


def ratios(rows: Mapping[int, Row], base: Mapping[int, Row]) -> list[float]:
    """Return tokens per second relative to the base, for every round that both completed."""
    ours, theirs = (
        {number: row[RATE_OF_RUN] for number, row in each.items() if row.get("exit_reason") == "completed"}
        for each in (rows, base)
    )
    return ratios_by_round(ours, theirs)


def ratios_by_round(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Return the ratio of one quantity, for every round that has both."""
    return [ours[number] / theirs[number] for number in ours if number in theirs]


def summary(name: str, rows: Mapping[str, Mapping[int, Row]], overrides: list[str]) -> Row:
    """Return the flat row of one job: measurements over the rounds, the job, versions and hardware."""
    own = rows[name]
    done = [row for row in own.values() if row.get("exit_reason") == "completed"]

    def spread(values: Sequence[float | None]) -> Row:
        found = Spread.of(values)
        low, median, high = (found.low, found.median, found.high) if found else (None, None, None)
        return {"median": median, "min": low, "max": high, "rounds": values}

    measured = {quantity: spread([row.get(field) for row in done]) for _, quantity, field, _ in QUANTITIES}
    if name != BASE:
        measured["ratio"] = {"to": BASE, **spread(ratios(own, rows[BASE]))}
    last = own[max(own)]
    facts = {key: last.get(key) for key in FACTS}
    facts |= {key: value for key, value in last.items() if key.startswith(GROUPS_OF_FACTS)}
    return flatten({"variant": name, "overrides": overrides, "rounds": len(done), **measured, **facts})


def report(rows: Mapping[str, Mapping[int, Row]]) -> str:
    """Return the printed report: median and range of each quantity of every job, then the ratios."""
    text = ""
    for name, own in rows.items():
        last, size = own[max(own)], own[max(own)]["world_size"]
        ranks = plural(size, "rank")
        if failure := failure_of(own):
            text += f"{name} ({ranks})\n  {failure}\n"
            continue
        lines: list[tuple[str, ...]] = []
        for shown, _, field, form in QUANTITIES:
            if spread := Spread.of([row.get(field) for row in own.values()]):
                lines.append((shown, *spread.as_text(form)))
            elif field == "mfu":
                lines.append((shown, "-", str(last.get("peak_origin"))))
        text += _block(f"{name} ({ranks} on {last.get('device')})", lines)
    lines = []
    for name in [each for each in rows if each != BASE]:
        spread = Spread.of(ratios(rows[name], rows[BASE]))
        lines.append((name, *(spread.as_text(".3f") if spread else ("-", "no round that both completed"))))
    return text + (_block(f"tokens/s over {BASE}'s, round by round", lines) if lines else "")


def _block(title: str, lines: Sequence[tuple[str, ...]]) -> str:
    return to_text(Table.of_cells((title, "median", "range"), lines, right=(1,)))


VERB = Verb("bench", bench, help=HELP, job=BenchJob, has_json=True, is_alone=True)
