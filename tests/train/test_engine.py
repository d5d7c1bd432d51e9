"""One optimizer step: its loss, token counts and norm, on one rank and on several."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from equal import assert_equal
from jobs import tiny
from tiers import rest_is_thorough
from waits import waits

from harness.config.job import Job
from harness.data.loader import IGNORE_INDEX, Batch
from harness.launch.pool import RankPool
from harness.model.spec import tensors
from harness.optimizer.build import build_optimizer
from harness.parallelism.clip import copy_async
from harness.train.engine import Engine
from harness.train.step import StepOutcome

SMALL = ("training.steps=10", "training.seq_len=32", "training.global_batch_size=4")


def job_of(*overrides: str) -> str:
    return tiny(*SMALL, *overrides).to_json()


def batch_of(engine: Engine, labels_per_row: list[int]) -> Batch:
    """This rank's rows of a global batch whose row i has ``labels_per_row[i]`` valid labels."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (4, 33), generator=generator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    for row, count in enumerate(labels_per_row):
        labels[row, count:] = IGNORE_INDEX
    rows = slice(engine.rows.start, engine.rows.stop)
    return Batch(inputs[rows], labels[rows])


def outcome_of(job_json: str, labels_per_row: list[int]) -> tuple[StepOutcome, float | None]:
    """The outcome on this rank, and the mean loss of its rows from a plain forward pass."""
    job = Job.from_json(job_json)
    engine = Engine(job, torch.device("cpu"))
    batch = batch_of(engine, labels_per_row)
    outcome = engine.gradients(batch)
    alone = dataclasses.replace(job, parallelism=type(job.parallelism)())
    plain = None
    if outcome.local_loss is not None:
        from harness.model.decoder import Decoder
        from harness.parallelism.materialize import materialize

        model = Decoder(alone.model, job.training.seq_len)
        materialize(model, job.training.seed, torch.device("cpu"), torch.device("cpu"))
        with torch.no_grad():
            logits = model(batch.inputs_BT).flatten(0, 1)
        plain = float(torch.nn.functional.cross_entropy(logits, batch.labels_BT.flatten()))
    return outcome, plain


LAYOUTS = [
    *("parallelism=fsdp", "parallelism=fsdp_tp", "parallelism=fsdp_pp", "parallelism=tp_pp"),
    "parallelism=fsdp_cp",
]


@pytest.mark.parametrize("layout", rest_is_thorough(LAYOUTS, "parallelism=tp_pp", "parallelism=fsdp_cp"))
def test_tokens_and_losses_are_counted_once(pool: RankPool, layout: str) -> None:
    """Traps 9 and 10: token counts and losses, global and local, count each token once."""
    counts = [3, 32, 10, 1]
    job = job_of(layout)
    results = pool.run(Job.from_json(job).world_size, outcome_of, job, counts)
    outcomes = [outcome for outcome, _ in results]
    assert {o.valid_tokens for o in outcomes} == {sum(counts)}
    assert len({(o.loss, o.grad_norm) for o in outcomes}) == 1
    local = [(o.local_loss, plain) for o, plain in results if o.local_loss is not None]
    assert len(local) == Job.from_json(job).parallelism.data_parallel
    for loss, plain in local:
        assert loss == pytest.approx(plain, rel=1e-5)


def test_a_batch_without_valid_tokens_has_no_loss_and_no_gradient(pool: RankPool) -> None:
    [(outcome, _)] = pool.run(1, outcome_of, job_of(), [0, 0, 0, 0])
    assert (outcome.loss, outcome.grad_norm, outcome.valid_tokens) == (0.0, 0.0, 0)
    assert outcome.local_loss is None


def stop_requested_on(job_json: str, rank: int) -> bool:
    engine = Engine(Job.from_json(job_json), torch.device("cpu"))
    batch = batch_of(engine, [32] * 4)
    assert not engine.gradients(batch).stop_requested
    return engine.gradients(batch, stop_requested=dist.get_rank() == rank).stop_requested


