"""Training with an error is found: a learning rate 5 % off, a gradient scale missing on one rank, or a
constant factor on all gradients, which AdamW removes."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from jobs import tiny
from tiers import THOROUGH

from harness.config.fields import with_value
from harness.tools.parity.parity import trace
from harness.tools.study.judge import (
    BETTER,
    DIFFERENT,
    EQUAL,
    FINAL,
    NORM,
    Curves,
    differences,
    judge,
)
from harness.tools.study.techniques import ConvergeConfig

SEEDS, STEPS = (1, 2, 3), 40
CONFIG = ConvergeConfig()
JOB = (
    *("data=python_stdlib", "data.paths=['{stdlib}/json/*.py']", "data.validation_fraction=0"),
    *("model.vocab_size=272", "training.seq_len=64", f"training.steps={STEPS}"),
    *("optimizer.lr=4e-3", "schedule.warmup_steps=8", "training.max_norm=0"),
)
FSDP = ("parallelism=fsdp", "parallelism.dp_shard=2")


def missing_scale_on_one_rank(job_json, steps):
    """Rank 1 leaves a factor of a half out of its gradients; the losses that it reports are right."""
    from harness.parallelism.loss import TokenLoss

    original = TokenLoss.__call__

    def doubled(self, logits, labels):
        loss = original(self, logits, labels)
        return 2 * loss - loss.detach() if dist.get_rank() == 1 else loss

    with mock.patch.object(TokenLoss, "__call__", doubled):
        return trace(job_json, steps)


def smaller_gradients(job_json, steps):
    """All gradients are 3 % too small, as if tokens without a label counted."""
    from harness.train.engine import Engine

    original = Engine.__init__

    def init(self, *args, **options):
        original(self, *args, **options)
        for _, parameter in self.named_parameters():
            parameter.register_hook(lambda gradient: 0.97 * gradient)

    with mock.patch.object(Engine, "__init__", init):
        return trace(job_json, steps)


def curves(pool, job, train=trace):
    losses, norms = {}, {}
    for seed in SEEDS:
        own = with_value(job, "training.seed", seed)
        found = pool.run(own.world_size, train, own.to_json(), STEPS)[0]
        losses[seed] = np.array([values["loss"] for values in found])
        norms[seed] = np.array([values["gradient norm"] for values in found])
    return Curves(np.arange(1, STEPS + 1), losses, norms)


@pytest.fixture(scope="module")
def verdicts(pool):
    control = curves(pool, tiny(*JOB))
    techniques = {
        "fsdp": curves(pool, tiny(*JOB, *FSDP)),
        "lr": replace(curves(pool, tiny(*JOB, "optimizer.lr=4.2e-3")), norms={}),
        "scale": curves(pool, tiny(*JOB, *FSDP), missing_scale_on_one_rank),
        "factor": curves(pool, tiny(*JOB), smaller_gradients),
    }
    if THOROUGH:
        techniques["bf16"] = replace(curves(pool, tiny(*JOB, "precision=bf16")), norms={})
    assert all(losses[-1] < 0.6 * losses[0] for losses in control.losses.values()), (
        "the control learns"
    )
    found = {}
    for name, each in techniques.items():
        estimates = differences(control, each, CONFIG)
        word = judge(estimates, CONFIG.bound, has_same_numerics=bool(each.norms))
        found[name] = (*word, estimates)
    return found


def test_errors_are_found_and_correct_techniques_are_equal(
    verdicts,
):
    correct = verdicts.keys() - {"lr", "scale", "factor"}
    assert correct and {verdicts[name][0] for name in correct} == {EQUAL}
    # A larger rate learns faster at the start; the verdict says so.
    assert verdicts["lr"][:2] == (BETTER, "learning speed")
    assert verdicts["scale"][0] == DIFFERENT
    # A factor that AdamW removes.
    *verdict, estimates = verdicts["factor"]
    assert verdict == [DIFFERENT, NORM]
    assert estimates[FINAL].is_inside(CONFIG.bound)
