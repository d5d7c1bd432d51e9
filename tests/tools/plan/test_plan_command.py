"""harness plan: every line of its output, JSON, one line per mistake, torch only for pipelines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.compose.composer import compose_job
from harness.compose.verb import guarded
from harness.config.parallelism import ParallelismConfig
from harness.model.accounting import account
from harness.tools.plan import evidence
from harness.tools.plan.config import PlanJob
from harness.tools.plan.make import make_plan
from harness.tools.plan.order import _read, pipeline_order
from harness.tools.plan.plan import KINDS, PARTS, Action, Evidence, Plan, RankMemory, Speed, Traffic
from harness.tools.plan.render import as_dict, render
from harness.tools.plan.verb import VERB
from harness.util.encoding import dumps, loads
from harness.util.errors import EXIT_USER, ConfigError
from harness.util.hardware import ACCELERATORS
from harness.util.tables import counted, figure, gib, seconds

ROOT = Path(__file__).resolve().parents[3]
GIB = 2**30
JOB_405B = [
    *("model=llama3_405b", "parallelism=fsdp_tp_pp", "parallelism.tp=8", "parallelism.pp=8"),
    *("parallelism.dp_shard=8", "parallelism.pp_schedule=Interleaved1F1B", "cluster=slurm_h100"),
    *("training.global_batch_size=256", "training.seq_len=8192", "training.steps=3000"),
    *("precision=float8_tensorwise", "compile=on", "parallelism.async_tp=true", "activation_checkpoint=full"),
]


def run(*arguments: str) -> int:
    """Run the command in this process; return its exit code."""
    return guarded(lambda: VERB.run_line(arguments))


def memory(rank: int, **kinds: float) -> RankMemory:
    """Memory of a rank with two of sixteen stages, in GiB."""
    return RankMemory(rank, (rank, rank + 8), {kind: kinds.get(kind, 0.0) * GIB for kind in KINDS})


def plan_405b() -> Plan:
    """A plan of a real job with made-up values."""
    job = compose_job(JOB_405B, config_name="plan", schema=PlanJob).plain
    held = {"parameters": 3.0, "gradients": 3.0, "optimizer": 6.0, "gathered": 11.25, "runtime": 2.0}
    held["activations"] = 30.5
    ranks = [memory(rank, **held) for rank in range(8)]
    ranks[0] = memory(0, **held | {"activations": 32.0})
    ranks[7] = memory(7, **held | {"activations": 28.0, "logits": 3.9})
    parts = dict.fromkeys(PARTS, 0.0) | {
        "compute": 12.0,
        "dp": 0.5,
        "tp": 2.0,
        "bubble": 1.4,
        "optimizer": 0.1,
    }
    return Plan(
        job=job,
        accounting=account(job.model, 8192),
        parameters_per_rank=[0.8e9, *[0.79e9] * 7],
        memory=ranks,
        memory_limit=75 * GIB,
        traffic=[
            Traffic("dp", "all_gather", 8, 70, 22.5 * GIB, "network", 1.5, 0.5),
            Traffic("tp", "reduce_scatter", 8, 8064, 1000 * GIB, "NVLink", 4.0, 2.0),
            Traffic("pp", "send", 2, 128, 16 * GIB, "network", 0.4, 0.0),
        ],
        speed=Speed(16.0, parts, 256 * 8192 / 16 / 512, 0.4567, [[Action(0, "F", 0, 0.0, 1.0)]]),
        accelerator=ACCELERATORS["H100 SXM"],
        notes=["buckets of c10d's reducer are not counted"],
    )


def test_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Evidence(75, 7, 0.8, 1.5, pooled=False)
    monkeypatch.setattr(evidence, "EVIDENCE", {"dense models on Hopper": rows})
    monkeypatch.setattr(evidence, "MEMORY", {"dense models": replace(rows, rows=52)})
    assert (
        render(plan_405b())
        == """\
job         llama3_405b on 512 x H100 SXM, 64 nodes of 8: legal
mesh        pp 8 x dp_shard 8 x tp 8
batch       256 x 8,192 = 2.097 M tokens a step; 32 on each data-parallel rank, as 32 microbatches of 1
schedule    Interleaved1F1B, 16 stages (2 on each rank)
execution   activation checkpointing full, compiled, linears in float8_tensorwise
parameters  405.9 B in all, 405.9 B active, 790 M to 800 M a rank
FLOPs       2,625 GFLOP a token (full attention), 2,524 (causal half)