@pytest.mark.parametrize("rank", rest_is_thorough([0, 3], 3))
def test_one_rank_asked_to_stop_stops_all(pool: RankPool, rank: int) -> None:
    """Trap 26."""
    assert pool.run(4, stop_requested_on, job_of("parallelism=fsdp_pp"), rank) == [True] * 4


def finite_after_spoiling(job_json: str, rank: int) -> bool:
    engine = Engine(Job.from_json(job_json), torch.device("cpu"))
    if dist.get_rank() == rank:
        with torch.no_grad():
            local = engine.parameters[-1]
            (local.to_local() if hasattr(local, "to_local") else local).view(-1)[0] = float("inf")
    return engine.gradients(batch_of(engine, [32] * 4)).is_finite


SPOILT = ["parallelism=fsdp", "parallelism=tp", "parallelism=pp", "parallelism=ddp"]


@pytest.mark.parametrize("layout", rest_is_thorough(SPOILT, "parallelism=fsdp", "parallelism=pp"))
def test_a_number_that_is_not_finite_on_one_rank_is_seen_by_all(pool: RankPool, layout: str) -> None:
    """Traps 25 and 26."""
    job = job_of(layout)
    ranks = Job.from_json(job).world_size
    assert pool.run(ranks, finite_after_spoiling, job, -1) == [True] * ranks
    assert pool.run(ranks, finite_after_spoiling, job, ranks - 1) == [False] * ranks


def changed_by_an_update(job_json: str, spoilt: bool) -> tuple[set[str], int]:
    """Names of weights and optimizer state that a second update changes, and the steps of the schedule."""
    from harness.checkpoint.state import model_state, optimizer_state

    def state() -> dict[str, torch.Tensor]:
        tensors = {**model_state(engine), **optimizer_state(engine)}
        return {name: getattr(t, "_local_tensor", t).clone() for name, t in tensors.items()}

    engine = Engine(Job.from_json(job_json), torch.device("cpu"))
    engine.update(engine.gradients(batch_of(engine, [32] * 4)).norm)
    before = state()
    if spoilt:
        original = engine.executor.forward_backward
        engine.executor.forward_backward = lambda *args, **options: original(*args, **options) * float("inf")  # type: ignore[method-assign]
    outcome = engine.gradients(batch_of(engine, [32] * 4))
    assert outcome.is_finite is not spoilt
    engine.update(outcome.norm)
    assert all(parameter.grad is None for parameter in engine.parameters)
    return {
        name for name, t in state().items() if not torch.equal(t, before[name])
    }, engine.schedule.last_epoch


UPDATES = [(layout, kind) for layout in ("single", "fsdp_tp") for kind in ("fused", "foreach")]


@pytest.mark.parametrize("case", rest_is_thorough(UPDATES, ("single", "foreach"), ("fsdp_tp", "fused")))
def test_an_update_that_is_not_finite_changes_only_the_rate(pool: RankPool, case: tuple[str, str]) -> None:
    """Here only the loss is infinite; the gradients are finite."""
    layout, implementation = case
    job = job_of(f"parallelism={layout}", f"optimizer.implementation={implementation}")
    ranks = Job.from_json(job).world_size
    for changed, steps in pool.run(ranks, changed_by_an_update, job, True):
        assert (changed, steps) == (set(), 2)
    for changed, _ in pool.run(ranks, changed_by_an_update, job, False):
        assert {"output.weight", "optimizer.state.output.weight.step"} <= changed


