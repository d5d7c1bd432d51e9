"""One optimizer step: its loss, token counts and norm, on one rank and on several."""

import pytest
import torch
import torch.distributed as dist
from cases import rows
from jobs import random_batch, tiny
from waits import waits

from harness.checkpoint.optimizer_state import optimizer_state
from harness.checkpoint.state import model_state
from harness.data.batch import IGNORE_INDEX, Batch
from harness.model.spec import tensors
from harness.optimizer.build import build_optimizer
from harness.parallelism.clip import clip_gradients, copy_async, local_squares, squares_of
from harness.train.engine import Engine
from harness.train.step import StepOutcome

SMALL = ("training.steps=10", "training.seq_len=32", "training.global_batch_size=4")

CPU = torch.device("cpu")


def job_of(*overrides):
    return tiny(*SMALL, *overrides)


def batch_of(engine, labels_per_row):
    """This rank's rows of a global batch whose row i has ``labels_per_row[i]`` valid labels."""
    whole = random_batch(4, 32)
    for row, count in enumerate(labels_per_row):
        whole.labels_BT[row, count:] = IGNORE_INDEX
    rows = slice(engine.rows.start, engine.rows.stop)
    return Batch(whole.inputs_BT[rows], whole.labels_BT[rows])


def outcome_of(job, labels_per_row):
    engine = Engine(job, CPU)
    return engine.gradients(batch_of(engine, labels_per_row))


COUNTS = [3, 32, 10, 1], [32, 5, 9, 30]


def measured(job):
    """Train, evaluate and train again.

    Returns:
        Losses and norms; tokens trained and evaluated; the loss of this rank's rows, and their tokens; the
        largest loss of a rank's rows.
    """
    engine = Engine(job, CPU)
    first, second = (batch_of(engine, counts) for counts in COUNTS)
    before = engine.gradients(first)
    engine.update(before.grad_norm)
    ((loss, tokens),) = engine.evaluate(second)
    after = engine.gradients(first)
    numbers = [before.loss, before.grad_norm, loss / tokens, after.loss, after.grad_norm]
    own = sum(COUNTS[0][engine.rows.start : engine.rows.stop])
    [largest] = engine.world_max([before.local_loss or 0.0])
    return numbers, (before.valid_tokens, tokens), before.local_loss, own, largest


# One layout per way of executing a forward pass.
@pytest.mark.parametrize(
    "layout",
    [
        *("hsdp", "tp", "tp_pp", "fsdp_cp"),
        *(f"pp parallelism.pp_schedule={name}" for name in ("Interleaved1F1B", "ZBVZeroBubble")),
    ],
)
def test_tokens_and_losses_are_counted_once(pool, layout):
    """In training and in validation, which leaves training alone."""
    job = job_of(*f"parallelism={layout}".split())
    [(expected, _, alone, _, _)] = pool.run(1, measured, job_of())
    assert alone == expected[0]
    ranks = pool.run(job.world_size, measured, job)
    assert len({tuple(numbers[:2]) for numbers, *_ in ranks}) == 1
    for numbers, tokens, *_ in ranks:
        assert numbers == pytest.approx(expected, rel=1e-5)
        assert tokens == (46, 76)
    local = [(loss, own) for _, _, loss, own, _ in ranks if loss is not None]
    assert {largest for *_, largest in ranks} == {max(loss for loss, _ in local)}
    assert len(local) == job.parallelism.data_parallel
    assert sum(loss * own for loss, own in local) / 46 == pytest.approx(expected[0], rel=1e-5)


def test_a_batch_without_valid_tokens_has_no_loss_and_no_gradient(pool):
    [outcome] = pool.run(1, outcome_of, job_of(), [0, 0, 0, 0])
    assert (outcome.loss, outcome.grad_norm, outcome.valid_tokens) == (0.0, 0.0, 0)
    assert outcome.local_loss is None


def stop_requested_on(job, rank):
    engine = Engine(job, CPU)
    batch = batch_of(engine, [32] * 4)
    assert not engine.gradients(batch).stop_requested
    return engine.gradients(batch, stop_requested=dist.get_rank() == rank).stop_requested


def test_one_rank_asked_to_stop_stops_all(pool):
    assert pool.run(4, stop_requested_on, job_of("parallelism=fsdp_pp"), 3) == [True] * 4


