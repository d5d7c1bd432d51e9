"""The job: its id, resolve, JSON, world size and batch sizes."""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import inspect
import itertools
import json
import os

import pytest
from cases import rows
from one_line import one_line

from harness.compose.composer import compose_job
from harness.compose.length import other_lengths
from harness.compose.override import parse
from harness.compose.resolve import resolve
from harness.config.fields import EXECUTION, LABEL, NUMERICS, identity, label, leaves, numerics
from harness.config.job import Job, differing_numerics, from_dict
from harness.config.training import Phase, fewest_and_most_rows, rows_of_rank
from harness.util.errors import ConfigError, UserError

TINY = (
    "model=llama3_tiny",
    "data=synthetic",
    "tokenizer=bytes",
    "training.seq_len=64",
    "cluster.device=cpu",
)
BATCH = "training.global_batch_size=16"

pytestmark = pytest.mark.usefixtures("alone")


def job(*overrides):
    launched = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    return copy.deepcopy(composed(overrides, launched))


@functools.cache
def composed(overrides, launched):
    """Cached, because composing takes 0.1 s and most tests compare with the same job."""
    return compose_job([*TINY, *overrides])


def unresolved(**layout):
    """A tiny job before resolve, with these fields of layout, training or cluster."""
    made = job().to_dict()
    made["cluster"]["device"] = "auto"
    made["training"] |= {"global_batch_size": None, "local_batch_size": None}
    for name, value in layout.items():
        part = next(part for part in ("parallelism", "training", "cluster") if name in made[part])
        made[part][name] = value
    read = from_dict(Job, made)
    return read


CHANGES = {
    LABEL: """
        name=another runs_dir=elsewhere model.name=another metrics=all metrics.log_interval=7
        tags=[a,b] validation.interval=5 data.cache_dir=/tmp/cache cluster.threads_per_rank=1
        cluster.step_timeout_seconds=60
    """,
    NUMERICS: """
        training.steps=999 training.seed=43 training.max_norm=2 model.dim=128 model.rope.theta=10000
        model.tied_embeddings=true optimizer.lr=1e-3 optimizer.weight_decay=0.3 schedule=cosine
        precision=bf16 data.mask_fraction=0.3 debug.non_finite=skip training.global_batch_size=32
    """,
    EXECUTION: """
        parallelism=ddp parallelism=fsdp parallelism=hsdp_tp parallelism=fsdp_tp_pp
        parallelism.reshard_after_forward=never parallelism.cpu_offload=true
        training.local_batch_size=2 training.gc_interval=0
        optimizer.implementation=foreach debug=deterministic
    """,
}


@pytest.mark.parametrize(
    ("role", "override"), [(role, each) for role, text in CHANGES.items() for each in text.split()]
)
def test_ids_cover_what_the_role_says(role, override):
    made, before = job(BATCH, override), job(BATCH)
    assert (made.id == before.id) == (role == LABEL)
    assert (made.numerics_id == before.numerics_id) == (role != NUMERICS)
    assert bool(differing_numerics(made, before)) == (role == NUMERICS)


def test_id_covers_resolved_values():
    rest = job(BATCH, "cluster.ranks_per_node=4", "parallelism.dp_shard=-1")
    assert (
        rest.id
        == job(BATCH, "parallelism.dp_shard=4").id
        != job(BATCH, "parallelism.dp_shard=2").id
    )
    assert (
        job("training.global_batch_size=null", "training.local_batch_size=16").id == job(BATCH).id
    )


def test_id_and_run_dir():
    made = job("name=mine", "runs_dir=/tmp/runs")
    assert len(made.id) == 12 and set(made.id) <= set("0123456789abcdef")
    assert str(made.run_dir) == f"/tmp/runs/mine/{made.id}"


def test_every_leaf_has_a_role():
    """With a wrong role, a layout sweep would change an experiment, or one experiment would have two ids."""
    roles = {name: role for name, role, _ in leaves(job())}
    parts = {name.split(".")[0] for name in roles if "." in name}
    assert parts == {f.name for f in dataclasses.fields(Job)} - {
        "name",
        "runs_dir",
        "notes",
        "tags",
        "user",
    }
    labels = {"model.name", "model.family", "model.path"}
    for name, role in roles.items():
        expected = {"parallelism": EXECUTION, "metrics": LABEL, "model": NUMERICS}.get(
            name.split(".")[0]
        )
        assert role == (LABEL if name in labels else expected or role), name
    assert set(roles.values()) == {NUMERICS, EXECUTION, LABEL}


def test_a_new_field_with_its_default_changes_no_id():
    @dataclasses.dataclass(frozen=True)
    class Part:
        old: int | None = numerics(None)
        new: int | None = numerics(None, id_omits_default=True)
        sizes: list[int] = numerics(factory=list, id_omits_default=True)

    assert identity(Part(), (NUMERICS,)) == [("old", None)]
    assert identity(Part(new=1, sizes=[2]), (NUMERICS,)) == [
        ("old", None),
        ("new", 1),
        ("sizes", [2]),
    ]
    assert identity(Part(), (EXECUTION,)) == []


