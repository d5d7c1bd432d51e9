"""The search: the complete space, the best points by brute force, and a sweep that measures them."""

import itertools
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import prod

import pytest
from cases import rows, texts

from harness.compose.composer import compose_job, compose_points
from harness.compose.resolve import resolve
from harness.config.job import differing_numerics
from harness.config.parallelism import AXES
from harness.config.pipeline import num_stages
from harness.tools.plan import search as search_module
from harness.tools.plan import search_result as found_module
from harness.tools.plan.config import PlanJob
from harness.tools.plan.constants import Calibration, Constants
from harness.tools.plan.evidence import RESOLUTION
from harness.tools.plan.make import make_plan
from harness.tools.plan.plan import Resolution
from harness.tools.plan.search import search
from harness.tools.plan.space import SCHEDULES_TRIED, Space
from harness.tools.plan.verb import plan
from harness.util.encoding import dumps, loads
from harness.util.errors import ConfigError, UserError

RANKS = ["cluster=slurm_h100", "cluster.ranks=8", "training.global_batch_size=8"]
EIGHT = ["model=llama3_debug", *RANKS]
# Small models wait for collectives more than they compute, less so on long sequences.
LONG = [*EIGHT, "training.seq_len=2048", "precision=bf16"]
COMPILED = [*EIGHT, "training.seq_len=1024", "precision=float8_tensorwise", "compile=on"]
# Four ranks have all axes, at most two of them at a time.
BRUTE = [*LONG, "cluster.ranks=4", "parallelism.cp_method=ring"]
TIGHT = 0.45
"""GiB that some of its plans need and some do not."""


def space_of(*overrides):
    job = compose_job(["search=true", *overrides], config_name="plan", schema=PlanJob)
    return Space.of(job.plain, ["search=true", *overrides])


def points_of(space):
    return [
        point for layout in space.layouts() for group in space.groups(*layout) for point in group
    ]


def legal_points(space):
    legal = []
    for point in points_of(space):
        with suppress(ConfigError):
            point.job(space.base)
            legal.append(point)
    return legal


def every_job(base, ranks):
    """Every legal job of these ranks, by brute force and without the search's code."""
    for degrees in itertools.product((1, 2, 4, 8), repeat=len(AXES)):
        of = dict(zip(AXES, degrees, strict=True))
        if prod(degrees) != ranks:
            continue
        pipelined = of["pp"] > 1
        for local, size, mode, schedule, layers in itertools.product(
            (1, 2, 4, 8),
            (1, 2, 4, 8) if pipelined else [1],
            ("none", "selective_op", "full"),
            SCHEDULES_TRIED if pipelined else ["1F1B"],
            [None, *range(1, 6)] if pipelined else [None],
        ):
            share = base.global_batch_size // (of["dp_replicate"] * of["dp_shard"])
            if share % local or (pipelined and local != share):
                continue  # no rows are empty; a pipeline is filled and drained once per step
            moved = of | {
                "pp_microbatch_size": size,
                "pp_schedule": schedule,
                "pp_layers_per_stage": layers,
            }
            try:
                job = replace(
                    base,
                    parallelism=replace(base.parallelism, **moved),
                    training=replace(base.training, local_batch_size=local),
                    activation_checkpoint=replace(base.activation_checkpoint, mode=mode),
                )
                yield resolve(job, gpus=0)
            except ConfigError:
                continue


def key_of(job):
    """Fields in which jobs that run differently differ; layers per stage count by the number of stages."""
    layout = job.parallelism
    pipeline = (
        layout.pp_schedule,
        num_stages(layout, job.model.n_layers),
        layout.pp_microbatch_size,
    )
    degrees = tuple(layout.degrees.values())
    return (
        degrees,
        job.local_batch_size,
        job.activation_checkpoint.mode,
        pipeline if layout.pp > 1 else None,
    )


@cache
def planned(*overrides):
    space = space_of(*overrides)
    return space, {key_of(job): make_plan(job) for job in every_job(space.base, space.world)}


