"""Every layout computes the same as one process, and the comparison detects layouts that do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from layouts import MATRIX, STEPS, TOLERANCES, layout, reference, require_parity, verdict_of

from harness.config.fields import with_value
from harness.launch.pool import RankFailed, RankPool
from harness.tools.parity import parity
from harness.tools.parity.parity import ParityConfig, ParityJob, Trace, compare, compose_layouts, trace
from harness.util.errors import ConfigError

# Combinations of features that other rows test singly; `make parity` runs all, with ten steps.
COMBINED = """
    ddp_accumulate ddp_pp ddp_tp fsdp_no_reshard fsdp_reshard_always hsdp_accumulate
    tp4 tp_no_sequence tp_no_loss_parallel fsdp_tp_plain fsdp_tp_offload
    pp_gpipe pp4_1f1b pp_layers_per_stage fsdp_pp tp_pp tp_pp_zbv
    hsdp_tp hsdp_pp fsdp_tp_pp_interleaved fsdp_tp_pp_dualpipev
    cp4 tp_cp_ulysses pp_cp_zbv hsdp_cp fsdp_tp_cp tp_pp_cp fsdp_pp_cp cp_compiled_recompute_op
    tp_recompute_budget fsdp_tp_recompute_op fsdp_tp_compiled_recompute_op fsdp_compiled_recompute_full
    fsdp_chunked_loss tp_plain_chunked_loss fsdp_tp_chunked_loss pp_zbv_chunked_loss
    fsdp_accumulate fsdp_pp_accumulate fsdp_pp_zbv fsdp_recompute_full
    pp_zbv_recompute_full fsdp_tp_compiled_recompute_full cp_ulysses_compiled_recompute_full
"""


@pytest.mark.parametrize("name", [name for name in MATRIX if name not in COMBINED.split()])
def test_layout_agrees_with_one_process(pool: RankPool, name: str) -> None:
    require_parity(pool, name, layout(name))


# The batch grows after the first step, the sequences after the second.
SCHEDULED = (
    "training.global_batch_size=16 schedule.batch_size=[{until_step:1,sequences:8}] "
    "schedule.seq_len=[{until_step:2,tokens:32}]"
)
TIED, ODD, BFLOAT16 = "model.tied_embeddings=true", "model.vocab_size=259", "precision=bf16"


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("tp_cp", SCHEDULED),
        ("pp_zbv_compiled", SCHEDULED),
        # Shards of 259 rows have different sizes on every axis.
        ("tp4", ODD),
        ("tp_plain_chunked_loss", ODD),
        # The shared table gets the gradients of both its uses.
        ("fsdp_tp", TIED),
        ("cp", TIED),
        # Against one process with the same rounding; tolerances are those of a mantissa of eight bits.
        ("fsdp_pp_zbv", BFLOAT16),
        ("fsdp_tp", BFLOAT16),
        ("cp_ulysses", BFLOAT16),
    ],
)
def test_other_jobs_agree_with_one_process(pool: RankPool, name: str, typed: str) -> None:
    job, steps = layout(name, *typed.split()), 3 if typed == SCHEDULED else STEPS
    assert ("output.weight" in reference(pool, job, steps).gradients[0]) == (typed != TIED)
    tolerances = parity.TOLERANCES["bfloat16" if typed == BFLOAT16 else "float32"]
    require_parity(pool, name, job, steps=steps, tolerances=tolerances)


def test_csv_schedule(pool: RankPool, tmp_path: Path) -> None:
    """GPipe of two stages and eight microbatches, with the backward passes in reverse order."""
    rows = []
    for stage in range(2):
        forwards = [f"{stage}F{microbatch}" for microbatch in range(8)]
        backwards = [f"{stage}B{microbatch}" for microbatch in reversed(range(8))]
        idle = [""] * (1 - stage)
        rows.append(",".join([*([""] * stage), *forwards, *idle, *idle, *backwards]))
    schedule = tmp_path / "schedule.csv"
    schedule.write_text("\n".join(rows) + "\n")
    job = compose_layouts(
        ParityConfig(matrix={"csv": f"parallelism=pp parallelism.pp_schedule_csv={schedule}"}), []
    )["csv"][1]
    require_parity(pool, "csv", job)


def test_csv_schedule_changed_behind_the_job(pool: RankPool, tmp_path: Path) -> None:
    """The content of the file is part of the job: a changed file is another job and is refused."""
    schedule = tmp_path / "schedule.csv"
    schedule.write_text("0F0,,,0B0\n,1F0,1B0\n")
    overrides = [f"parallelism.pp_schedule_csv={schedule}", "parallelism=pp", "training.global_batch_size=1"]
    matrix = {"csv": " ".join(overrides)}
    job = compose_layouts(ParityConfig(matrix=matrix), [])["csv"][1]
    schedule.write_text("0F0,,,0I0,0W0\n,1F0,1I0,1W0\n")
    assert compose_layouts(ParityConfig(matrix=matrix), [])["csv"][1].id != job.id
    with pytest.raises(RankFailed, match="the file changed after the job was composed"):
        pool.run(2, trace, job.to_json(), 1)


def test_reference_learns_and_masks_unevenly(pool: RankPool) -> None:
    """The reference is a real run: gradients differ between steps, labels are masked unevenly."""
    expected = reference(pool, layout("fsdp"))
    assert len(set(expected.valid_tokens)) > 1
    assert max(expected.valid_tokens) < 8 * 64
    assert len({round(loss, 6) for loss in expected.losses}) == STEPS
    assert all(norm > 0.1 for norm in expected.norms)
    first, last = expected.gradients
    assert all(not torch.equal(first[name], last[name]) for name in first)


def test_bfloat16_really_rounds(pool: RankPool) -> None:
    full = reference(pool, layout("fsdp"), 3)
    rounded = reference(pool, layout("fsdp", "precision=bf16"), 3)
    assert 1e-6 < abs(full.losses[0] - rounded.losses[0]) < 1e-2 * full.losses[0]


# -- sabotage: each breaks one rule on the ranks, and the comparison must fail ----


def denominator_of_own_tokens(job_json: str, steps: int) -> Trace:
    """Every rank divides by its own number of tokens: a mean of means (traps 1 and 2)."""
    from harness.data.prefetch import count_valid
    from harness.train.engine import Engine

    original = Engine.gradients

    def gradients(self, batch, **options):  # type: ignore[no-untyped-def]
        replicas = self.job.parallelism.data_parallel
        forward_backward = self.executor.forward_backward

        def divided(piece, *, last):  # type: ignore[no-untyped-def]
            self.loss.denominator = float(count_valid(batch) * replicas)
            return forward_backward(piece, last=last)

        self.executor.forward_backward = divided
        return original(self, batch, **options)

    with mock.patch.object(Engine, "gradients", gradients):
        return trace(job_json, steps)


def microbatches_average(job_json: str, steps: int) -> Trace:
    """The pipeline divides gradients by its microbatches, as is torch's default (traps 3 and 4)."""
    from torch.distributed.pipelining import schedules

    original = schedules._PipelineSchedule.__init__

    def init(self, *args, **options):  # type: ignore[no-untyped-def]
        original(self, *args, **options)
        self.scale_grads = True

    with mock.patch.object(schedules._PipelineSchedule, "__init__", init):
        return trace(job_json, steps)


