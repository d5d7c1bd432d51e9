"""The job: its id, resolve, JSON, world size and batch sizes."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import functools
import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest

from harness.compose import resolve as job_rules
from harness.compose.composer import compose_job
from harness.compose.overrides import with_one_length
from harness.compose.resolve import resolve
from harness.config.fields import EXECUTION, LABEL, NUMERICS, identity, label, leaves, numerics
from harness.config.job import Job, differing_numerics, from_dict
from harness.contrib.flux import objective_entry
from harness.util.errors import ConfigError, UserError

TINY = ("model=llama3_tiny", "data=synthetic", "tokenizer=bytes", "training.seq_len=64", "cluster.device=cpu")
BATCH = "training.global_batch_size=16"


pytestmark = pytest.mark.usefixtures("alone")


def job(*overrides: str) -> Job:
    launched = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    return copy.deepcopy(composed(overrides, launched))


@functools.cache
def composed(overrides: tuple[str, ...], launched: tuple[str | None, ...]) -> Job:
    """Cached, because composing takes 0.1 s and most tests compare with the same job."""
    made = compose_job([*TINY, *overrides])
    assert isinstance(made, Job)
    return made


def unresolved(**layout: Any) -> Job:
    """A tiny job before resolve, with these fields of layout, training or cluster."""
    made = job().to_dict()
    made["cluster"]["device"] = "auto"
    made["training"] |= {"global_batch_size": None, "local_batch_size": None}
    for name, value in layout.items():
        part = next(part for part in ("parallelism", "training", "cluster") if name in made[part])
        made[part][name] = value
    read: Job = from_dict(Job, made)
    return read


# --- identity


CHANGES = {
    LABEL: """
        name=another runs_dir=elsewhere model.name=another metrics=all metrics.log_interval=7
        metrics.wandb_tags=[a,b] validation.interval=5 data.cache_dir=/tmp/cache cluster.threads_per_rank=1
        cluster.step_timeout_seconds=60
    """,
    NUMERICS: """
        training.steps=999 training.seed=43 training.max_norm=2 model.dim=128 model.rope.theta=10000
        model.tied_embeddings=true optimizer.lr=1e-3 optimizer.decay_embeddings=false schedule=cosine
        precision=bf16 data.mask_fraction=0.3 debug.non_finite=skip training.global_batch_size=32
    """,
    EXECUTION: """
        parallelism=ddp parallelism=fsdp parallelism=hsdp_tp parallelism=fsdp_tp_pp
        parallelism.reshard_after_forward=never parallelism.sequence_parallel=false
        parallelism.pp_schedule=ZBVZeroBubble training.local_batch_size=2 training.gc_interval=0
        optimizer.implementation=foreach debug=deterministic
    """,
}


@pytest.mark.parametrize(
    ("role", "override"), [(role, each) for role, text in CHANGES.items() for each in text.split()]
)
def test_ids_cover_what_the_role_says(role: str, override: str) -> None:
    made, before = job(BATCH, override), job(BATCH)
    assert (made.id == before.id) == (role == LABEL)
    assert (made.numerics_id == before.numerics_id) == (role != NUMERICS)
    assert bool(differing_numerics(made, before)) == (role == NUMERICS)


def test_every_layout_has_its_own_id() -> None:
    layouts = ("single", "ddp", "fsdp", "hsdp", "tp", "pp", "fsdp_tp", "fsdp_pp", "tp_pp", "fsdp_tp_pp")
    jobs = [job(BATCH, f"parallelism={layout}") for layout in layouts]
    # Without a GPU and without a world size fsdp is two ranks.
    assert len({j.id for j in jobs}) == len(layouts)
    assert len({j.numerics_id for j in jobs}) == 1


def test_id_covers_resolved_values() -> None:
    rest = job(BATCH, "cluster.ranks_per_node=4", "parallelism.dp_shard=-1")
    assert rest.id == job(BATCH, "parallelism.dp_shard=4").id
    assert job("training.global_batch_size=null", "training.local_batch_size=16").id == job(BATCH).id


def test_id_and_run_dir() -> None:
    made = job("name=mine", "runs_dir=/tmp/runs")
    assert len(made.id) == 12 and set(made.id) <= set("0123456789abcdef")
    assert str(made.run_dir) == f"/tmp/runs/mine/{made.id}"


def test_every_leaf_has_a_role() -> None:
    roles = {name: role for name, role, _ in leaves(job())}
    assert set(roles.values()) == {NUMERICS, EXECUTION, LABEL}
    parts = {name.split(".")[0] for name in roles if "." in name}
    assert parts == {f.name for f in dataclasses.fields(Job)} - {"name", "runs_dir", "notes", "tags", "user"}
    # With a wrong role, a layout sweep would change an experiment, or one experiment would have two ids.
    assert {roles[f"parallelism.{f.name}"] for f in dataclasses.fields(type(job().parallelism))} == {
        EXECUTION
    }
    names = {"model.name", "model.family", "model.path"}
    assert {roles[name] for name in roles if name.startswith("model.") and name not in names} == {NUMERICS}
    assert {roles[name] for name in names} == {LABEL}
    assert {roles[name] for name in roles if name.startswith("metrics.")} == {LABEL}


def test_a_new_field_with_its_default_changes_no_id() -> None:
    @dataclasses.dataclass(frozen=True)
    class Part:
        old: int | None = numerics(None)
        new: int | None = numerics(None, id_omits_default=True)
        sizes: list[int] = numerics(factory=list, id_omits_default=True)

    assert identity(Part(), (NUMERICS,)) == [("old", None)]
    assert identity(Part(new=1, sizes=[2]), (NUMERICS,)) == [("old", None), ("new", 1), ("sizes", [2])]
    assert identity(Part(), (EXECUTION,)) == []


def test_a_leaf_without_a_role_is_refused() -> None:
    @dataclasses.dataclass
    class Part:
        fine: int = numerics(1)
        forgotten: int = 2

    @dataclasses.dataclass
    class Parent:
        part: Part = label(factory=Part)

    with pytest.raises(TypeError, match=r"part\.forgotten has no role"):
        list(leaves(Parent()))


def test_every_field_is_documented() -> None:
    """A field's docstring is the string that follows it in the source."""

    def parts(cls: type) -> set[type]:
        made = {type(getattr(job(), f.name)) for f in dataclasses.fields(cls)} if cls is Job else set()
        return {cls} | {part for part in made if dataclasses.is_dataclass(part)}

    for part in parts(Job) - {Job} | {type(job().model.rope), type(job().cluster.hardware)}:
        body = ast.parse(inspect.getsource(part)).body[0].body  # type: ignore[attr-defined]
        for statement, following in zip(body, [*body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign):
                documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                assert documented, f"{part.__name__}.{ast.unparse(statement.target)}"


# --- JSON


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model=llama32_1b", "training.seq_len=128"),
        ("parallelism=fsdp_tp_pp", BATCH, "parallelism.pp_schedule=Interleaved1F1B"),
        (
            "parallelism=pp",
            "model.n_layers=1",
            "parallelism.pp_modules_per_stage=[[tok_embeddings],[layers.0,norm,output]]",
        ),
        ("metrics.wandb_tags=[a,b]", "data=python_stdlib", "schedule=cosine"),
    ],
)
def test_json_round_trip(overrides: tuple[str, ...]) -> None:
    made = job(*overrides)
    text = made.to_json()
    back = Job.from_json(text)
    assert back == made
    assert (back.id, back.numerics_id) == (made.id, made.numerics_id)
    assert json.loads(text)["id"] == made.id
    assert back.to_json() == text
    assert type(back.model.rope) is type(made.model.rope)