def test_the_space_is_every_job():
    space, plans = planned(*BRUTE)
    jobs = [point.job(space.base) for point in legal_points(space)]
    found = [key_of(job) for job in jobs]
    assert len(set(found)) == len(found) > 300
    assert set(found) == set(plans)
    assert not any(differing_numerics(space.base, job) for job in jobs)


def test_an_illegal_mesh_or_schedule_is_counted_and_never_shown():
    """With rules about float8's block length, compiled blocks and a schedule's microbatches."""
    space = space_of(*COMPILED, "training.seq_len=80")
    found = search(space, 10)
    legal = set(legal_points(space))
    assert found.illegal.keys() == {
        "training.seq_len",
        "training.local_batch_size",
        "parallelism.pp",
    }
    assert sum(found.illegal.values()) <= found.points - len(legal)
    assert legal.issuperset(each.point._replace(method=None) for each in found.fitting)


@pytest.mark.parametrize("model", ["llama3_debug", "gpt_oss_debug", "deepseek_v3_debug"])
def test_points_have_the_fastest_method_of_context_parallel(model):
    space = space_of(*LONG, f"model={model}", "parallelism.cp=4")
    for each in search(space, 3).best:
        layout = each.plan.job.parallelism
        assert f"parallelism.cp_method={layout.cp_method}" in each.point.overrides(layout)
        seconds = []
        for method in space.methods(each.point):
            of_method = make_plan(each.point._replace(method=method).job(space.base))
            assert of_method.speed is not None
            seconds.append(of_method.speed.step_seconds)
        assert len(seconds) > 1
        assert each.seconds <= (1 + RESOLUTION.off) * min(seconds)


@pytest.mark.parametrize(
    ("memory_gib", "headroom"), [(80.0, 0.0), (TIGHT, 0.0), (TIGHT / 0.8, 0.2)]
)
def test_the_best_are_those_of_brute_force(monkeypatch, memory_gib, headroom):
    space, plans = planned(*BRUTE)
    limit = memory_gib * 2**30
    plans = {key: replace(plan, memory_limit=limit) for key, plan in plans.items()}
    monkeypatch.setattr("harness.tools.plan.search.make_plan", lambda job, *_: plans[key_of(job)])
    monkeypatch.setattr(
        "harness.tools.plan.search.ranks_in_turn", lambda job, *_: plans[key_of(job)].memory
    )
    monkeypatch.setattr("harness.tools.plan.search.memory_limit", lambda job, device: limit)
    found = search(space, 10, headroom=headroom)
    fitting = [plan for plan in plans.values() if plan.peak <= (1 - headroom) * limit]
    assert len(fitting) == len(plans) if memory_gib == 80.0 else len(fitting) < len(plans)
    # Of those that are equally fast, the simplest one, then with the least memory.
    simplest = {each[0]: each for each in sorted(map(rank, fitting), reverse=True)}
    best = sorted(simplest.values())[:10]
    # An estimate may leave out a point, but none that the plan can tell from those that it found.
    times = [each.seconds for each in found.best]
    assert times == pytest.approx([each[0] for each in best], rel=RESOLUTION.off / 4)
    assert rank(found.best[0].plan) == best[0]
    # Slower ones are shown for their simplicity.
    close = [each for each in map(rank, fitting) if each[0] <= 1.095 * best[0][0]]
    assert rank(found.simplest.plan)[:2] == min(close, key=lambda each: (each[1], each[0]))[:2]
    for kind, axes in {"FSDP": {"dp_shard"}, "HSDP": {"dp_shard", "dp_replicate"}}.items():
        only = [plan for plan in fitting if split(plan) == axes]
        assert rank(found.fastest[kind].plan) == min(map(rank, only))
    # All points are counted, and most were not planned.
    illegal = sum(found.illegal.values())
    assert found.points == 10 + found.too_large + found.slower + illegal
    assert found.slower > 0
    assert found.too_large <= len(plans) - len(fitting)
    assert len(found.fitting) < len(plans) / 2