def finite_after_spoiling(job, rank):
    engine = Engine(job, CPU)
    if dist.get_rank() == rank:
        with torch.no_grad():
            local = engine.parameters[-1]
            (local.to_local() if hasattr(local, "to_local") else local).view(-1)[0] = float("inf")
    return engine.gradients(batch_of(engine, [32] * 4)).is_finite


@pytest.mark.parametrize("layout", ["parallelism=fsdp", "parallelism=pp"])
def test_a_number_that_is_not_finite_on_one_rank_is_seen_by_all(pool, layout):
    job = job_of(layout)
    assert pool.run(job.world_size, finite_after_spoiling, job, -1) == [True] * job.world_size
    assert (
        pool.run(job.world_size, finite_after_spoiling, job, job.world_size - 1)
        == [False] * job.world_size
    )


@pytest.mark.parametrize("sums", [(float("inf"), 1.0), (4.0, float("inf")), (float("nan"), 1.0)])
def test_a_sum_that_is_not_finite_makes_the_step_so(sums):
    counts = {"tokens": 8, "valid_tokens": 8, "source_tokens": [], "local_weight": None}
    tensors = torch.tensor(1.0), torch.zeros(1), torch.zeros(0)
    for of_step, is_finite in (((4.0, 1.0), True), (sums, False)):
        values = torch.tensor(of_step, dtype=torch.float64)
        outcome = StepOutcome(values, *tensors, batch=None, stop_requested=False, **counts)
        assert outcome.is_finite is is_finite


def changed_by_an_update(job, spoilt):
    """Names of weights and optimizer state that a second update changes, and the steps of the schedule."""

    def state():
        tensors = {**model_state(engine), **optimizer_state(engine)}
        return {name: getattr(t, "_local_tensor", t).clone() for name, t in tensors.items()}

    engine = Engine(job, CPU)
    engine.update(engine.gradients(batch_of(engine, [32] * 4)).norm)
    before = state()
    if spoilt:
        original = engine.executor.forward_backward
        engine.executor.forward_backward = lambda *args, **options: (
            original(*args, **options) * float("inf")
        )
    outcome = engine.gradients(batch_of(engine, [32] * 4))
    assert outcome.is_finite is not spoilt
    engine.update(outcome.norm)
    assert all(parameter.grad is None for parameter in engine.parameters)
    changed = {name for name, t in state().items() if not torch.equal(t, before[name])}
    return changed, engine.schedule.last_epoch


WEIGHTS = {"output.weight", "optimizer.state.output.weight.step"}
BIASES = {f"layers.{layer}.moe.balance_bias" for layer in (1, 2, 3)}


@pytest.mark.parametrize(
    ("overrides", "moved"),
    [
        (["parallelism=single", "optimizer.implementation=foreach"], WEIGHTS),
        (["parallelism=fsdp_tp", "optimizer.implementation=fused"], WEIGHTS),
        (["parallelism=ep", "model=deepseek_v3_debug"], WEIGHTS | BIASES),
    ],
)
def test_an_update_that_is_not_finite_changes_only_the_rate(pool, overrides, moved):
    """Here only the loss is infinite; the gradients are finite."""
    job = job_of(*overrides)
    for changed, steps in pool.run(job.world_size, changed_by_an_update, job, True):
        assert (changed, steps) == (set(), 2)
    for changed, _ in pool.run(job.world_size, changed_by_an_update, job, False):
        assert moved <= changed


# Overrides, device, whether the device may drop an update, and whether the host needs the norm first.
NORM_CASES = rows("""
    ''                                                          cuda  true   false
    precision=bf16_full                                         cuda  true   false
    optimizer.state_dtype=bfloat16 debug.non_finite=skip        cuda  true   false
    optimizer.implementation=foreach                            cuda  false  false
    optimizer.implementation=for-loop                           cuda  false  false
    optimizer.implementation=foreach debug.non_finite=skip      cuda  false  true
    optimizer.implementation=foreach debug.spikes=skip          cuda  false  true
    optimizer.implementation=foreach                            cpu   false  true
    precision=bf16_full                                         cpu   false  true
    parallelism.cpu_offload=true                                cuda  false  true
    parallelism.cpu_offload=true precision=bf16_full            cuda  false  true
""")