def test_json_of_a_resolved_job_is_resolved() -> None:
    made = job("parallelism=fsdp", "cluster.ranks_per_node=4", "training.global_batch_size=null")
    back = Job.from_json(made.to_json())
    assert (back.world_size, back.global_batch_size, back.local_batch_size) == (4, 32, 8)
    before = back.to_json()
    assert resolve(back, gpus=0).to_json() == before


def test_an_empty_json_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"job\.json: damaged, or another version wrote it: name=null: must be"
    ):
        Job.read(tmp_path / "job.json")


def test_json_with_an_unknown_field_is_refused() -> None:
    plain = job().to_dict()
    plain["model"]["depth"] = 3
    with pytest.raises(ConfigError, match=r"model\.depth=3: no such field; did you mean "):
        Job.from_json(json.dumps(plain))


# --- world size


@pytest.mark.parametrize(
    ("layout", "ranks", "gpus", "dp_shard"),
    [
        ({}, None, 0, 2),
        ({"tp": 2}, None, 0, 2),
        ({}, None, 8, 8),
        ({"tp": 2, "pp": 2}, None, 8, 2),
        ({"dp_replicate": 2}, None, 8, 4),
        ({"ranks_per_node": 4}, None, 0, 4),
        ({"ranks_per_node": 4}, None, 8, 4),
        ({"ranks_per_node": 8, "tp": 4}, None, 0, 2),
        ({}, 6, 8, 6),
        ({"ranks_per_node": 4}, 16, 8, 16),
        ({"tp": 2}, 2, 0, 1),
    ],
)
def test_the_rest_of_the_world(layout: dict[str, int], ranks: int | None, gpus: int, dp_shard: int) -> None:
    made = resolve(unresolved(dp_shard=-1, **layout), launched_ranks=ranks, gpus=gpus)
    assert made.parallelism.dp_shard == dp_shard
    others = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp_replicate", 1)
    assert made.world_size == dp_shard * others