@pytest.mark.parametrize("batch", [9, 11])
def test_the_smallest_passes_may_be_illegal(batch):
    """Zero-bubble and interleaved schedules take whole rounds of microbatches."""
    assert search(
        space_of(*EIGHT, "parallelism.pp=4", f"training.global_batch_size={batch}"), 3
    ).best


def test_one_number_of_microbatches_may_be_legal(tmp_path):
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n")
    space = space_of(
        *EIGHT,
        "parallelism.pp=2",
        f"parallelism.pp_schedule_csv={file}",
        "training.global_batch_size=64",
    )
    best = search(space, 3).best
    assert {each.point.local_batch_size // each.point.microbatch_size for each in best} == {4}


def rank(plan):
    assert plan.speed is not None
    layout, pipelined = plan.job.parallelism, "pp" in split(plan)
    options = plan.job.activation_checkpoint.mode != "none"
    options += pipelined * (
        (layout.pp_schedule != "1F1B") + (layout.pp_layers_per_stage is not None)
    )
    return (
        float(f"{plan.speed.step_seconds:.3g}"),
        (len(split(plan)), pipelined, options),
        plan.peak,
    )


def split(plan):
    """The axes that split something."""
    return {axis for axis, degree in plan.job.parallelism.degrees.items() if degree > 1}


def test_options_of_a_format_are_legal_in_a_search():
    options = ["precision.enable_fsdp_float8_all_gather=true", "precision.filter_fqns=[output,wq]"]
    space = space_of(
        *COMPILED, *options, "parallelism.pp=1", "parallelism.cp=1", "parallelism.tp=1"
    )
    legal = legal_points(space)
    assert legal and all(point.job(space.base) for point in legal)
    with pytest.raises(
        ConfigError, match=r"^precision.enable_fsdp_float8_all_gather=true: needs one scale"
    ):
        search(space_of(*LONG, "precision=float8_rowwise", options[0]), 1)


@pytest.mark.parametrize(
    ("typed", "what", "expected"),
    # A layout fixes the axes that it does not use. Tensor parallel stays within a node.
    rows("""
        parallelism.tp=2                                                  tp                [2]
        parallelism.pp_schedule=GPipe                                     schedule          [null, GPipe]
        activation_checkpoint=full                                        mode              [full]
        training.local_batch_size=2                                       local_batch_size  [2]
        parallelism=fsdp training.global_batch_size=12                    local_batch_size  [1, 2]
        parallelism.dp_shard=-1 training.local_batch_size=null            pp                [1, 2, 4, 8]
        parallelism=fsdp_tp                                               pp                [1]
        parallelism=fsdp_tp                                               dp_replicate      [1]
        parallelism=fsdp_tp                                               cp                [1]
        parallelism=fsdp_tp                                               tp                [1, 2, 4, 8]
        cluster.ranks=null cluster.nodes=4 training.global_batch_size=32  tp                [1, 2, 4, 8]
        model=qwen3_moe_debug parallelism=fsdp                            ep                [1]
        model=qwen3_moe_debug parallelism.dp_shard=8                      ep                [1, 2, 4, 8]
        model=qwen3_moe_debug parallelism.dp_shard=2 parallelism.tp=2 parallelism.pp=2  ep  [1, 2, 4]
    """),
)
def test_the_points_of_a_space(typed, what, expected):
    space = space_of(*EIGHT, *typed.split())
    assert {getattr(point, what) for point in points_of(space)} == set(expected)
    assert space.world == (32 if "nodes=4" in typed else 8)


@pytest.mark.parametrize(
    ("typed", "message"),
    texts(r"""
        training.global_batch_size=null            training.global_batch_size=null: a search compares
        cluster=local cluster.ranks=null           cluster.ranks=null: a search needs the number of ranks
        model.n_kv_heads=3                         model.n_kv_heads=3: must divide
        parallelism.tp=3                           no layout has 8 ranks with .* \(parallelism.tp\); would
        training.seq_len=1000000                   none of .* to run 8 ranks is legal.*seq_len=1000000
        model=llama3_405b parallelism=fsdp_tp      none .* fits; the closest is at least [\d,.]+ GiB too large
        cluster.accelerator=null                   cluster.accelerator=null: a search ranks.*H100 SXM
        cluster.ranks=null cluster.nodes=2 cluster.network_gbps=null  cluster.network_gbps=null:
    """),
)
def test_searches_that_find_nothing(typed, message, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=f"^{message}"):
        search(space_of(*EIGHT, *typed.split()), 10)


def test_from_the_command_line_to_a_sweep(tmp_path):
    """The points of the sweep are the planned jobs; the simple ones are among them."""
    file = tmp_path / "own" / "sweep" / "found.yaml"
    job = [*LONG, "parallelism.cp=1", "parallelism.tp=1"]
    file.parent.mkdir(parents=True)
    typed = [*job, "top=2", "search=true", f"sweep_file={file}"]
    composed = compose_job(typed, config_name="plan", schema=PlanJob)
    result = plan(composed, typed)
    assert result.text.startswith(
        "llama3_debug on 8 x H100 SXM; 8 x 2,048 = 16,384 tokens per step\n"
    )
    simple = "simplest within the error: dp_replicate 8, no recompute: "
    kept = "kept as typed: parallelism.cp, parallelism.tp\n"
    for line in (kept, simple, "why the others lose\n", "  slower, or as fast and less simple\n"):
        assert line in result.text
    plain = loads(dumps(result.data))
    assert plain["sweep_file"] == str(file) and len(plain["best"]) == 2
    by_order = [
        *plain["best"],
        plain["simplest"],
        plain["fastest"]["FSDP"],
        plain["fastest"]["HSDP"],
    ]
    times = [each["plan"]["speed"]["step_seconds"] for each in by_order]
    assert times == sorted(times)
    points = compose_points([f"hydra.searchpath=[{file.parents[1]}]", "sweep=found", *job])
    jobs = [(each.job.id, each.job.name, each.reason) for each in points]
    assert jobs == [(each["plan"]["job"]["id"], "llama3_debug-search", "") for each in by_order]
    to_type = (
        f"to measure the 5: {file}\n  harness train -m .*\nto train the simplest:\n  "
        "harness train (.*)\n"
    )
    [train] = re.findall(to_type, result.text)
    assert compose_job(train.split()).id == plain["simplest"]["plan"]["job"]["id"]

    # There is a result if the sweep cannot be written.
    shutil.rmtree(file.parent)
    file.parent.touch()
    found = plan(composed, typed)
    assert len(found.data["best"]) == 2 and "why the others lose" in found.text
    assert re.match("sweep_file=.* cannot be written", str(found.error))


def test_what_a_search_cannot_distinguish(monkeypatch):
    # The simplest may be slower than what is planned for speed.
    slow = search(space_of(*EIGHT, "parallelism.tp=2"), 1)
    assert slow.best[0].point.pp > 1 and slow.simplest.point.pp == 1
    space = space_of(*LONG, "parallelism.pp=1", "parallelism.cp=1")
    best = search(space, 4)
    times = [each.seconds for each in best.best]
    claims = {1: "the first differs from the others", 3: "the first 3 cannot be distinguished"}
    for alike, claim in (claims | {4: "all cannot be distinguished"}).items():
        off = times[alike - 1] / times[0] - 1 + 1e-9
        for module in (found_module, search_module):
            monkeypatch.setattr(module, "RESOLUTION", Resolution(off, 40, 8))
        assert found_module.search_as_dict(best)["alike"] == alike
        text = found_module.render_search(best)
        assert f"\n{claim}: the planned ratio" in text and "(40 pairs, 8 tables)\n" in text
    own = search(space, 2, Calibration(Constants(), "here"))
    assert found_module.search_as_dict(own)["alike"] is None
    assert "distinguished" not in found_module.render_search(own)
