"""harness plan: every line of its output, JSON, one line per mistake, torch only for pipelines."""

import dataclasses
import json
from dataclasses import replace

import pytest
from cases import words
from processes import python

from harness.compose.composer import compose_job
from harness.compose.verb import guarded
from harness.config.registry import Registry
from harness.model.accounting import account
from harness.tools.plan import costs, evidence
from harness.tools.plan.costs import Costs, costs_of
from harness.tools.plan.make import make_plan
from harness.tools.plan.plan import KINDS, PARTS, Action, Plan, RankMemory, Speed, Traffic
from harness.tools.plan.render import as_dict, render
from harness.tools.plan.verb import VERB
from harness.util.encoding import dumps, loads
from harness.util.errors import EXIT_USER, UserError
from harness.util.hardware import ACCELERATORS
from harness.util.words import counted, dollars, figure, gib, seconds

GIB = 2**30
JOB_405B = words("""
    model=llama3_405b parallelism=fsdp_tp_pp parallelism.tp=8 parallelism.pp=8
    parallelism.dp_shard=8 parallelism.pp_schedule=Interleaved1F1B cluster=slurm_h100
    training.global_batch_size=256 training.seq_len=8192 training.steps=3000
    precision=float8_tensorwise compile=on parallelism.async_tp=true activation_checkpoint=full
""")


TIMES = {"compute": 12.0, "dp": 0.5, "tp": 2.0, "bubble": 1.4, "optimizer": 0.1}
PARTS_405B = dict.fromkeys(PARTS, 0.0) | TIMES


def run(*arguments):
    """Run the command in this process; return its exit code."""
    return guarded(lambda: VERB.run_line(arguments))


def memory(rank, **kinds):
    return RankMemory(rank, (rank, rank + 8), {kind: kinds.get(kind, 0.0) * GIB for kind in KINDS})


def plan_405b():
    job = compose_job(JOB_405B)
    held = {
        "parameters": 3.0,
        "gradients": 3.0,
        "optimizer": 6.0,
        "gathered": 11.25,
        "runtime": 2.0,
    }
    held["activations"] = 30.5
    ranks = [memory(rank, **held) for rank in range(8)]
    ranks[0] = memory(0, **held | {"activations": 32.0})
    ranks[7] = memory(7, **held | {"activations": 28.0, "logits": 3.9})
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
        speed=Speed(
            16.0, PARTS_405B, 256 * 8192 / 16 / 512, 0.4567, [[Action(0, "F", 0, 0.0, 1.0)]]
        ),
        accelerator=ACCELERATORS["H100 SXM"],
        notes=["buckets of c10d's reducer are not counted"],
    )


def test_a_default_batch_fits_the_layout_of_a_plan(capfd):
    layout = words("model=llama3_tiny parallelism=fsdp cluster.ranks=16 cluster.device=cpu")
    planned = compose_job(layout, config_name="plan", schema=VERB.job)
    assert (planned.training.global_batch_size, planned.training.local_batch_size) == (16, 1)
    assert (
        "NOTE training.global_batch_size=16 instead of 8: 1 row for each" in capfd.readouterr().err
    )
    for typed in ([*layout, "training.global_batch_size=8"], [*layout, "experiment=quickstart"]):
        with pytest.raises(UserError, match=r"=[48]: must have a row for each"):
            compose_job(typed, config_name="plan", schema=VERB.job)


def test_the_fullest_rank_is_planned():
    typed = words("model=llama3_tiny cluster=slurm_h100 parallelism=fsdp cluster.ranks=7")
    uneven, even = (
        make_plan(compose_job([*typed, f"training.global_batch_size={size}"]))
        for size in (1024, 1029)
    )
    assert uneven.peak == even.peak
    assert uneven.speed.step_seconds == even.speed.step_seconds
    rates = [plan.speed.tokens_per_second_per_rank for plan in (uneven, even)]
    assert rates[0] / rates[1] == pytest.approx(1024 / 1029)
    says = "1,024 sequences on 7 data-parallel ranks x 147 rows: 0.5% of the rows are empty"
    assert uneven.notes == [says, *even.notes]