def test_gpus_do_not_count_when_the_device_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert resolve(unresolved(dp_shard=-1)).world_size == 4
    assert resolve(unresolved(dp_shard=-1, device="cpu")).world_size == 2


def test_a_fixed_layout_is_not_stretched_over_the_gpus() -> None:
    assert resolve(unresolved(dp_shard=2), gpus=8).world_size == 2


def test_ranks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallelism.dp_shard=-1: tp=4 does not divide the world size 6"):
        resolve(unresolved(dp_shard=-1, tp=4), launched_ranks=6)
    with pytest.raises(ConfigError, match=r"multiply to 2 \(tp=2\), but there are 4 ranks"):
        resolve(unresolved(tp=2), launched_ranks=4)


def test_under_torchrun_the_world_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    made = job(BATCH, "parallelism.dp_shard=-1", "parallelism.tp=2")
    assert (made.world_size, made.parallelism.dp_shard) == (8, 4)
    with pytest.raises(ConfigError, match=r"multiply to 4 .*, but there are 8 ranks"):
        job(BATCH, "parallelism=fsdp_tp")
    assert job(BATCH, "parallelism=fsdp_tp_pp").world_size == 8
    # ranks_per_node is the number of ranks to start, and torchrun has started them already
    assert job(BATCH, "parallelism.dp_shard=-1", "cluster.ranks_per_node=2").world_size == 8


def test_world_size_without_rank_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert job().world_size == 1


# --- batch


@pytest.mark.parametrize(
    ("total", "local", "replicas", "expected"),
    [
        (None, None, 1, (8, 8, 1)),
        (None, None, 4, (32, 8, 1)),
        (None, 2, 4, (8, 2, 1)),
        (16, None, 1, (16, 16, 1)),
        (16, None, 4, (16, 4, 1)),
        (16, 2, 4, (16, 2, 2)),
        (16, 1, 2, (16, 1, 8)),
        (16, 16, 1, (16, 16, 1)),
    ],
)
def test_batch(total: int | None, local: int | None, replicas: int, expected: tuple[int, int, int]) -> None:
    for layout in ({"dp_replicate": replicas}, {"dp_shard": replicas}):
        made = resolve(unresolved(global_batch_size=total, local_batch_size=local, **layout), gpus=0)
        assert (made.global_batch_size, made.local_batch_size, made.accumulation_steps) == expected
        assert (made.training.global_batch_size, made.training.local_batch_size) == expected[:2]


@pytest.mark.parametrize(
    ("tokens", "steps"),
    [("8192", 8), ("8193", 9), ("20B", 19_531_250), ("1e6", 977), ("0.5K", 1), ("1_024", 1)],
)
def test_the_first_steps_that_train_as_many_tokens(tokens: str, steps: int) -> None:
    made = job(BATCH, f"training.tokens={tokens}", "schedule.warmup_steps=0")
    assert made.steps == steps  # of 16 x 64 tokens
    same = job(BATCH, f"training.steps={steps}", "schedule.warmup_steps=0")
    assert made.id == same.id
    assert resolve(made, gpus=0) == made