def test_a_leaf_without_a_role_is_refused():
    @dataclasses.dataclass
    class Part:
        fine: int = numerics(1)
        forgotten: int = 2

    @dataclasses.dataclass
    class Parent:
        part: Part = label(factory=Part)

    with pytest.raises(TypeError, match=r"part\.forgotten has no role"):
        list(leaves(Parent()))


def test_every_field_is_documented():
    """A field's docstring is the string that follows it in the source."""
    made = job()
    values = [
        *(getattr(made, f.name) for f in dataclasses.fields(Job)),
        made.model.rope,
        made.cluster.hardware,
    ]
    for part in {type(value) for value in values if dataclasses.is_dataclass(value)}:
        body = ast.parse(inspect.getsource(part)).body[0].body
        for statement, following in zip(body, [*body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign):
                documented = isinstance(following, ast.Expr) and isinstance(
                    following.value, ast.Constant
                )
                assert documented, f"{part.__name__}.{ast.unparse(statement.target)}"


STAGES = "parallelism.pp_modules_per_stage=[[tok_embeddings],[layers.0,norm,output]]"


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "model=llama32_1b training.seq_len=128",
        f"parallelism=fsdp_tp_pp {BATCH} parallelism.pp_schedule=Interleaved1F1B",
        f"parallelism=pp model.n_layers=1 {STAGES}",
        "tags=[a,b] data=python_stdlib schedule=cosine",
        "parallelism=fsdp cluster.ranks_per_node=4 training.global_batch_size=null",
    ],
)
def test_json_round_trip(overrides):
    """What is read is resolved already."""
    made = job(*overrides.split())
    text = made.to_json()
    back = Job.from_json(text)
    assert back == made == resolve(back, gpus=0)
    assert (back.id, back.numerics_id) == (made.id, made.numerics_id)
    assert json.loads(text)["id"] == made.id
    assert back.to_json() == text


def test_older_json_opens():
    """A field or a value that is gone does not close a folder, unless the run depended on it."""
    made = job()
    plain = made.to_dict()
    plain["metrics"]["console"] = "rich"
    plain["optimizer"] |= {
        "in_backward": False,
        "newton_schulz_steps": 5,
        "newton_schulz_half": False,
    }
    plain["cluster"]["pue"] = 1.2  # a label, which nothing that ran depended on
    back = Job.from_json(json.dumps(plain))
    assert back == made
    assert back.id == made.id
    plain["optimizer"]["in_backward"] = True
    with one_line(ConfigError, r"optimizer\.in_backward=true: was removed"):
        Job.from_json(json.dumps(plain))


def test_damaged_json_is_refused(tmp_path):
    (tmp_path / "job.json").write_text("{}")
    another = r"job\.json: damaged, or another version wrote it: name=null: must be"
    with one_line(UserError, another):
        Job.read(tmp_path / "job.json")
    plain = job().to_dict()
    plain["model"]["depth"] = 3
    with one_line(ConfigError, r"model\.depth=3: no such field; model has: activation, "):
        Job.from_json(json.dumps(plain))


@pytest.mark.parametrize(
    ("layout", "ranks", "gpus", "dp_shard"),
    rows("""
        {}                          null  0  2
        {tp: 2}                     null  0  2
        {}                          null  8  8
        {tp: 2, pp: 2}              null  8  2
        {dp_replicate: 2}           null  8  4
        {ranks_per_node: 4}         null  8  4
        {ranks_per_node: 8, tp: 4}  null  0  2
        {}                          6     8  6
        {ranks_per_node: 4}         16    8  16
        {tp: 2}                     2     0  1
    """),
)
def test_the_rest_of_the_world(layout, ranks, gpus, dp_shard):
    before = unresolved(dp_shard=-1, **layout)
    text = before.to_json()
    made = resolve(before, launched_ranks=ranks, gpus=gpus)
    assert made.parallelism.dp_shard == dp_shard
    others = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp_replicate", 1)
    assert made.world_size == dp_shard * others
    assert resolve(made, launched_ranks=ranks, gpus=gpus) == made
    assert before.to_json() == text, "resolve returns a new job"


def test_gpus_do_not_count_when_the_device_is_a_cpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert resolve(unresolved(dp_shard=-1)).world_size == 4
    assert resolve(unresolved(dp_shard=-1, device="cpu")).world_size == 2
    assert resolve(unresolved(dp_shard=2), gpus=8).world_size == 2, (
        "a fixed layout is not stretched"
    )