memory at its peak, GiB on each rank
  ranks   stages     parameters  gradients  optimizer  activations  logits  gathered  runtime   peak
  pp 0    0, 8             3.00       3.00       6.00        32.00       -     11.25     2.00  57.25
  pp 1-6  1-6, 9-14        3.00       3.00       6.00        30.50       -     11.25     2.00  55.75
  pp 7    7, 15            3.00       3.00       6.00        28.00    3.90     11.25     2.00  57.15

communication in a step, of the busiest rank
  axis  collective      ranks  link     count       GiB    time  exposed
  dp    all_gather          8  network     70     22.50  1.50 s   500 ms
  tp    reduce_scatter      8  NVLink   8,064  1,000.00  4.00 s   2.00 s
  pp    send                2  network    128     16.00  400 ms        -

a step, predicted: 16.0 s
  computing                    12.0 s   75.0%
  dp communication, exposed    500 ms    3.1%
  tp communication, exposed    2.00 s   12.5%
  pipeline bubble              1.40 s    8.8%
  update                       100 ms    0.6%

throughput  256 tokens/s a GPU, 131,072 in all
            10 to 90 %: 205 to 384 tokens/s a GPU, by 75 published rows of dense models on Hopper (7 sources)
MFU         45.7%, 672.1 TFLOP/s a GPU (full attention)
fits        yes: the fullest rank takes 57.25 of 75.00 GiB, 17.75 GiB left
            10 to 90 %: 45.80 to 85.88 GiB, by 52 published rows of dense models (7 sources); it may not fit
budget      3,000 steps, 6.291 B tokens: 6,827 GPU-hours, 13.3 h on 512 x H100 SXM
            4,062 kWh of the GPUs alone (85% of 700 W each)

notes
  buckets of c10d's reducer are not counted