SKIP = "debug.non_finite=skip"
# Overrides, device, whether the device may drop an update, and whether the host needs the norm first.
NORM_CASES = [
    ([], "cuda", True, False),
    (["precision=bf16_full"], "cuda", True, False),
    (["optimizer.state_dtype=bfloat16", SKIP], "cuda", True, False),
    (["optimizer.implementation=foreach"], "cuda", False, False),
    (["optimizer.implementation=for-loop"], "cuda", False, False),
    (["optimizer.implementation=foreach", SKIP], "cuda", False, True),
    (["optimizer.implementation=foreach"], "cpu", False, True),
    (["precision=bf16_full"], "cpu", False, True),
    (["parallelism.cpu_offload=true"], "cuda", False, True),
    (["parallelism.cpu_offload=true", "precision=bf16_full"], "cuda", False, True),
]


@pytest.mark.parametrize(("overrides", "device", "skips", "asks"), NORM_CASES)
def test_when_the_host_needs_the_norm(overrides: list[str], device: str, skips: bool, asks: bool) -> None:
    engine = object.__new__(Engine)
    engine.job = Job.from_json(job_of(*overrides))
    engine.device = torch.device(device)
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=getattr(torch, engine.job.precision.master_dtype)))
    specs = tensors(engine.job.model)
    engine.optimizer = build_optimizer(engine.job.optimizer, [("output.weight", parameter)], specs)
    assert (engine.skips_on_device, engine.asks_for_norm) == (skips, asks)


def test_squares_of_offloaded_parameters_are_copied_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    with waits() as found:
        copied = copy_async(torch.ones(3), torch.device("meta"))
        assert copy_async(copied, copied.device) is copied
    assert copied.is_meta
    assert found == []
    assert len(pinned) == 1


def clipped_norm(job_json: str, max_norm: float) -> tuple[float, float]:
    from harness.parallelism.clip import clip_gradients

    engine = Engine(Job.from_json(job_json), torch.device("cpu"))
    before = engine.gradients(batch_of(engine, [32, 5, 9, 30])).grad_norm
    clip_gradients(engine.parameters, before, max_norm)
    from harness.parallelism.clip import local_squares

    squares = local_squares(engine.parameters, engine.mesh, engine.device).sum()
    return before, engine.world_sum([squares])[0] ** 0.5


CLIPPED = ["parallelism=single", "parallelism=hsdp", "parallelism=fsdp_tp", "parallelism=tp_pp"]


@pytest.mark.parametrize("layout", rest_is_thorough(CLIPPED, "parallelism=single", "parallelism=tp_pp"))
def test_clipping_is_by_the_global_norm(pool: RankPool, layout: str) -> None:
    job = job_of(layout)
    for before, after in pool.run(Job.from_json(job).world_size, clipped_norm, job, 0.05):
        assert before > 0.1
        assert after == pytest.approx(0.05, rel=1e-4)
    for before, after in pool.run(Job.from_json(job).world_size, clipped_norm, job, 0.0):
        assert after == before