@pytest.mark.parametrize(("overrides", "device", "skips", "asks"), NORM_CASES)
def test_when_the_host_needs_the_norm(overrides, device, skips, asks):
    engine = object.__new__(Engine)
    engine.job = job_of(*overrides.split())
    engine.device = torch.device(device)
    parameter = torch.nn.Parameter(
        torch.zeros(2, dtype=getattr(torch, engine.job.precision.master_dtype))
    )
    specs = tensors(engine.job.model)
    engine.optimizer = build_optimizer(engine.job.optimizer, [("output.weight", parameter)], specs)
    assert (engine.skips_on_device, engine.asks_for_norm) == (skips, asks)


def test_squares_of_offloaded_parameters_are_copied_without_waiting(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    with waits() as found:
        copied = copy_async(torch.ones(3), torch.device("meta"))
        assert copy_async(copied, copied.device) is copied
    assert copied.is_meta
    assert found == []
    assert len(pinned) == 1


def clipped_norm(job, max_norm):
    engine = Engine(job, CPU)
    before = engine.gradients(batch_of(engine, COUNTS[1])).grad_norm
    clip_gradients(engine.parameters, before, max_norm)
    squares = local_squares(engine.parameters, engine.mesh, engine.device).sum()
    return before, engine.world_sum([squares])[0] ** 0.5


@pytest.mark.parametrize("layout", ["parallelism=single", "parallelism=tp_pp"])
def test_clipping_is_by_the_global_norm(pool, layout):
    job = job_of(layout)
    for before, after in pool.run(job.world_size, clipped_norm, job, 0.05):
        assert before > 0.1
        assert after == pytest.approx(0.05, rel=1e-4)
    for before, after in pool.run(job.world_size, clipped_norm, job, 0.0):
        assert after == before


def test_square_sum_is_accurate_where_float32_norms_are_not():
    for size in (1, 4095, 4096, 4097, 4_000_000):
        values = torch.randn(size, generator=torch.Generator().manual_seed(size))
        for each, rel in ((values, 1e-6), (values.bfloat16(), 1e-5)):
            assert float(squares_of([each])) == pytest.approx(
                float(each.double().square().sum()), rel=rel
            )


def test_resharding_default_depends_on_the_pipeline():
    for layout, reshards in (
        ("fsdp", True),
        ("fsdp_pp", False),
        ("fsdp_pp parallelism.reshard_after_forward=always", True),
    ):
        job = tiny(*SMALL, *f"parallelism={layout}".split())
        assert job.parallelism.reshards_after_forward == reshards


def updated(job):
    """Weights after two steps of the engine, and of torch's own clip and AdamW; norms of the steps."""
    engine = Engine(job, CPU)
    copies = {name: weight.detach().clone() for name, weight in engine.named_parameters()}
    decayed = [weight for weight in copies.values() if weight.dim() > 1]
    others = [weight for weight in copies.values() if weight.dim() < 2]
    config = job.optimizer
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    betas = (config.beta1, config.beta2)
    reference = torch.optim.AdamW(groups, config.lr, betas, config.eps, config.weight_decay)
    norms = []
    for step, counts in enumerate(COUNTS):
        outcome = engine.gradients(batch_of(engine, counts))
        norms.append(outcome.grad_norm)
        for name, weight in engine.named_parameters():
            assert weight.grad is not None
            copies[name].grad = weight.grad.clone()
        torch.nn.utils.clip_grad_norm_([*copies.values()], job.training.max_norm)
        for group in reference.param_groups:
            group["lr"] = config.lr * (step + 1) / job.schedule.warmup_steps
        reference.step()
        engine.update(outcome.norm)
    return {name: weight.detach() for name, weight in engine.named_parameters()}, copies, norms


def test_updates_are_those_of_torch_with_an_active_limit(pool):
    """What the engine hands to the clip and the optimizer: with a large eps Adam cancels no wrong factor."""
    job = job_of(
        "training.max_norm=0.45",
        "schedule.warmup_steps=2",
        "optimizer.lr=0.01",
        "optimizer.eps=1e-3",
    )
    [(found, expected, norms)] = pool.run(1, updated, job)
    assert min(norms) > 0.45
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)