"""
    )


def test_dollars_are_the_users_and_energy_is_that_of_the_gpus() -> None:
    plan = plan_405b()
    assert plan.gpu_hours is not None and plan.dollars is None
    cluster = replace(plan.job.cluster, dollars_per_gpu_hour=2.5, pue=1.2)
    priced = replace(plan, job=replace(plan.job, cluster=cluster))
    assert priced.dollars == pytest.approx(2.5 * plan.gpu_hours)
    assert priced.kwh == pytest.approx(1.2 * 0.85 * 0.7 * plan.gpu_hours)
    line = "$17,067 at $2.5 a GPU-hour; 4,874 kWh of the GPUs alone (85% of 700 W each x PUE 1.2)\n"
    assert f"512 x H100 SXM\n            {line}" in render(priced)
    # Without its hours, or on CPUs, nothing has a price.
    assert (replace(priced, speed=None).dollars, replace(priced, accelerator=None).dollars) == (None, None)


def test_points_and_searches_have_their_price(capsys: pytest.CaptureFixture[str]) -> None:
    job = [
        "model=llama3_debug",
        "cluster=slurm_h100",
        "cluster.dollars_per_gpu_hour=2",
        "parallelism.dp_shard=8",
    ]
    assert run("-m", "--json", *job, "training.steps=100,200") == 0
    data = json.loads(capsys.readouterr().out)
    hours, prices = ([each[name] for each in data["points"]] for name in ("gpu_hours", "dollars"))
    assert prices == pytest.approx([2 * each for each in hours])
    assert data["total"]["dollars"] == pytest.approx(sum(prices))
    run("-m", *job, "training.steps=10000,20000")
    head, first, *_, total, _ = capsys.readouterr().out.splitlines()
    assert head.split()[-3:] == ["GPU-hours", "price", "kWh"] and re.search(r"\$\d+\.\d\d ", first)
    assert re.search(r"GPU-hours, \$[\d.]+, [\d.]+ kWh", total)
    # With a price it is shown for points of one size too.
    run("-m", *job, "cluster.dollars_per_gpu_hour=2,3")
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[-3:] == ["GPU-hours", "price", "kWh"] and len(rows) == 2
    # A point without a price leaves the total unknown.
    run("-m", "--json", *job, "cluster.dollars_per_gpu_hour=2,null", "training.steps=100")
    assert json.loads(capsys.readouterr().out)["total"]["dollars"] is None


def test_a_rank_too_full() -> None:
    plan = plan_405b()
    text = render(replace(plan, memory_limit=50 * GIB))
    assert "fits        NO: the fullest rank takes 57.25 of 50.00 GiB, 7.25 GiB too many\n" in text


def test_unknown_hardware_has_memory_and_no_time() -> None:
    job = compose_job(["model=llama3_tiny"], config_name="plan", schema=PlanJob).plain
    kinds = dict.fromkeys(KINDS, 0.0) | {"parameters": 0.001 * GIB, "runtime": 0.25 * GIB}
    plan = Plan(job, account(job.model, 256), [1e6], [RankMemory(0, (0,), kinds)], None, [], None, None)
    text = render(plan)
    assert "job         llama3_tiny on 1 rank: legal\nmesh        1 rank\n" in text
    assert "  ranks  parameters  runtime  peak\n  all         0.001     0.25  0.25\n" in text
    assert "\ntime    unknown hardware; set cluster.accelerator to one of A100 SXM 40GB, " in text
    on_cpu = make_plan(compose_job(["model=llama3_tiny", "cluster=slurm_h100", "cluster.device=cpu"]))
    assert "\ntime    unknown: the plan has no times of CPUs\n" in render(on_cpu)
    assert "\nfits    unknown hardware; the fullest rank takes 0.25 GiB\n" in text
    assert "\nbudget  100 steps, 204,800 tokens\n" in text
    assert not any(word in text for word in ("MFU", "tokens/s", "communication", "schedule", "hours"))


def test_json_has_all_of_it() -> None:
    plan = plan_405b()
    plain = loads(dumps(as_dict(plan)))
    assert plain["job"]["id"] == plan.job.id and plain["job"]["model"]["name"] == "llama3_405b"
    assert plain["mesh"] == {"pp": 8, "dp_replicate": 1, "dp_shard": 8, "cp": 1, "tp": 8, "ep": 1}
    assert plain["batch"] == {"global": 256, "local": 32, "accumulation_steps": 1, "microbatches": 32}
    assert (plain["parameters"], plain["active_parameters"]) == (405853388800, 405853388800)
    assert [rank["peak"] for rank in plain["memory"]] == [rank.peak for rank in plan.memory]
    assert plain["memory"][0]["kinds"]["activations"] == 32 * GIB
    assert (plain["memory_peak"], plain["memory_limit"], plain["fits"]) == (plan.peak, 75 * GIB, True)
    assert plain["traffic"][0]["axis"] == "dp" and len(plain["traffic"]) == 3
    assert sum(plain["speed"]["parts"].values()) == plain["speed"]["step_seconds"] == 16.0
    assert plain["speed"]["timeline"] == [
        [{"stage": 0, "kind": "F", "microbatch": 0, "start": 0.0, "end": 1.0}]
    ]
    tokens = 3000 * 256 * 8192
    hours = 3000 * 16 * 512 / 3600
    assert plain["budget"].pop("kwh") == pytest.approx(hours * 0.7 * 0.85)
    assert plain["budget"] == {"steps": 3000, "tokens": tokens, "gpu_hours": hours, "dollars": None}
    assert plain["notes"] == plan.notes


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, ""), (0.0, "-"), (3e-7, "0.30 us"), (4.2e-5, "42.0 us"), (0.0123, "12.3 ms")),
        *((0.9994, "999 ms"), (0.9996, "1.00 s"), (9.999, "10.0 s"), (1234.4, "1,234 s")),
    ],
)
def test_seconds(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_units() -> None:
    assert [counted(n) for n in (999, 31457280, 405.85e9, 2e13)] == ["999", "31.46 M", "405.9 B", "20 T"]
    assert [gib(n * GIB) for n in (0, 0.0004, 0.5, 1234.5)] == ["-", "0.0004", "0.50", "1,234.50"]
    assert [figure(n) for n in (0.01234, 12.34, 99.97, 12345)] == ["0.0123", "12.3", "100", "12,345"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["top=0"], "^top=0: must be at least 1"),
        (["search=true", "rehearse=true"], "^rehearse=true: cannot be .*would work: search=false"),
        (["sweep_file=a.yaml"], "^sweep_file=a.yaml: is used by a search only; would work: search=true"),
        (["search=true", "sweep_file=a.txt"], r"^sweep_file=a.txt: must end in \.yaml"),
        (["picture=plan.pdf"], r"^picture=plan.pdf: must end in \.png; would work: plan.png"),
        (
            ["calibrate=runs", "search=true"],
            "^calibrate=runs: .*plans no job; would work: calibrate",
        ),
        (["calibrate=runs", "calibration=nowhere/c.json"], "^calibration=nowhere/c.json: there is no folder"),
        (["picture=nowhere/plan.png"], "^picture=nowhere/plan.png: there is no folder nowhere"),
    ],
)
def test_wrong_fields(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_job(overrides, config_name="plan", schema=PlanJob)


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    without = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "harness", "plan", *arguments],
        cwd=ROOT,
        env={**without, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
    )


SMALL = ["model=llama3_debug", "cluster=slurm_h100", "training.global_batch_size=8"]


def test_a_job_from_the_command_line() -> None:
    done = command(*SMALL, "parallelism=fsdp_tp")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("job         llama3_debug on 4 x H100 SXM: legal\n")
    assert "mesh        dp_shard 2 x tp 2\n" in done.stdout
    for block in (
        "memory at its peak",
        "communication in a step",
        "a step, predicted",
        "budget      100 steps",
    ):
        assert f"\n{block}" in done.stdout
    assert "fits        yes" in done.stdout


def test_json_from_the_command_line_and_a_picture(first: Any, tmp_path: Path) -> None:
    """The flag may be at any position; the picture of a pipeline has a timeline."""
    picture = tmp_path / "plan.png"
    pipeline = ["parallelism=tp_pp", f"picture={picture}"]
    done = command(SMALL[0], "--json", *SMALL[1:], *pipeline, XDG_CACHE_HOME=str(first[0]))
    assert (done.returncode, done.stderr) == (0, "")
    plain = loads(done.stdout)
    assert (plain["world_size"], plain["accelerator"], len(plain["memory"])) == (4, "H100 SXM", 2)
    assert plain["memory"][0]["kinds"].keys() == set(KINDS)
    parts = plain["speed"]["parts"]
    assert sum(parts.values()) == pytest.approx(plain["speed"]["step_seconds"]) and parts["bubble"] > 0
    assert len(plain["speed"]["timeline"]) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_impossible_job_is_one_line() -> None:
    done = command(*SMALL, "parallelism.tp=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: parallelism.tp=3: must divide ") and done.stderr.count("\n") == 1


def test_help_shows_planner_options() -> None:
    done = command("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "without a GPU" in done.stdout and "--json" in done.stdout and "search: false" in done.stdout


def test_not_under_torchrun() -> None:
    done = command(*SMALL, RANK="0", WORLD_SIZE="1")
    assert done.returncode == 2 and "start it without torchrun" in done.stderr


WITH_MODULES = (
    "import sys; from harness.tools.plan.verb import VERB\n"
    "try: VERB.main()\n"
    "except SystemExit as end: print(end.code, 'torch' in sys.modules, file=sys.stderr)"
)


def planned(cache: Path, *overrides: str) -> tuple[str, str]:
    """Return the exit code and whether torch was imported, and the output of a plan."""
    done = subprocess.run(
        [sys.executable, "-c", WITH_MODULES, *SMALL, *overrides],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    return done.stderr.strip(), done.stdout


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, str]]:
    """The cache folder, and the first plan of a schedule."""
    cache = tmp_path_factory.mktemp("cache")
    return cache, planned(cache, "parallelism=pp")


def test_torch_is_imported_for_the_first_plan_of_a_schedule_only(first: Any, tmp_path: Path) -> None:
    """Importing torch takes longer than a plan; the second plan is the same."""
    cache, (status, text) = first
    assert status == "0 True"
    assert planned(cache, "parallelism=pp") == ("0 False", text)
    assert planned(tmp_path, "parallelism=fsdp")[0] == "0 False"
    assert not any(tmp_path.iterdir())


def test_a_damaged_order_is_not_used(first: Any) -> None:
    [kept] = first[0].rglob("1F1B-2-2-8")
    made = _read(kept)
    assert made is not None
    assert pipeline_order(ParallelismConfig(pp=2), 6, 8) == [
        [Action(int(cell[0]), cell[1], int(cell[2:])) for cell in line.split()] for line in made.splitlines()
    ]
    whole, swapped = kept.read_text(), made.replace("0F0 0F1", "0F1 0F0")
    assert swapped != made
    for text in ("", "0F0", whole[:-4], whole.replace("0B7", "0B?"), whole.replace(made, swapped)):
        kept.with_name("part").write_text(text)
        assert _read(kept.with_name("part")) is None
    assert _read(kept.with_name("none")) is None


def test_phases_of_scheduled_sizes() -> None:
    """Every phase has its own time, which is that of a job of its sizes; the budget adds them up."""
    sizes = (
        "schedule.batch_size=[{until_step:1000,sequences:128}]",
        "schedule.seq_len=[{until_step:1500,tokens:2048}]",
    )
    made = make_plan(compose_job([*JOB_405B, *sizes], config_name="plan", schema=PlanJob).plain)
    phases = [(each.first_step, each.steps, each.batch_size, each.seq_len) for each in made.phases]
    assert phases == [(1, 1000, 128, 2048), (1001, 500, 256, 2048), (1501, 1500, 256, 8192)]
    tokens = 1000 * 128 * 2048 + 500 * 256 * 2048 + 1500 * 256 * 8192
    assert as_dict(made)["budget"]["tokens"] == tokens
    assert [each["first_step"] for each in as_dict(made)["phases"]] == [1, 1001, 1501]
    alone = make_plan(
        compose_job(
            [*JOB_405B, "training.seq_len=2048", "training.local_batch_size=16"],
            config_name="plan",
            schema=PlanJob,
        ).plain
    )
    assert made.speed is not None and alone.speed is not None and made.gpu_hours is not None
    assert made.phases[1].step_seconds == alone.speed.step_seconds
    assert made.phases[2].step_seconds == made.speed.step_seconds
    seconds_of_all = sum(each.steps * (each.step_seconds or 0) for each in made.phases)
    assert made.gpu_hours == pytest.approx(seconds_of_all * 512 / 3600)
    assert "  1,501-3,000        256        8,192" in render(made)
    whole = make_plan(compose_job(JOB_405B, config_name="plan", schema=PlanJob).plain)
    assert whole.phases == [] and "phases" not in render(whole)


def test_points_are_compared_in_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A point that breaks a rule has it; values are those of the plans alone."""
    job = ["model=llama3_8b", "cluster=slurm_h100", "data=synthetic", "precision=bf16"]
    run("-m", *job, "parallelism.tp=1,3,8")
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["point", "layout", "GiB", "step", "tokens/s", "each", "MFU", "fits"]
    assert [row.split()[0] for row in rows] == [f"parallelism.tp={tp}" for tp in (1, 3, 8)]
    assert rows[1].split(maxsplit=1)[1].startswith("illegal: parallelism.tp=3: must divide model.n_heads=32")
    alone = make_plan(compose_job([*job, "parallelism.tp=8"]))
    assert alone.speed is not None
    assert figure(alone.speed.tokens_per_second_per_rank) in rows[2] and gib(alone.peak) in rows[2]
    run("-m", "--json", *job, "parallelism.tp=1,3,8")
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["legal"] for point in points] == [True, False, True]
    assert points[2]["step_seconds"] == alone.speed.step_seconds