def test_a_typed_length_replaces_the_one_in_a_file() -> None:
    assert job("experiment=quickstart").steps == 100
    assert job("experiment=quickstart", "training.tokens=10240").steps == 40
    assert job("experiment=quickstart", "training.tokens=10240", "training.steps=null").steps == 40
    others = ["training.tokens=null", "scale.tokens_per_parameter=null", "scale.flops=null"]
    assert with_one_length(["training.steps=8"]) == [*others, "training.steps=8"]
    with pytest.raises(ConfigError, match=r"replaces training\.steps, which is 10"):
        job("training.steps=10", "training.tokens=10240")


def test_local_batches_divide_every_scheduled_batch() -> None:
    sizes = "schedule.batch_size=[{until_step:5,sequences:4},{until_step:9,sequences:12}]"
    made = job(BATCH, sizes, "parallelism=ddp")
    assert (made.local_batch_size, made.accumulation_steps) == (2, 4)
    assert [made.sizes.at(step).batch_size for step in (1, 5, 6, 9, 10)] == [4, 4, 12, 12, 16]
    assert resolve(made, gpus=0) == made


def test_batch_is_shared_by_data_parallel_ranks_only() -> None:
    made = resolve(unresolved(global_batch_size=16, tp=2, pp=2, dp_shard=2), gpus=0)
    assert (made.world_size, made.local_batch_size) == (8, 8)


def test_resolve_twice_changes_nothing() -> None:
    made = resolve(unresolved(dp_shard=-1, tp=2), launched_ranks=8)
    before = made.to_json()
    assert resolve(made, launched_ranks=8).to_json() == before


def test_resolve_returns_a_new_job() -> None:
    made = unresolved(dp_shard=-1, tp=2)
    before = made.to_json()
    assert resolve(made, launched_ranks=8).parallelism.dp_shard == 4
    assert made.to_json() == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.training.steps = 3  # type: ignore[misc]


def test_another_csv_schedule_is_another_job(tmp_path: Path) -> None:
    file, ids = tmp_path / "schedule.csv", set()
    for last in ("1F0,1B0,1F1,1B1", "1F0,1F1,1B0,1B1"):
        file.write_text(f"0F0,0F1,0B0,0B1\n{last}\n")
        csv = f"parallelism.pp_schedule_csv={file}"
        ids.add(compose_job([*TINY, "parallelism.pp=2", "training.global_batch_size=2", csv]).id)
    assert len(ids) == 2


def test_validation_needs_held_out_documents() -> None:
    assert job("validation.interval=5").validation.interval == 5
    stdlib = ("data=python_stdlib", "data.validation_fraction=0")
    assert job(*stdlib).validation.interval == 0
    with pytest.raises(ConfigError, match="validation is enabled"):
        job(*stdlib, "validation.interval=5")


TWO_PASSES = ("parallelism=pp", "parallelism.pp_schedule=ZBVZeroBubble")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (*TWO_PASSES, "training.loss_chunks=4"),
            "which torch 2.11 cannot with chunked losses; would work",
        ),
        ((*TWO_PASSES, "compile=on"), "which torch 2.11 cannot with compiled blocks; would work: "),
        ((*TWO_PASSES, "model=qwen3_moe_debug"), "which torch 2.11 cannot with experts; would work: "),
        (TWO_PASSES, ""),
        (("parallelism=pp", "model=qwen3_moe_debug", "training.loss_chunks=4"), ""),
        (
            ("model=deepseek_v3_debug", "model.mtp.depth=1", "parallelism=tp"),
            "model.mtp.depth=1: torch 2.11 cannot predict several tokens with parallelism.tp=2; would work",
        ),
        (("model=deepseek_v3_debug", "model.mtp.depth=1"), ""),
        (
            ("model=flux_debug", "data=latents_synthetic", "training.seq_len=32", "parallelism=tp"),
            "parallelism.tp=2: torch 2.11 cannot split the tokens that enter model.architecture=flux; would",
        ),
    ],
)
def test_what_fails_inside_torch_2_11_is_refused_there(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], message: str
) -> None:
    def use(version: str) -> None:
        for each in (job_rules, objective_entry):
            monkeypatch.setattr(each, "torch_version", lambda: version)

    use("2.13.0+cpu")
    compose_job([*TINY, *overrides])
    use("2.11.0+cpu")
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        compose_job([*TINY, *overrides])
