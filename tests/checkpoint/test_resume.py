"""Exact resume: a stopped and resumed run is bitwise equal to an uninterrupted one."""

import json
import signal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import words
from local_runs import Run, start
from processes import python
from resumable_runs import SMALL, train

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.config.training import Sizes
from harness.model.moe import Router
from harness.run.folder import RunFolder
from harness.train.engine import Engine
from harness.train.step import LATE_STEPS
from harness.util.errors import CapacityError

STEPS, STOP = 6, 3
TOLERANCE = 1e-5


def job_of(tmp_path, *overrides):
    return compose_job([*SMALL, f"training.steps={STEPS}", f"runs_dir={tmp_path}", *overrides])


def run(pool, run_dir, *overrides, stop=None):
    run_dir.mkdir(parents=True, exist_ok=True)
    job = job_of(run_dir, *overrides)
    return pool.run(job.world_size, train, job.to_json(), str(run_dir), stop)


LAYOUTS = {
    "fsdp": words("parallelism=fsdp parallelism.dp_shard=4 precision=bf16 checkpoint=async"),
    "fsdp_ep_mtp": words("""
        model=deepseek_v3_debug model.attention.q_lora_rank=null model.mtp.depth=1
        parallelism=fsdp_ep model.n_layers=2
    """),
    # Weights that FSDP gathers in float8 are torchao tensors, and running means are in bfloat16.
    "fsdp_float8": words("""
        parallelism=fsdp precision=float8_tensorwise precision.emulate=true
        precision.enable_fsdp_float8_all_gather=true optimizer.state_dtype=bfloat16
        precision.precompute_float8_dynamic_scale_for_fsdp=true parallelism.dp_shard=2
    """),
    # A replica that sends no piece of a matrix has its momentum all the same: checkpoints may take it there.
    "hsdp_muon": ["parallelism=hsdp", "optimizer=muon"],
    "fsdp_tp_8bit": words("""
        parallelism=fsdp_tp model.dim=256 model.ffn_hidden_dim=512 optimizer.state_dtype=8bit
    """),
    "full_bf16": words("parallelism=tp parallelism.tp=2 precision=bf16_full checkpoint=async"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stopped_and_resumed_is_bitwise_the_run_that_was_not(pool, tmp_path, layout):
    straight = run(pool, tmp_path / "straight", *LAYOUTS[layout], "checkpoint.enable=false")
    # A validated step is saved: validation leaves modules gathered unless the engine frees them.
    validating = ("validation.interval=1", "validation.steps=1", "checkpoint.interval=2")
    first = run(pool, tmp_path / "stopped", *LAYOUTS[layout], *validating, stop=STOP)
    folder = tmp_path / "stopped" / "checkpoints" / f"step-{STOP}"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["step"], manifest["holds"], manifest["world_size"]) == (
        STOP,
        "full",
        len(first),
    )
    assert set(manifest["files"]) == {p.name for p in folder.iterdir()} - {"manifest.json"}
    numerics = job_of(tmp_path, *LAYOUTS[layout], *validating).numerics_id
    assert Job.from_json(json.dumps(manifest["job"])).numerics_id == numerics
    second = run(pool, tmp_path / "stopped", *LAYOUTS[layout], *validating)
    assert all(each.reason == "interrupted" for each in first)
    for whole, before, after in zip(straight, first, second, strict=True):
        assert after.resumed_from is not None and after.resumed_from.endswith(f"step-{STOP}")
        assert sorted(after.losses) == list(range(STOP + 1, STEPS + 1))
        for of in ("losses", "norms", "batches"):
            assert {**getattr(before, of), **getattr(after, of)} == getattr(whole, of)
        assert after.state == whole.state
        assert after.facts["tokens"] == whole.facts["tokens"] == STEPS * 8 * 32
    names = {name for outcome in second for name in outcome.state}
    state = "momentum_buffer" if "muon" in layout else "exp_avg_sq"
    assert {
        "output.weight",
        f"optimizer.state.layers.1.attention.wo.weight.{state}",
        "rng",
    } <= names


SCHEDULE = (
    "training.steps=9",
    "schedule.batch_size=[{until_step:3,sequences:4},{until_step:6,sequences:6}]",
    "schedule.seq_len=[{until_step:2,tokens:8},{until_step:5,tokens:16}]",
)
TRAINED = Sizes(8, 32, [(3, 4), (6, 6)], [(2, 8), (5, 16)]).tokens(9)


def test_every_phase_of_scheduled_sizes_resumes_bitwise(pool, tmp_path):
    """Trap 13: a second resume must not start the data over."""
    straight = run(
        pool, tmp_path / "straight", *SCHEDULE, "parallelism=fsdp", "checkpoint=disabled"
    )
    # Validation has full length, whatever the length of the step before.
    stopped = (*SCHEDULE, "parallelism=fsdp", "validation.interval=1", "validation.steps=1")
    parts = [run(pool, tmp_path / "stopped", *stopped, stop=stop) for stop in (1, 2, 4, 5, 8, None)]
    for rank, whole in enumerate(straight):
        assert sum(len(part[rank].batches) for part in parts) == len(whole.batches)
        for of in ("losses", "norms", "batches"):
            assert {k: v for part in parts for k, v in getattr(part[rank], of).items()} == getattr(
                whole, of
            )
        assert parts[-1][rank].state == whole.state
        assert parts[-1][rank].facts["tokens"] == whole.facts["tokens"] == TRAINED


# Stop inside the save of step 4, when its data are written and its manifest is not.
KILLED = """
import os, runpy, signal, sys
from harness.checkpoint import save

finish = save.Writer.finish

def killed(self, **arguments):
    if self.manifest["step"] == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return finish(self, **arguments)

save.Writer.finish = killed
runpy.run_module("harness.train", run_name="__main__", alter_sys=True)
"""


def test_killed_inside_a_save_and_resumed_is_the_run_that_was_left_alone(tmp_path, capsys):
    typed = (
        "model.n_layers=1",
        "checkpoint.interval=2",
        "metrics.console=plain",
        "training.steps=8",
    )
    whole = start(tmp_path / "whole", *typed)
    job = compose_job([*SMALL, *typed, f"runs_dir={tmp_path}"])
    done = python("-c", KILLED, *SMALL, *typed, f"runs_dir={tmp_path}")
    assert done.returncode == -signal.SIGKILL, done.stderr
    killed = Run(RunFolder(job.run_dir))
    assert killed.checkpoints.steps() == [2, 4] and killed.checkpoints.complete()[0][0].step == 2
    capsys.readouterr()
    run = start(tmp_path, *typed)
    assert run.path == killed.path and run.start_step == 2
    assert "step-4 cannot be used: it was not finished" in capsys.readouterr().out
    for name in ("loss", "loss_max", "grad_norm", "lr", "tokens", "valid_tokens"):
        assert run.series(name) == whole.series(name), name
    assert [each.step for each in run.checkpoints.complete()[0]] == [8, 6, 4, 2]


# -- other layouts ----

# A vocabulary that no degree divides (trap 14), and a batch divisible by 3 ranks.
ODD = ("model.vocab_size=251", "training.global_batch_size=24")
# Each layout resumes from the one before, so one run covers all consecutive pairs.
CHAINS = {
    "dense": (
        ODD,
        "parallelism=fsdp parallelism.dp_shard=4",
        "parallelism=tp_pp parallelism.pp_microbatch_size=4",
        "parallelism=single",
        "parallelism=fsdp parallelism.dp_shard=3",
        "parallelism=cp parallelism.tp=2",
    ),
    # Experts, their optimizer states and the balancing biases move to other ranks.
    "experts": (
        ("model=deepseek_v3_debug", "optimizer=muon"),
        "parallelism=fsdp_ep",
        "parallelism=single",
        "parallelism=fsdp_tp_ep parallelism.ep=4",
        "parallelism=tp parallelism.expert_tensor_parallel=true",
        "parallelism=ep",
    ),
    # 7 rows on 3, 2, 4 and 1 ranks.
    "rows": (
        ("schedule.batch_size=[{until_step:3,sequences:5}]", "training.global_batch_size=7"),
        "parallelism=fsdp parallelism.dp_shard=3",
        "parallelism=fsdp training.local_batch_size=3",
        "parallelism=ddp parallelism.dp_replicate=4",
        "parallelism=single",
    ),
    # Codes and scales of 8-bit states move by blocks.
    "8bit": (
        (*ODD, "model.dim=256", "model.ffn_hidden_dim=512", "optimizer.state_dtype=8bit"),
        "parallelism=fsdp parallelism.dp_shard=4",
        "parallelism=fsdp_tp",
        "parallelism=fsdp parallelism.dp_shard=3",
        "parallelism=single",
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_resuming_on_another_layout_goes_on_with_the_same_curve(pool, tmp_path, name):
    common, *layouts = CHAINS[name]
    common = (f"training.steps={len(layouts)}", *common)
    [whole] = run(pool, tmp_path / "whole", *common, "checkpoint=disabled")
    common = (*common, f"checkpoint.folder={tmp_path / 'shared'}")
    for number, layout in enumerate(layouts):
        last = layout is layouts[-1]
        stop = None if last else number + 1
        outcomes = run(pool, tmp_path / str(number), *common, *layout.split(), stop=stop)
        for outcome in outcomes:
            assert not number or str(outcome.resumed_from).endswith(f"/step-{number}")
            [(step, loss)] = outcome.losses.items()
            assert step == number + 1
            assert loss == pytest.approx(whole.losses[step], rel=TOLERANCE), layout
    assert outcome.facts["tokens"] == whole.facts["tokens"]
    biases = {
        tensor: digest for tensor, digest in whole.state.items() if tensor.endswith("balance_bias")
    }
    assert len(biases) == (3 if name == "experts" else 0)
    assert biases.items() <= outcome.state.items()


def test_streams_go_on_where_they_were(pool, tmp_path):
    """Every rank holds the positions of its own rows; the checkpoint holds those of all."""
    (tmp_path / "corpus").mkdir()
    documents = [{"text": f"{number} " * (number % 17 + 3)} for number in range(400)]
    lines = "".join(json.dumps(document) + "\n" for document in documents)
    (tmp_path / "corpus" / "a.jsonl").write_text(lines)
    stream = (
        "data=c4",
        f"data.dataset={tmp_path / 'corpus'}",
        "data.subset=null",
        "model.vocab_size=258",
    )
    common = (*stream, "data.mask_fraction=0")
    [whole] = run(pool, tmp_path / "whole", *common, "data.workers=0", "checkpoint=disabled")
    common = (*common, f"checkpoint.folder={tmp_path / 'shared'}")
    pipeline = ("parallelism=tp_pp", "parallelism.pp_microbatch_size=4", "data.workers=0")
    sharded = ("parallelism=fsdp", "parallelism.dp_shard=3", "data.workers=1")
    first = run(pool, tmp_path / "before", *common, *pipeline, stop=STOP)
    second = run(pool, tmp_path / "after", *common, *sharded)
    for outcome in (*first, *second):
        for step, loss in outcome.losses.items():
            assert loss == pytest.approx(whole.losses[step], rel=TOLERANCE)
    assert sorted(second[0].losses) == [4, 5, 6]


UNEVEN = 4
"""The step in which one rank chooses the other's experts for all its tokens."""


def train_unevenly(job_json, run_dir, late):
    """``train``, with values read as on a GPU if ``late``; return the error of a step without room."""
    score, passes, update = Router.score, Engine.gradients, Engine.update
    updated = []
    running = 0

    def uneven(router, *inputs):
        scores_NE, choice_NE = score(router, *inputs)
        if running == UNEVEN and dist.get_rank() == 1:
            choice_NE = choice_NE + torch.arange(choice_NE.shape[1], 0, -1)
        return scores_NE, choice_NE

    def gradients(engine, *inputs, **options):
        nonlocal running
        running = engine.schedule.last_epoch + 1
        return passes(engine, *inputs, **options)

    def noted_update(engine, norm):
        weight = engine.parameters[0]
        before = weight.to_local().clone()
        update(engine, norm)
        updated.append(not torch.equal(weight.to_local(), before))

    patched = (
        mock.patch.object(Router, "score", uneven),
        mock.patch.object(Engine, "gradients", gradients),
        mock.patch.object(Engine, "update", noted_update),
        mock.patch.dict(LATE_STEPS, cpu=int(late)),
    )
    with patched[0], patched[1], patched[2], patched[3]:
        try:
            return train(job_json, run_dir)
        except CapacityError as error:
            return str(error), updated


@pytest.mark.parametrize("late", [False, True])
def test_rows_without_room_end_the_run_before_anything_is_saved(pool, tmp_path, late):
    """Every rank refuses the step of one rank's rows; with room for them the run goes on."""
    model = ("model=qwen3_moe_debug", "parallelism=fsdp_ep", "model.n_layers=2")

    def outcomes(name, *overrides, late=False):
        folder = tmp_path / name
        folder.mkdir()
        options = (*model, "debug.non_finite=skip", *overrides)
        job = job_of(folder, *options)
        return pool.run(job.world_size, train_unevenly, job.to_json(), str(folder), late)

    whole = outcomes("whole", "checkpoint=disabled")
    shared = (f"checkpoint.folder={tmp_path / 'shared'}", "checkpoint.interval=3")
    refused = outcomes("refused", *shared, "parallelism.ep_capacity=1.7", late=late)
    message = (
        "parallelism.ep_capacity=1.7: step 4 needs 2, in layer 0; it changed no weight; "
        "would work: at least 2, or null"
    )
    applied = [True, True, True, False] + [True] * late
    assert refused == [(message, applied)] * len(whole)
    assert [path.name for path in (tmp_path / "shared").glob("step-*")] == ["step-3"]
    resumed = outcomes("resumed", *shared, "parallelism.ep_capacity=2")
    for straight, outcome in zip(whole, resumed, strict=True):
        assert str(outcome.resumed_from).endswith("step-3")
        after = {step: straight.losses[step] for step in range(4, STEPS + 1)}
        assert outcome.losses == pytest.approx(after, rel=TOLERANCE)