def test_a_ladder_is_priced_before_it_starts(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of different sizes have their cost in the table, with the total of those that are legal."""
    job = ["sweep=ladder", "model=llama3_8b", "cluster=slurm_h100", "data=synthetic", "precision=bf16"]
    run("-m", *job, "scale.parameters=100M,1000,1B")
    head, small, illegal, large, total, flops = capsys.readouterr().out.splitlines()
    assert head.split()[-6:] == ["parameters", "non-emb.", "tokens", "FLOPs", "GPU-hours", "kWh"]
    assert "illegal: scale.parameters=1000: no model" in illegal
    alone = make_plan(compose_job([*job[1:], "scale.parameters=1B", "scale.tokens_per_parameter=20",
                                   "scale.warmup_ratio=0.02"]))  # fmt: skip
    assert alone.gpu_hours is not None
    hours, kwh = (float(cell.replace(",", "")) for cell in large.split()[-2:])
    assert hours == pytest.approx(alone.gpu_hours, rel=0.01)
    assert kwh == pytest.approx(hours * 0.7 * 0.85, rel=0.01)
    assert counted(alone.accounting.parameters) in large
    both = hours + float(small.split()[-2].replace(",", ""))
    found = re.fullmatch(
        r"all 2: .* ([\d.,]+) GPU-hours, ([\d.,]+) kWh of the GPUs alone \(85% of .*\)", total
    )
    assert found is not None
    amounts = [float(amount.replace(",", "")) for amount in found.groups()]
    assert amounts == pytest.approx([both, both * 0.7 * 0.85], rel=0.01)
    assert flops.startswith("FLOPs: those of MFU")
    run("-m", "--json", *job, "scale.parameters=100M,1B")
    found = json.loads(capsys.readouterr().out)
    assert found["total"]["flops"] == sum(point["flops"] for point in found["points"])
    size = found["points"][1]["non_embedding_parameters"]
    assert found["points"][1]["tokens"] == pytest.approx(20 * size, rel=1e-3)


@pytest.mark.parametrize(
    ("typed", "error"),
    [
        ("parallelism.tp=1,2 search=true", "search=true: works on one job, and -m has several"),
        ("model=llama3_8b parallelism.tp=3,5", "parallelism.tp=3: must divide model.n_heads=32"),
    ],
)
def test_mistakes_of_a_comparison(typed: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-m", *typed.split()) == EXIT_USER
    assert capsys.readouterr().err.startswith(f"error: {error}")