def gradients_average(job_json: str, steps: int) -> Trace:
    """FSDP divides gradients by the data-parallel ranks, as is its default."""
    from harness.parallelism import fsdp

    original = fsdp.FSDPModule.set_gradient_divide_factor
    with mock.patch.object(
        fsdp.FSDPModule, "set_gradient_divide_factor", lambda self, factor: original(self, 2.0)
    ):
        return trace(job_json, steps)


def norm_of_own_stage(job_json: str, steps: int) -> Trace:
    """Every rank clips by the norm of its own parameters (trap 5)."""
    from harness.train import engine

    original = engine.Engine.world_total

    def world_total(self, values, *device):  # type: ignore[no-untyped-def]
        totals = original(self, values, *device)
        if not device:  # and not the number of tokens
            totals[0] = values[0]
        return totals

    with mock.patch.object(engine.Engine, "world_total", world_total):
        return trace(job_json, steps)


def initialised_by_shard(job_json: str, steps: int) -> Trace:
    """Every rank initializes its shard by itself, instead of taking its part of the full tensor (trap 12)."""
    from harness.parallelism import materialize

    original = materialize.local_ranges

    def own_values(parameter):  # type: ignore[no-untyped-def]
        return [range(len(indices)) for indices in original(parameter)]

    with mock.patch.object(materialize, "local_ranges", own_values):
        return trace(job_json, steps)


def own_positions_from_zero(job_json: str, steps: int) -> Trace:
    """Every context-parallel rank counts positions from 0 in its own share."""
    from harness.model.decoder import Decoder

    original = Decoder.take_positions

    def from_zero(self, positions):  # type: ignore[no-untyped-def]
        original(self, torch.arange(len(positions)))

    with mock.patch.object(Decoder, "take_positions", from_zero):
        return trace(job_json, steps)


def tokens_of_every_context_rank(job_json: str, steps: int) -> Trace:
    """Ranks that share a sequence all count its tokens (trap 9)."""
    from harness.train.engine import Engine

    with mock.patch.object(Engine, "counts_tokens", Engine.has_loss):
        return trace(job_json, steps)