def norms_over_two_meshes() -> tuple[float, float]:
    """A parameter sharded over four ranks, and one sharded over two ranks and replicated twice (trap 6)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from harness.parallelism.clip import local_squares
    from harness.parallelism.mesh import Mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    generator = torch.Generator().manual_seed(1)
    dense, expert = torch.randn(8, 6, generator=generator), torch.randn(4, 6, generator=generator)
    parameters = []
    for full, on, placements in (
        (dense, mesh, (Shard(0), Shard(1))),
        (expert, mesh, (Replicate(), Shard(0))),
        (expert, mesh["tp"], (Shard(1),)),
    ):
        parameter = torch.nn.Parameter(distribute_tensor(torch.zeros_like(full), on, placements))
        parameter.grad = distribute_tensor(full, on, placements)
        parameters.append(parameter)
    degrees = {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}
    total = local_squares(parameters, Mesh(mesh, degrees), torch.device("cpu")).sum()
    dist.all_reduce(total)
    return float(total), float(dense.double().square().sum() + 2 * expert.double().square().sum())


def test_norm_over_parameters_of_different_meshes(pool: RankPool) -> None:
    for found, expected in pool.run(4, norms_over_two_meshes):
        assert found == pytest.approx(expected, rel=1e-6)


def test_square_sum_is_accurate_where_float32_norms_are_not() -> None:
    from harness.parallelism.clip import squares_of

    for size in (1, 4095, 4096, 4097, 4_000_000):
        values = torch.randn(size, generator=torch.Generator().manual_seed(size))
        assert float(squares_of([values])) == pytest.approx(float(values.double().square().sum()), rel=1e-6)


def test_resharding_default_depends_on_the_pipeline() -> None:
    """Trap 7."""
    assert tiny(*SMALL, "parallelism=fsdp").parallelism.reshards_after_forward
    assert not tiny(*SMALL, "parallelism=fsdp_pp").parallelism.reshards_after_forward
    always = tiny(*SMALL, "parallelism=fsdp_pp", "parallelism.reshard_after_forward=always")
    assert always.parallelism.reshards_after_forward


def check_initial_values(job_json: str) -> None:
    """Require that the gathered parameters of this rank equal the values generated by name."""
    from harness.model.spec import tensors
    from harness.parallelism.materialize import draw

    job = Job.from_json(job_json)
    engine, specs = Engine(job, torch.device("cpu")), tensors(job.model)
    for name, parameter in engine.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        shape, init = tuple(parameter.shape), specs[name].init
        expected = draw(name, shape, init, job.training.seed, torch.device("cpu"))
        assert_equal(full, expected, name)


INITIALIZED = [(layout, vocab) for layout in ("hsdp_tp", "fsdp_tp_pp", "fsdp_tp") for vocab in (256, 259)]


@pytest.mark.parametrize("case", rest_is_thorough(INITIALIZED, ("hsdp_tp", 259), ("fsdp_tp", 256)))
def test_initial_values_are_those_drawn_by_name(pool: RankPool, case: tuple[str, int]) -> None:
    """Trap 12: bitwise equal for every sharding."""
    layout, vocab = case
    job = job_of(f"parallelism={layout}", f"model.vocab_size={vocab}")
    pool.run(Job.from_json(job).world_size, check_initial_values, job)


def losses_around_validation(job_json: str) -> list[float]:
    """Training loss, validation loss, training loss again: of the same batches on every layout."""
    engine = Engine(Job.from_json(job_json), torch.device("cpu"))
    first, second = batch_of(engine, [3, 32, 10, 1]), batch_of(engine, [32, 5, 9, 30])
    before = engine.gradients(first)
    engine.update(before.grad_norm)
    ((loss, tokens),) = engine.evaluate(second)
    after = engine.gradients(first)
    assert tokens == 76
    return [before.loss, loss / tokens, after.loss, after.grad_norm]


PIPELINES = [
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]


VALIDATED = [
    *(f"parallelism=pp parallelism.pp_schedule={schedule}" for schedule in PIPELINES),
    *(f"parallelism=fsdp_pp parallelism.pp_schedule={name}" for name in ("ZBVZeroBubble", "Interleaved1F1B")),
    *(f"parallelism={name}" for name in ("ddp", "fsdp", "hsdp", "tp", "fsdp_tp", "tp_pp")),
]
# One layout per way of executing a forward pass: no pipeline, one stage per rank, looped stages, V-shaped.
WAYS = [VALIDATED[PIPELINES.index(schedule)] for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")]
WAYS += ["parallelism=hsdp", "parallelism=tp"]


@pytest.mark.parametrize("layout", rest_is_thorough(VALIDATED, *WAYS))
def test_validation_is_the_same_and_leaves_training_alone(pool: RankPool, layout: str) -> None:
    """Trap 11, for every way of executing a forward pass."""
    [expected] = pool.run(1, losses_around_validation, job_of())
    job = job_of(*layout.split())
    for found in pool.run(Job.from_json(job).world_size, losses_around_validation, job):
        assert found == pytest.approx(expected, rel=1e-5)