def test_every_line(monkeypatch):
    rows = {
        "throughput": {"dense models on Hopper": (0.8, 1.5, "75 published rows")},
        "memory": {"dense models": (0.8, 1.5, "52 published rows")},
    }
    monkeypatch.setattr(evidence, "EVIDENCE", rows)
    assert (
        render(plan_405b())
        == """\
job         llama3_405b on 512 x H100 SXM, 64 nodes of 8: legal
mesh        pp 8 x dp_shard 8 x tp 8
batch       256 x 8,192 = 2.097 M tokens per step; 32 on each data-parallel rank, as 32 microbatches of 1
schedule    Interleaved1F1B, 16 stages (2 on each rank)
execution   activation checkpointing full, compiled, linears in float8_tensorwise
parameters  405.9 B in all, 405.9 B active, 790 M to 800 M per rank
FLOPs       2,625 GFLOP per token (full attention), 2,524 (causal half)

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

throughput  256 tokens/s per GPU, 131,072 in all
            10 to 90 %: 205 to 384 tokens/s per GPU, by 75 published rows
MFU         45.7%, 672.1 TFLOP/s per GPU (full attention)
fits        yes: the fullest rank takes 57.25 of 75.00 GiB, 17.75 GiB left
            10 to 90 %: 45.80 to 85.88 GiB, by 52 published rows; it may not fit
budget      3,000 steps, 6.291 B tokens: 6,827 GPU-hours, 13.3 h on 512 x H100 SXM

notes
  buckets of c10d's reducer are not counted
"""
    )


def test_dollars_are_the_users():
    plan = plan_405b()
    assert plan.gpu_hours is not None and plan.dollars is None
    cluster = replace(plan.job.cluster, dollars_per_gpu_hour=2.5)
    priced = replace(plan, job=replace(plan.job, cluster=cluster), memory_limit=50 * GIB)
    assert priced.dollars == pytest.approx(2.5 * plan.gpu_hours)
    line = "$17,067 at $2.5 per GPU-hour\n"
    assert f"512 x H100 SXM\n            {line}" in render(priced)
    assert "NO: the fullest rank takes 57.25 of 50.00 GiB, 7.25 GiB too many\n" in render(priced)
    # Without its hours, or on CPUs, nothing has a price.
    assert (replace(priced, speed=None).dollars, replace(priced, accelerator=None).dollars) == (
        None,
        None,
    )


def test_unknown_hardware_has_memory_and_no_time():
    job = compose_job(["model=llama3_tiny"])
    kinds = dict.fromkeys(KINDS, 0.0) | {"parameters": 0.001 * GIB, "runtime": 0.25 * GIB}
    plan = Plan(
        job, account(job.model, 256), [1e6], [RankMemory(0, (0,), kinds)], None, [], None, None
    )
    text = render(plan)
    assert "1 rank: legal\nmesh        1 rank\n" in text
    assert "\n\ntime    unknown hardware; would work: cluster=slurm_h100, or" in text
    assert "\nfits    unknown hardware; the fullest rank takes" in text
    assert text.endswith("GiB\nbudget  100 steps, 204,800 tokens\n")
    on_cpu = make_plan(
        compose_job(["model=llama3_tiny", "cluster=slurm_h100", "cluster.device=cpu"])
    )
    assert "\ntime    unknown: the plan has no times of CPUs\n" in render(on_cpu)


def test_json_has_all_of_it():
    plan = plan_405b()
    plain = loads(dumps(as_dict(plan)))
    hours = 3000 * 16 * 512 / 3600
    job, bands, memory = (plain.pop(name) for name in ("job", "bands", "memory"))
    assert (job["id"], job["model"]["name"]) == (plan.job.id, "llama3_405b")
    assert bands["throughput"]["evidence"].endswith("of dense models on Hopper (7 sources)")
    assert [rank["peak"] for rank in memory] == [rank.peak for rank in plan.memory]
    assert (memory[7]["stages"], memory[0]["kinds"]["activations"]) == ([7, 15], 32 * GIB)
    assert dataclasses.asdict(plan.accounting).items() <= plain.items()
    assert plain["traffic"] == [dataclasses.asdict(each) for each in plan.traffic]
    assert (plain["legal"], plain["fits"], plain["memory_limit"]) == (True, True, 75 * GIB)
    assert plain["mesh"]["tp"] == 8 and plain["batch"]["accumulation_steps"] == 1
    assert plain["speed"]["parts"] == PARTS_405B and plain["accelerator"] == "H100 SXM"
    timeline = [[{"stage": 0, "kind": "F", "microbatch": 0, "start": 0.0, "end": 1.0}]]
    assert plain["speed"]["timeline"] == timeline
    assert (plain["budget"]["gpu_hours"], plain["budget"]["dollars"]) == (hours, None)


