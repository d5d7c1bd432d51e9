"""A first measurement on one GPU, in three calls of at most ten minutes each.

    python experiments/first_gpu/first_gpu.py look      # versions, checks, ceilings
    python experiments/first_gpu/first_gpu.py speed     # 8 layers of Llama 3.1 8B, in five ways
    python experiments/first_gpu/first_gpu.py more      # 1B, experts, decoding, updates, a trace, torchtitan
    python experiments/first_gpu/first_gpu.py table     # the table of what is there
    python experiments/first_gpu/first_gpu.py rehearse  # counts on a virtual GPU, by make rehearsal's Python

It needs torch and the packages of ``make first-gpu``, no network and no installation. Every job is a process
of its own with a limit; one over its limit is ended, and its row says so. Rows are appended to
``results.jsonl`` in ``--out``, which ``harness plan calibrate`` reads, and are printed as a table at the end
of each call. A job runs beside a loop in plain torch (cpu_baseline/bare_loop.py) in the same call, after the
device's ceilings. On a virtual GPU, which has no values and no times, rows say so and nothing is judged.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paths import EXPERIMENTS, HERE, ROOT

sys.path.insert(1, str(EXPERIMENTS / "gpu_single"))

import gpu_cases as cases
import run
from first_table import render

from harness.config.job import Job
from harness.launch.rows import KEPT, read_kept
from harness.run.result import git_commit, versions
from harness.tools.plan.make import make_plan
from harness.tools.rehearse.rank import CONTROLLER
from harness.util.errors import UserError
from harness.util.words import GIB

CALL_SECONDS = 570.0
REHEARSED = HERE / "rehearsed.json"
STEPS = 16
COMMON = [
    "data=synthetic",
    "tokenizer=bytes",
    "checkpoint=disabled",
    "parallelism=single",
    "training.seq_len=8192",
    "training.global_batch_size=1",
    "training.loss_chunks=8",
    f"training.steps={STEPS}",
    f"metrics.warmup_steps={cases.WARMUP_STEPS}",
    f"metrics.log_interval={STEPS}",
    "metrics.console=none",
]
EIGHT_LAYERS = ["model=llama3_8b", "model.n_layers=8", *COMMON]
JOBS = {
    "8 layers of 8B, compiled": [*EIGHT_LAYERS, *cases.MODES["bf16_compile"]],
    "8 layers of 8B, eager": [*EIGHT_LAYERS, *cases.MODES["bf16"]],
    "8 layers of 8B, CUDA graphs": [*EIGHT_LAYERS, *cases.MODES["bf16_graphs"]],
    "8 layers of 8B, float8 tensorwise": [*EIGHT_LAYERS, *cases.MODES["float8_tensorwise"]],
    "8 layers of 8B, float8 rowwise": [*EIGHT_LAYERS, *cases.MODES["float8_rowwise"]],
    "1B, compiled": ["model=llama32_1b", *COMMON, *cases.MODES["bf16_compile"]],
    "4 layers of Qwen3 30B, compiled": [
        "model=qwen3_30b_a3b",
        "model.n_layers=4",
        *COMMON,
        *cases.MODES["bf16_compile"],
    ],
    "8 layers of 8B, compiled, selective_op": [
        *EIGHT_LAYERS,
        *cases.MODES["bf16_compile"],
        "activation_checkpoint=selective_op",
    ],
}
"""Jobs by name, for ``harness.train``."""
BARE = {
    "8 layers of 8B, compiled": ["--compile"],
    "8 layers of 8B, eager": [],
    "8 layers of 8B, CUDA graphs": ["--graphs"],
    "8 layers of 8B, float8 tensorwise": ["--compile", "--float8", "tensorwise"],
    "8 layers of 8B, float8 rowwise": ["--compile", "--float8", "rowwise"],
    "1B, compiled": ["--compile"],
    "4 layers of Qwen3 30B, compiled": ["--compile"],
}
"""The same for the bare loop."""
DECODED = ["model=llama32_1b", "precision=bf16"]
Row = dict[str, Any]


class Session:
    """One call: what is measured on, how much time is left, and the rows."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.call = arguments.call
        self.out: Path = arguments.out
        self.tiny: bool = arguments.tiny
        self.only: list[str] = arguments.only
        self.patience: float = arguments.patience
        self.began = time.time()
        self.is_virtual = CONTROLLER in os.environ
        self.out.mkdir(parents=True, exist_ok=True)
        caches = arguments.cache or self.out / "cache"
        os.environ.setdefault("OMP_NUM_THREADS", "4")  # a container may see more cores than it has
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(caches / "inductor"))
        os.environ.setdefault("TRITON_CACHE_DIR", str(caches / "triton"))
        said, failure = run.run_for_output(
            [sys.executable, str(EXPERIMENTS / "gpu_single" / "machine.py")], 120, "cuda"
        )
        if failure:
            raise SystemExit(f"torch does not start here: {failure}")
        self.machine: Row = json.loads(said.splitlines()[-1])
        self.has_gpu = self.machine["device"] is not None
        self.device_name: str = self.machine["device"] or "CPU"
        self.device = "cuda" if self.has_gpu else "cpu"
        if not self.has_gpu and not self.tiny:
            raise SystemExit("torch sees no GPU here; --tiny tries the script on a CPU")

    def keep(self, point: str, side: str = "harness", **fields: Any) -> None:
        """Append a row, and say that it is there."""
        row: Row = {
            "point": point,
            "state": "virtual" if self.is_virtual else "completed",
            "call": self.call,
            "side": side,
            "began": self.began,
            "seconds_into_call": time.time() - self.began,
            "device": self.device_name,
            "tiny": self.tiny,
            "world_size": 1,
            **{f"code.versions.{name}": value for name, value in self.machine["software"].items()},
            **fields,
        }
        if "failed" in fields:
            row |= {"state": "failed", "kind": row.pop("failed"), "reason": row.pop("message")}
        with (self.out / KEPT).open("a") as file:
            file.write(f"{json.dumps(row)}\n")
        print(f"{point}, {side}: {row.get('reason') or row['state']}", file=sys.stderr, flush=True)

    def seconds(self, limit: float) -> float:
        """How long a job with this limit may take, in what is left of the call."""
        left = self.began + CALL_SECONDS * self.patience - time.time()
        return min(limit * self.patience, left)

    def is_due(self, point: str, limit: float) -> bool:
        """Whether a job is to run, and the call has time for it; keep a row if it has none."""
        is_named = not self.only or any(each in point for each in ["ceilings", *self.only])
        if not is_named:
            return False
        if self.seconds(limit) < min(limit, 20):
            self.keep(point, failed="no time", message="no time was left in this call")
            return False
        return True

    def script(self, point: str, limit: float, *words: str) -> None:
        """Keep the rows that a script of ours prints."""
        if not self.is_due(point, limit):
            return
        command = [sys.executable, *words]
        said, failure = run.run_for_output(command, self.seconds(limit), self.device)
        for line in said.splitlines():
            if line.startswith("{"):
                self.keep(**json.loads(line))
        if failure:
            self.keep(point, failed="failed", message=failure)

    def rates(self, kind: str, limit: float) -> None:
        """Keep the rows of rates.py."""
        self.script(kind, limit, str(HERE / "rates.py"), kind, *(["--tiny"] if self.tiny else []))

    def train(self, point: str, limit: float, bare_limit: float = 0) -> None:
        """Train a job, then its bare loop, if it has one."""
        if not self.is_due(point, limit):
            return
        overrides = [*overrides_of(point, tiny=self.tiny), f"cluster.device={self.device}"]
        try:
            job = cases.job_on(overrides, self.device_name)
        except UserError as error:
            self.keep(point, failed="refused", message=str(error), overrides=overrides)
            return
        with tempfile.TemporaryDirectory() as folder:
            row = run.run_job(overrides, self.seconds(limit), self.device, Path(folder))
        self.keep(point, **self.described(point, job, row))
        if bare_limit and self.is_due(point, bare_limit):
            self.keep(point, "bare", **self.bare(job, BARE[point], self.seconds(bare_limit)))

    def trace(self, point: str, limit: float) -> None:
        """Trace the sixth step of a job, and keep the trace beside the rows."""
        if not self.is_due(point, limit):
            return
        overrides = [*overrides_of(point, tiny=self.tiny), f"cluster.device={self.device}"]
        overrides = [word for word in overrides if not word.startswith("training.steps=")]
        overrides += ["training.steps=6", "profiling=on", "profiling.interval=6"]
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "harness.train", *overrides, f"runs_dir={folder}"]
            failure = run.run_process(command, self.seconds(limit), self.device)
            row: Row = {"failed": "failed", "message": failure or "left no trace"}
            for trace in Path(folder).glob("*/[0-9a-f]*/profile/*/rank0.json.gz"):
                shutil.copy(trace, self.out / "trace.json.gz")
                row = kernels_of(trace) | rehearsed_of(point, self.machine["software"]["torch"])
        self.keep(f"trace of {point}", **row)

    def described(self, point: str, job: Job, row: Row) -> Row:
        """A job's row, with the plan's and the rehearsal's figures and what ``calibrate`` reads."""
        plan = make_plan(job)
        row["planned.memory_gib"] = plan.peak / GIB
        if plan.speed is not None:
            row["planned.tokens_per_second"] = plan.speed.tokens_per_second_per_rank
        row |= rehearsed_of(point, self.machine["software"]["torch"])
        if "failed" in row or self.is_virtual:
            return row
        row |= run.utilization_of(row["tokens_per_second"], job, self.device_name)
        row |= cases.described(row["overrides"], self.device_name)
        for name in ("step_seconds", "memory_gib", "mfu"):
            row[f"measured.{name}"] = row[name]
        row["measured.tokens_per_second_per_rank"] = row["tokens_per_second"]
        return row

    def bare(self, job: Job, words: list[str], seconds: float) -> Row:
        """One run of the bare loop in the shape of a job."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "out.json"
            script = EXPERIMENTS / "cpu_baseline" / "bare_loop.py"
            command = [sys.executable, str(script), "--output", str(output), *words]
            command += ["--device", self.device, "--shape", json.dumps(shape_of(job))]
            command += ["--steps", str(STEPS), "--warmup-steps", str(cases.WARMUP_STEPS)]
            failure = run.run_process(command, seconds, self.device)
            if not output.exists():
                return {"failed": "failed", "message": failure or "left no row"}
            found = json.loads(output.read_text())
        return {name: value for name, value in found.items() if name not in ("losses", "threads")}

    def torchtitan(self, point: str, limit: float) -> None:
        """Keep a row of torchtitan in the shape of 8 layers of 8B, if this Python has it."""
        if not self.is_due(point, limit):
            return
        words = ["-c", "import torchtitan.train"]
        absent = run.run_process([sys.executable, *words], self.seconds(60), self.device)
        if absent:
            message = f"torchtitan does not import: {absent}"
            self.keep(point, "torchtitan", failed="absent", message=message)
            return
        shape = "tiny" if self.tiny else "8B"
        layers = 2 if self.tiny else 8
        mode = "bf16_compile"
        case = cases.Case(shape, "selective_op", mode, n_layers=layers, device=self.device)
        told = argparse.Namespace(titan_python=sys.executable, timeout=self.seconds(limit))
        self.keep(point, "torchtitan", **run.run_torchtitan(told, case))


def overrides_of(point: str, *, tiny: bool) -> list[str]:
    """The overrides of a job; tiny ones are of a debug model, and run on any device."""
    words = JOBS[point]
    if not tiny:
        return words
    small = {"model": "qwen3_moe_debug" if "Qwen3" in point else "llama3_tiny"}
    small |= {"model.n_layers": "2", "training.seq_len": "64", "training.loss_chunks": "2"}
    kept = [word for word in words if word.partition("=")[0] not in small]
    return [*(f"{name}={value}" for name, value in small.items()), *kept]


def shape_of(job: Job) -> Row:
    """A job's model and batch as bare_loop.py's ``Shape``."""
    model = job.model
    shape = {
        "dim": model.dim,
        "layers": model.n_layers,
        "heads": model.n_heads,
        "kv_heads": model.n_kv_heads,
        "head_width": model.head_width,
        "ffn_hidden": model.moe.hidden_dim if model.moe.enabled else model.ffn_hidden_dim,
        "vocabulary": model.vocab_size,
        "batch": job.local_batch_size,
        "seq_len": job.training.seq_len,
        "is_tied": model.tied_embeddings,
        "has_qk_norm": model.attention.qk_norm != "none",
    }
    if model.moe.enabled:
        shape |= {"experts": model.moe.num_experts, "top_k": model.moe.top_k}
    return shape


def rehearsed_of(point: str, version: str) -> Row:
    """What a rehearsal counted for a job with this version of torch; empty if it was not rehearsed."""
    known = json.loads(REHEARSED.read_text()) if REHEARSED.is_file() else {}
    found = known.get(".".join(version.split(".")[:2]), {}).get(point, {})
    return {f"rehearsed.{name}": value for name, value in found.items()}


def kernels_of(trace: Path) -> Row:
    """Kernels of a traced step, and the part of the time from the first to the last in which one runs."""
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "kernel"
    )
    if not spans:
        return {"traced.kernels": 0}
    busy, until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return {"traced.kernels": len(spans), "traced.busy": busy / (until - spans[0][0])}


def look(session: Session) -> None:
    """Three minutes: what there is, and whether it computes what a CPU does."""
    facts = {**session.machine, "versions": versions(), **commit()}
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "-q", "-d", "CLOCK,POWER,TEMPERATURE"]
        facts["nvidia-smi"], _ = run.run_for_output(asked, 20, session.device)
    (session.out / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
    session.rates("ceilings", 60)
    session.script("kernels", 90, str(HERE / "checks.py"), "kernels")
    session.script("losses", 120, str(HERE / "checks.py"), "losses")
    if session.has_gpu:
        session.script("captured", 240, str(HERE / "checks.py"), "captured")


def speed(session: Session) -> None:
    """Nine minutes: 8 layers of 8B at 8,192 tokens."""
    session.rates("ceilings", 60)
    session.train("8 layers of 8B, compiled", 110, 110)
    session.train("8 layers of 8B, eager", 60, 60)
    if session.has_gpu:
        session.train("8 layers of 8B, CUDA graphs", 80, 110)
        session.train("8 layers of 8B, float8 tensorwise", 130, 130)
        session.train("8 layers of 8B, float8 rowwise", 130, 130)


def more(session: Session) -> None:
    """Nine minutes: other models, decoding, updates alone, and a look into a step."""
    session.rates("ceilings", 60)
    decoded = ["model=llama3_tiny"] if session.tiny else DECODED
    script = str(EXPERIMENTS / "measure" / "decode_cost.py")
    session.train("1B, compiled", 100, 100)
    session.train("4 layers of Qwen3 30B, compiled", 120, 120 if session.has_gpu else 0)
    session.script("decode", 90, script, *decoded, f"cluster.device={session.device}")
    session.rates("updates", 120)
    session.train("8 layers of 8B, compiled, selective_op", 110)
    session.trace("8 layers of 8B, compiled", 110)
    session.torchtitan("8 layers of 8B, compiled, selective_op", 120)


def commit() -> Row:
    """The commit of this tree; of a folder that make first-gpu built, the one that it was built from."""
    written = ROOT / "commit.json"
    return json.loads(written.read_text()) if written.is_file() else git_commit(ROOT)


def rehearse(version: str) -> None:
    """Rehearse every job with this version of torch, and write what it counts into rehearsed.json."""
    from harness.tools.rehearse.config import RehearseConfig
    from harness.tools.rehearse.server import rehearse_rank

    known = json.loads(REHEARSED.read_text()) if REHEARSED.is_file() else {}
    found = known.setdefault(".".join(version.split(".")[:2]), {})
    for point in JOBS:
        overrides = [*overrides_of(point, tiny=False), "cluster.device=cuda"]
        job = cases.job_on(overrides, "NVIDIA H100 80GB HBM3")
        figures = rehearse_rank(job, 0, RehearseConfig())
        if figures.failure is not None:
            raise SystemExit(f"{point}: {figures.failure.message}")
        found[point] = {
            "kernels": figures.launches,
            "products": figures.product_count,
            "memory_gib": round(figures.memory["reserved"] / GIB, 2),
        }
        REHEARSED.write_text(json.dumps(known, indent=2) + "\n")


CALLS: dict[str, Callable[[Session], None]] = {"look": look, "speed": speed, "more": more}


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("call", choices=[*CALLS, "table", "rehearse"])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "first_gpu")
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels; else in --out")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of rows to make")
    parser.add_argument("--tiny", action="store_true", help="debug models, also on a CPU")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="factor of all limits, for a slow machine"
    )
    return parser.parse_args(words)


def main() -> None:
    arguments = parse_arguments()
    if arguments.call == "rehearse":
        rehearse(str(versions()["torch"]))
        return
    if arguments.call in CALLS:
        CALLS[arguments.call](Session(arguments))
    table = render(read_kept(arguments.out))
    (arguments.out / "table.md").write_text(f"{table}\n")
    print(table)


if __name__ == "__main__":
    main()