def loss_of_one_context_rank(job_json: str, steps: int) -> Trace:
    """The reported loss is that of one share of the sequence (traps 9 and 10)."""
    from harness.train.engine import Engine

    original = Engine.world_total

    def world_total(self, values, *device):  # type: ignore[no-untyped-def]
        if not device and self.mesh.rank("cp"):
            values = [values[0], 0.0]
        return original(self, values, *device)

    with mock.patch.object(Engine, "world_total", world_total):
        return trace(job_json, steps)


def one_share_in_order(job_json: str, steps: int) -> Trace:
    """Ranks take their shares in order, although the ring pairs head and tail chunks."""
    from harness.parallelism import context, execute

    def in_order(layout, seq_len, rank):  # type: ignore[no-untyped-def]
        return torch.arange(seq_len).chunk(layout.cp)[rank]

    with (
        mock.patch.object(execute, "local_positions", in_order),
        mock.patch.object(context, "local_positions", in_order),
    ):
        return trace(job_json, steps)


SABOTAGES = [
    (denominator_of_own_tokens, "fsdp"),
    (microbatches_average, "pp_1f1b"),
    (gradients_average, "hsdp"),
    (norm_of_own_stage, "pp_1f1b"),
    (initialised_by_shard, "fsdp"),
    (own_positions_from_zero, "cp"),
    (tokens_of_every_context_rank, "fsdp_cp"),
    (loss_of_one_context_rank, "cp"),
    (one_share_in_order, "cp"),
]


@pytest.mark.parametrize(("sabotage", "name"), SABOTAGES)
def test_sabotage_is_noticed(pool: RankPool, sabotage: Callable[..., Trace], name: str) -> None:
    assert not verdict_of(pool, name, layout(name), run=sabotage).passed


# -- the comparison itself ----


def made_up(scale: float = 1.0) -> Trace:
    gradient = {"a": torch.tensor([3.0, 4.0]) * scale, "b": torch.tensor([1.0])}
    return Trace([2.0, 1.0], [5.0, 5.0], [100, 90], [gradient, gradient])


def test_compare_takes_the_worst_of_every_rank() -> None:
    assert compare("x", 1, made_up(), [made_up()], TOLERANCES).passed
    verdict = compare("x", 2, made_up(), [made_up(), made_up(1.001)], TOLERANCES)
    assert not verdict.passed
    assert verdict.worst_parameter == "a"
    assert verdict.gradient == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"losses": [2.0, math.nan]},
        {"losses": [2.0, 1.0001]},
        {"norms": [5.0, 5.001]},
        {"valid_tokens": [100, 180]},
        {"gradients": [{"a": torch.tensor([3.0, 4.0])}] * 2},
        {"gradients": [{"a": torch.tensor([3.0, math.nan]), "b": torch.tensor([1.0])}] * 2},
    ],
    ids=["nan loss", "loss", "norm", "tokens", "missing gradient", "nan gradient"],
)
def test_compare_fails(changes: dict[str, Any]) -> None:
    assert not compare("x", 1, made_up(), [replace(made_up(), **changes)], TOLERANCES).passed


def test_changed_numerics_are_refused() -> None:
    changed = {"a": "parallelism=single", "b": "parallelism=fsdp optimizer.lr=1"}
    with pytest.raises(ConfigError, match=r"changes the numerics: optimizer\.lr"):
        compose_layouts(ParityConfig(matrix=changed), [])


@pytest.mark.parametrize(
    ("typed", "model", "kind"),
    [
        ("", "llama3_tiny", "synthetic"),
        ("data=python_mixture model.vocab_size=258", "llama3_tiny", "mixture"),
        ("experiment=flux_debug", "flux_debug", "drawn_shapes"),
    ],
)
def test_what_is_typed_takes_the_place_of_the_small_llama(typed: str, model: str, kind: str) -> None:
    job = layout("fsdp", *typed.split())
    assert (job.model.name, job.data.kind, job.cluster.device) == (model, kind, "cpu")


def test_verb_prints_a_table_and_fails_where_one_differs(capsys: pytest.CaptureFixture[str]) -> None:
    job = ParityJob(
        **vars(layout("fsdp")), parity=ParityConfig(matrix=MATRIX, layouts=["ddp", "tp4"], steps=2)
    )
    job = with_value(job, "parity.world_size", 2)
    found = parity.parity(job, ["data.mask_fraction=0.3"])
    assert (found.code, found.data["agree"], found.data["skipped"]) == (0, 1, ["tp4"])
    assert [(each["layout"], each["passed"]) for each in found.data["compared"]] == [("ddp", True)]
    assert "1 of 1 layouts agree" in found.text
    assert "skipped: parity.world_size=2" in capsys.readouterr().out
    job = with_value(job, "parity.gradient_tolerance", 0.0)
    assert parity.parity(job, ["data.mask_fraction=0.3"]).code == parity.EXIT_DIFFERS
    assert "DIFFERS" in capsys.readouterr().out