def test_units():
    times = (None, 0.0, 3e-7, 4.2e-5, 0.0123, 0.9994, 0.9996, 9.999, 1234.4)
    texts = ["", "-", "0.30 us", "42.0 us", "12.3 ms", "999 ms", "1.00 s", "10.0 s", "1,234 s"]
    assert [seconds(value) for value in times] == texts
    assert [counted(n) for n in (999, 31457280, 405.85e9, 2e13)] == [
        "999",
        "31.46 M",
        "405.9 B",
        "20 T",
    ]
    assert [gib(n * GIB) for n in (0, 0.0004, 0.5, 1234.5)] == ["-", "0.0004", "0.50", "1,234.50"]
    assert [figure(n) for n in (0.01234, 12.34, 99.97, 12345)] == [
        "0.0123",
        "12.3",
        "100",
        "12,345",
    ]


SMALL = ["model=llama3_debug", "cluster=slurm_h100", "training.global_batch_size=8"]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return cache, planned(cache, "parallelism=pp")


def test_json_from_the_command_line_and_a_picture(first, tmp_path):
    picture = tmp_path / "plan.png"
    status, text = planned(first[0], "--json", "parallelism=tp_pp", f"picture={picture}")
    plain = loads(text)
    assert status == "0 False" and picture.read_bytes().startswith(b"\x89PNG")
    assert (plain["world_size"], plain["accelerator"], len(plain["memory"])) == (4, "H100 SXM", 2)
    assert plain["memory"][0]["kinds"].keys() == set(KINDS)
    parts = plain["speed"]["parts"]
    assert (
        sum(parts.values()) == pytest.approx(plain["speed"]["step_seconds"]) and parts["bubble"] > 0
    )
    assert len(plain["speed"]["timeline"]) == 2


def test_what_the_command_refuses(capsys, monkeypatch):
    for typed, says in (
        ([*SMALL, "parallelism.tp=3"], "parallelism.tp=3: must divide "),
        (
            ["-m", "parallelism.tp=1,2", "search=true"],
            "search=true: works on one job, and -m has several",
        ),
        (
            ["-m", "model=llama3_8b", "parallelism.tp=3,5"],
            "parallelism.tp=3: must divide model.n_heads=32",
        ),
    ):
        assert run(*typed) == EXIT_USER
        assert capsys.readouterr().err.startswith(f"error: {says}")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    assert run(*SMALL) == EXIT_USER and "start it without torchrun" in capsys.readouterr().err