def test_ranks_that_do_not_fit_are_refused():
    with one_line(ConfigError, r"parallelism.dp_shard=-1: tp=4 does not divide the world size 6"):
        resolve(unresolved(dp_shard=-1, tp=4), launched_ranks=6)
    with one_line(ConfigError, r"multiply to 2 \(tp=2\), but there are 4 ranks"):
        resolve(unresolved(tp=2), launched_ranks=4)


def test_under_torchrun_the_world_is_given(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert job().world_size == 1, "without a rank there is no launcher"
    for name, value in {"RANK": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    made = job(BATCH, "parallelism.dp_shard=-1", "parallelism.tp=2")
    assert (made.world_size, made.parallelism.dp_shard) == (8, 4)
    with one_line(ConfigError, r"multiply to 4 .*, but there are 8 ranks"):
        job(BATCH, "parallelism=fsdp_tp")
    # ranks_per_node is the number of ranks to start, and torchrun has started them already
    assert job(BATCH, "parallelism.dp_shard=-1", "cluster.ranks_per_node=2").world_size == 8


@pytest.mark.parametrize(
    ("total", "local", "replicas", "expected"),
    rows("""
        null  null  1  [8, 8, 1]
        null  null  4  [32, 8, 1]
        null  2     4  [8, 2, 1]
        16    null  4  [16, 4, 1]
        16    2     4  [16, 2, 2]
        16    16    1  [16, 16, 1]
        7     null  3  [7, 3, 1]
        7     2     3  [7, 2, 2]
        3     4     3  [3, 4, 1]
    """),
)
def test_batch(total, local, replicas, expected):
    """Data-parallel ranks share it, others do not."""
    for layout in ({"dp_replicate": replicas}, {"dp_shard": replicas, "tp": 2, "pp": 2}):
        made = resolve(
            unresolved(global_batch_size=total, local_batch_size=local, **layout), gpus=0
        )
        assert [made.global_batch_size, made.local_batch_size, made.accumulation_steps] == expected
        assert [made.training.global_batch_size, made.training.local_batch_size] == expected[:2]


@pytest.mark.parametrize(
    ("tokens", "steps"),
    rows("""
        '8192'   8
        '8193'   9
        20B      19531250
        1e6      977
        0.5K     1
        '1_024'  1
    """),
)
def test_the_first_steps_that_train_as_many_tokens(tokens, steps):
    made = job(BATCH, f"training.tokens={tokens}", "schedule.warmup_steps=0")
    assert made.steps == steps  # of 16 x 64 tokens
    same = job(BATCH, f"training.steps={steps}", "schedule.warmup_steps=0")
    assert made.id == same.id
    assert resolve(made, gpus=0) == made


def test_a_typed_length_replaces_the_one_in_a_file():
    # A new field has id_omits_default=True: without it no run would find its folder.
    assert compose_job(["experiment=quickstart"]).id == "472fb45583b2"
    assert job("experiment=quickstart").steps == 100
    assert job("experiment=quickstart", "training.tokens=10240").steps == 40
    assert job("experiment=quickstart", "training.tokens=10240", "training.steps=null").steps == 40
    others = ["training.tokens", "scale.tokens_per_parameter", "scale.flops"]
    assert other_lengths([parse("training.steps=8")]) == others


def test_local_batches_divide_every_scheduled_batch():
    sizes = "schedule.batch_size=[{until_step:5,sequences:4},{until_step:9,sequences:12}]"
    made = job(BATCH, sizes, "parallelism=ddp")
    assert (made.local_batch_size, made.accumulation_steps) == (2, 4)
    assert [made.sizes.at(step).batch_size for step in (1, 5, 6, 9, 10)] == [4, 4, 12, 12, 16]
    assert resolve(made, gpus=0) == made


def test_ranks_share_every_batch():
    """A row of a smaller batch is on the rank of the row at the same fraction of the full one."""
    for ranks, smaller, size in itertools.combinations_with_replacement(range(1, 12), 3):
        phase = Phase(1, None, smaller, 1)
        own = [rows_of_rank(rank, ranks, size) for rank in range(ranks)]
        shares = [phase.share(rows, size) for rows in own]
        assert [row for share in shares for row in share] == list(range(smaller))
        lengths = [*map(len, shares)]
        assert fewest_and_most_rows(ranks, phase, size) == (min(lengths), max(lengths))
        for streams, share in zip(own, shares, strict=True):
            assert all(row * size // smaller in streams for row in share)


def test_another_csv_schedule_is_another_job(tmp_path):
    file, ids = tmp_path / "schedule.csv", set()
    for last in ("1F0,1B0,1F1,1B1", "1F0,1F1,1B0,1B1"):
        file.write_text(f"0F0,0F1,0B0,0B1\n{last}\n")
        csv = f"parallelism.pp_schedule_csv={file}"
        ids.add(compose_job([*TINY, "parallelism.pp=2", "training.global_batch_size=2", csv]).id)
    assert len(ids) == 2