def planned(cache, *overrides):
    """Return the exit code and whether torch was imported, and the output of a plan."""
    code = (
        "import sys; from harness.tools.plan.verb import VERB\n"
        "try: VERB.main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = python("-c", code, *SMALL, *overrides, XDG_CACHE_HOME=str(cache))
    return done.stderr.strip(), done.stdout


def test_torch_is_imported_for_the_first_plan_of_a_schedule_only(first, tmp_path):
    cache, (status, text) = first
    assert status == "0 True"
    assert planned(cache, "parallelism=pp") == ("0 False", text)
    assert planned(tmp_path, "parallelism=fsdp")[0] == "0 False"
    assert not any(tmp_path.iterdir())


def test_phases_of_scheduled_sizes():
    """Every phase has its own time, which is that of a job of its sizes; the budget adds them up."""
    batches = "schedule.batch_size=[{until_step:1000,sequences:128}]"
    lengths = "schedule.seq_len=[{until_step:1500,tokens:2048}]"
    made = make_plan(compose_job([*JOB_405B, batches, lengths]))
    phases = [(each.first_step, each.steps, each.batch_size, each.seq_len) for each in made.phases]
    assert phases == [(1, 1000, 128, 2048), (1001, 500, 256, 2048), (1501, 1500, 256, 8192)]
    plain = as_dict(made)
    assert plain["budget"]["tokens"] == sum(
        steps * size * length for _, steps, size, length in phases
    )
    assert [each["first_step"] for each in plain["phases"]] == [1, 1001, 1501]
    alone = make_plan(
        compose_job([*JOB_405B, "training.seq_len=2048", "training.local_batch_size=16"])
    )
    assert made.speed is not None and alone.speed is not None
    assert made.phases[1].step_seconds == alone.speed.step_seconds
    assert made.phases[2].step_seconds == made.speed.step_seconds
    seconds_of_all = sum(each.steps * (each.step_seconds or 0) for each in made.phases)
    assert made.gpu_hours == pytest.approx(seconds_of_all * 512 / 3600)
    assert "  1,501-3,000        256        8,192" in render(made)
    assert "phases" not in render(plan_405b())


def table_of(capsys, *typed):
    capsys.readouterr()
    assert run("-m", *typed) == 0
    lines = capsys.readouterr().out.splitlines()
    run("-m", "--json", *typed)
    return lines, json.loads(capsys.readouterr().out)


LARGE = words("model=llama3_8b cluster=slurm_h100 data=synthetic precision=bf16")


def test_points_are_compared_in_one_table(capsys):
    (head, *rows), data = table_of(capsys, *LARGE, "parallelism.tp=1,3,8")
    assert head.split() == ["point", "layout", "GiB", "step", "tokens/s", "each", "MFU", "fits"]
    assert [row.split()[0] for row in rows] == [f"parallelism.tp={tp}" for tp in (1, 3, 8)]
    assert (
        rows[1]
        .split(maxsplit=1)[1]
        .startswith("illegal: parallelism.tp=3: must divide model.n_heads=32")
    )
    alone = make_plan(compose_job([*LARGE, "parallelism.tp=8"]))
    assert alone.speed is not None
    assert figure(alone.speed.tokens_per_second_per_rank) in rows[2] and gib(alone.peak) in rows[2]
    assert [point["legal"] for point in data["points"]] == [True, False, True]
    assert data["points"][2]["step_seconds"] == alone.speed.step_seconds


def test_a_ladder_is_priced_before_it_starts(capsys):
    sizes = ["sweep=ladder", "scale.parameters=100M,1000,1B", "cluster.dollars_per_gpu_hour=2"]
    (head, _, illegal, large, total, flops), data = table_of(capsys, *sizes, *LARGE)
    columns = ["parameters", "non-emb.", "tokens", "FLOPs", "GPU-hours", "price"]
    assert head.split()[-6:] == columns and "illegal: scale.parameters=1000: no model" in illegal
    scale = ["scale.parameters=1B", "scale.tokens_per_parameter=20", "scale.warmup_ratio=0.02"]
    alone = make_plan(compose_job([*LARGE, *scale]))
    small, _, last = data["points"]
    assert alone.gpu_hours is not None and last["gpu_hours"] == alone.gpu_hours
    assert last["tokens"] == pytest.approx(20 * last["non_embedding_parameters"], rel=1e-3)
    shown = [
        counted(alone.accounting.parameters),
        figure(alone.gpu_hours),
        dollars(2 * alone.gpu_hours),
    ]
    assert all(text in large for text in shown)
    sums = data["total"]
    for name in ("tokens", "flops", "gpu_hours", "dollars"):
        assert sums[name] == small[name] + last[name], name
    assert sums["dollars"] == pytest.approx(2 * sums["gpu_hours"])
    hours, price = figure(sums["gpu_hours"]), dollars(sums["dollars"])
    assert total.startswith("all 2: ")
    assert f"{hours} GPU-hours, {price}" in total
    assert flops.startswith("FLOPs: those of MFU")
    # A point without a price leaves that of all unknown.
    (head, *_), data = table_of(capsys, *SMALL, "cluster.dollars_per_gpu_hour=2,null")
    assert head.split()[-2:] == ["GPU-hours", "price"] and data["total"]["dollars"] is None


def test_costs_without_a_method_are_unknown(monkeypatch):
    class Partial(Costs):
        sample = "page"

    own = Registry("costs", {"decoder": Partial}, field="model.architecture")
    monkeypatch.setattr(costs, "COSTS", own)
    with pytest.raises(
        UserError, match=r"^model.architecture=decoder: memory and time are unknown: Partial"
    ):
        costs_of(compose_job([]).model)
