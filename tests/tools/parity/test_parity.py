"""Every layout computes the same as one process, and the comparison detects layouts that do not."""

import math
import re

import planted
import pytest
import torch
from layouts import MATRIX, STEPS, TOLERANCES, layout, reference, require_agreement, require_parity

from harness.config.fields import with_value
from harness.launch.pool import RankFailed
from harness.tools.parity import parity
from harness.tools.parity.first_wrong import LOSS, Piece, difference
from harness.tools.parity.parity import (
    LayoutComparer,
    ParityConfig,
    ParityJob,
    compare,
    compose_layouts,
    in_float32,
    single_process,
    trace,
)
from harness.util.errors import ConfigError

# Combinations of features that other rows test singly; `make parity` runs all, with ten steps.
COMBINED = """
    ddp_accumulate ddp_pp ddp_tp fsdp_no_reshard fsdp_reshard_always hsdp_accumulate
    tp4 tp_no_sequence tp_no_loss_parallel fsdp_tp_plain fsdp_tp_offload
    pp_gpipe pp4_1f1b pp_layers_per_stage fsdp_pp tp_pp tp_pp_zbv
    hsdp_tp hsdp_pp fsdp_tp_pp_interleaved fsdp_tp_pp_dualpipev
    cp4 cp4_gather cp_gather_unbalanced tp_cp_gather
    tp_cp_ulysses pp_cp_zbv hsdp_cp fsdp_tp_cp tp_pp_cp fsdp_pp_cp cp_compiled_recompute_op
    tp_recompute_budget fsdp_tp_recompute_op fsdp_tp_compiled_recompute_op fsdp_compiled_recompute_full
    fsdp_chunked_loss tp_plain_chunked_loss fsdp_tp_chunked_loss pp_zbv_chunked_loss
    fsdp_accumulate fsdp_pp_accumulate fsdp_pp_zbv fsdp_recompute_full
    pp_zbv_recompute_full cp_ulysses_compiled_recompute_full
    ddp_rows hsdp_rows tp_rows pp_1f1b_rows
"""


@pytest.mark.parametrize("name", [name for name in MATRIX if name not in COMBINED.split()])
def test_layout_agrees_with_one_process(pool, name):
    # Compiling takes longest, and a resumed run compiles again; what is saved is as without it.
    require_parity(pool, name, layout(name), resume="compiled" not in name)


# The batch grows after the first step, the sequences after the second.
SCHEDULED = (
    "training.global_batch_size=16 schedule.batch_size=[{until_step:1,sequences:8}] "
    "schedule.seq_len=[{until_step:2,tokens:32}]"
)
ROWS_SCHEDULED = (
    "schedule.batch_size=[{until_step:1,sequences:5}] schedule.seq_len=[{until_step:2,tokens:32}]"
)
TIED = "model.tied_embeddings=true"
ODD = "model.vocab_size=259"
BFLOAT16 = "precision=bf16"
LATENTS = "model=deepseek_v2_debug"
EIGHT_BIT = "optimizer.state_dtype=8bit"
DEEPSEEK = "model=deepseek_v3_debug"
AUXILIARY = f"{DEEPSEEK} model.moe.aux_loss_coeff=1"
MIXTURE, SINKS = "model=qwen3_moe_debug", "model=gpt_oss_debug"
# Large, so that they are most of the gradient.
Z_LOSS, ROUTER_Z_LOSS = "training.z_loss=1", "model.moe.z_loss_coeff=10"
# Below every largest logit of the small models.
QK_CLIP = "optimizer.qk_clip=0.02"
BY_DOCUMENTS = (
    "data=python_stdlib data.paths=['{stdlib}/json/*.py'] data.validation_fraction=0 model.vocab_size=258 "
    "data.attend_across_documents=false parallelism.cp_load_balance=documents"
)
HYBRID = "model=qwen3_next_debug"
# Several conversations in a row.
CHAT = (
    f"{HYBRID} model.vocab_size=2048 tokenizer=python_2k data=chat data.chat_template=plain "
    "data.paths=[experiments/chat/conversations.jsonl] training.seq_len=96"
)


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("tp_cp", SCHEDULED),
        ("pp_zbv_compiled", SCHEDULED),
        # 5, then 8 rows on 3 ranks.
        ("fsdp_rows", ROWS_SCHEDULED),
        ("ep_rows", f"{AUXILIARY} {Z_LOSS} {ROUTER_Z_LOSS}"),
        ("fsdp_ep_pp_rows", AUXILIARY),
        # Shards of 259 rows have different sizes on every axis.
        ("tp4", ODD),
        ("tp_plain_chunked_loss", ODD),
        ("fsdp_tp", Z_LOSS),
        ("pp_zbv", Z_LOSS),
        ("fsdp_tp_cp", f"{MIXTURE} {Z_LOSS} {ROUTER_Z_LOSS}"),
        ("fsdp_tp_ep", f"{MIXTURE} {Z_LOSS} {ROUTER_Z_LOSS}"),
        ("tp_experts", f"{MIXTURE} {ROUTER_Z_LOSS}"),
        ("fsdp_tp", QK_CLIP),
        ("fsdp_offload", QK_CLIP),
        ("pp_zbv", f"{QK_CLIP} model.n_kv_heads=8"),
        ("cp", f"{QK_CLIP} optimizer=muon"),
        ("fsdp_tp_pp_ep", f"{QK_CLIP} optimizer=muon model=deepseek_v3_debug"),
        # The shared table gets the gradients of both its uses.
        ("fsdp_tp", TIED),
        ("cp", TIED),
        # Against one process with the same rounding; tolerances are those of a mantissa of eight bits.
        ("fsdp_pp_zbv", BFLOAT16),
        ("fsdp_tp", BFLOAT16),
        ("cp_ulysses", BFLOAT16),
        ("fsdp_compiled", LATENTS),
        ("tp_cp_gather", f"{BY_DOCUMENTS} {MIXTURE} model.moe.aux_loss_coeff=1"),
        ("pp_cp_gather_zbv", f"{BY_DOCUMENTS} parallelism.pp_microbatch_size=2"),
        (
            "cp_gather_compiled_recompute_op",
            f"{BY_DOCUMENTS} parallelism.cp=3 training.seq_len=96 training.local_batch_size=4",
        ),
        ("cp4_gather", f"{BY_DOCUMENTS} {QK_CLIP} model=deepseek_v3_debug model.mtp.depth=1"),
        # After ten steps gradients differ by 1.3e-4: a running mean has moved to the next code.
        ("pp_zbv", EIGHT_BIT),
    ],
)
def test_other_jobs_agree_with_one_process(pool, name, typed):
    job = layout(name, *typed.split())
    steps = {SCHEDULED: 3, ROWS_SCHEDULED: 3, EIGHT_BIT: 10}.get(typed, STEPS)
    first = reference(pool, job, steps)[0]
    assert ("gradient of output.weight" in first) == (typed != TIED)
    tolerances = parity.tolerances_of(job, ParityConfig())
    resume = typed in (EIGHT_BIT, SCHEDULED, ROWS_SCHEDULED)
    require_parity(pool, name, job, steps=steps, tolerances=tolerances, resume=resume)


def test_csv_schedule(pool, tmp_path):
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
    )["csv"]
    require_parity(pool, "csv", job, resume=False)


def test_csv_schedule_changed_behind_the_job(pool, tmp_path):
    """The content of the file is part of the job: a changed file is another job and is refused."""
    schedule = tmp_path / "schedule.csv"
    schedule.write_text("0F0,,,0B0\n,1F0,1B0\n")
    overrides = [
        f"parallelism.pp_schedule_csv={schedule}",
        "parallelism=pp",
        "training.global_batch_size=1",
    ]
    matrix = {"csv": " ".join(overrides)}
    job = compose_layouts(ParityConfig(matrix=matrix), [])["csv"]
    schedule.write_text("0F0,,,0I0,0W0\n,1F0,1I0,1W0\n")
    assert compose_layouts(ParityConfig(matrix=matrix), [])["csv"].id != job.id
    with pytest.raises(RankFailed, match="the file changed after the job was composed"):
        pool.run(2, trace, job.to_json(), 1)


def test_reference_learns_and_masks_unevenly(pool):
    """The reference is a real run: gradients differ between steps, labels are masked unevenly."""
    expected = reference(pool, layout("fsdp"))
    tokens = [values["number of tokens"] for values in expected]
    assert len(set(tokens)) > 1 and max(tokens) < 8 * 64
    assert len({round(values["loss"], 6) for values in expected}) == STEPS
    assert all(values["gradient norm"] > 0.1 for values in expected)
    for what in expected[0]:
        if what.startswith("gradient of "):
            assert not torch.equal(expected[0][what], expected[-1][what])


# -- planted errors: each must be found on the ranks, and its place ----

references = {}
rights = {}
RECOMPUTED = "activation_checkpoint=full"
FURTHER = f"{DEEPSEEK} model.mtp.depth=1"
HEAD_NORMS = f"{HYBRID} model.layer_kinds=[full,delta]"
PLANTED = [
    (planted.denominator_of_own_tokens, "fsdp", "", "loss,"),
    (planted.denominator_of_own_positions, "cp", "", "loss,"),
    (planted.further_loss_by_own_tokens, "fsdp", FURTHER, "loss of multi-token prediction"),
    (planted.further_loss_by_own_tokens, "cp_ulysses", FURTHER, "loss of multi-token prediction"),
    (planted.microbatches_average, "pp_1f1b", "", "gradient of output.weight"),
    (planted.gradients_average, "hsdp", "", "gradient of output.weight"),
    (
        planted.gradients_of_experts_double,
        "fsdp_ep",
        MIXTURE,
        "gradient of layers.3.moe.experts.w3",
    ),
    (planted.norm_of_own_stage, "pp_1f1b", "", "gradient norm"),
    (
        planted.norm_without_sinks,
        "tp",
        SINKS,
        "share of layers.0.attention.sinks in the gradient norm",
    ),
    (
        planted.norm_without_experts,
        "fsdp_tp_ep",
        MIXTURE,
        "share of layers.0.moe.experts.w1 in the",
    ),
    (planted.norms_of_shards, "fsdp", "", "norm of the weight of tok_embeddings.weight"),
    (planted.norms_of_own_stage, "pp_1f1b", "", "norm of the gradient of"),
    (
        planted.norms_with_experts_twice,
        "fsdp_ep",
        MIXTURE,
        "norm of the weight of layers.0.moe.experts.w1",
    ),
    (
        planted.norms_without_an_uneven_end,
        "fsdp",
        ODD,
        "norm of the weight of tok_embeddings.weight",
    ),
    (planted.statistics_of_own_stage, "pp_1f1b", "", "statistic rms of"),
    (planted.statistics_of_one_share, "tp", "", "statistic rms of tok_embeddings"),
    (planted.tokens_of_one_share, "tp", MIXTURE, "statistic router_entropy of layers.0"),
    (planted.initialised_by_shard, "fsdp", "", "value of tok_embeddings.weight"),
    (planted.named_by_stage, "pp_1f1b", "", "value of layers.2.attention.wq.weight"),
    (planted.own_positions_from_zero, "cp", "", "output of layers.0.attention.inner"),
    (planted.one_share_in_order, "cp", "", "output of tok_embeddings"),
    (planted.gathered_in_order_of_ranks, "cp_gather", "", "output of layers.0.attention.inner"),
    (
        planted.gathered_in_order_of_ranks,
        "cp_gather",
        BY_DOCUMENTS,
        "output of layers.0.attention.inner",
    ),
    (planted.nothing_before_fragments, "cp", HYBRID, "output of layers.0.delta.inner"),
    (planted.states_of_own_fragments, "cp", HYBRID, "output of layers.0.delta.inner"),
    (
        planted.states_across_documents,
        "cp_gather",
        CHAT,
        "output of layers.0.delta.inner",
    ),
    (planted.convolutions_split_as_one, "tp", HYBRID, "output of layers.0.delta.inner"),
    (planted.labels_in_reverse, "cp_gather", BY_DOCUMENTS, "loss,"),
    (planted.tokens_of_every_context_rank, "fsdp_cp", "", "number of tokens"),
    (planted.loss_of_one_context_rank, "cp", "", "loss,"),
    (planted.normalizer_of_own_vocabulary, "tp_plain_chunked_loss", "", "loss,"),
    (planted.gathered_logits_as_shards, "tp_no_loss_parallel", "", "loss,"),
    (planted.gathered_over_the_wrong_axis, "fsdp_tp", "", "output of layers.0.attention.wq,"),
    (
        planted.recomputed_over_the_wrong_axis,
        "fsdp_tp",
        RECOMPUTED,
        "gradient of layers.3.feed_forward.w3",
    ),
    (
        planted.head_norms_not_summed,
        "tp",
        HEAD_NORMS,
        "gradient of layers.3.delta.norm.weight",
    ),
    (planted.router_gradients_not_summed, "tp", MIXTURE, "gradient of layers.3.moe.router.weight"),
    (planted.auxiliary_loss_of_own_tokens, "tp", MIXTURE, "gradient of layers.3.moe.router.weight"),
    (
        planted.auxiliary_loss_of_own_counts,
        "tp_ep",
        AUXILIARY,
        "gradient of layers.3.moe.router.weight",
    ),
    (planted.biases_of_every_rank, "tp_experts", SINKS, "gradient of layers.3.moe.experts.b2"),
    (planted.rows_by_rank, "ep", DEEPSEEK, "output of layers.1.moe,"),
    (planted.rows_over_capacity_left_out, "ep_capacity", DEEPSEEK, "output of layers.1.moe,"),
    (planted.empty_places_have_rows, "ep_capacity", MIXTURE, "gradient of layers.3.moe.experts"),
    (planted.empty_rows_have_labels, "fsdp_rows", "", "number of tokens"),
    (planted.empty_rows_are_routed, "ep_rows", AUXILIARY, "gradient of layers.3.moe.router.weight"),
    (
        planted.empty_rows_are_counted,
        "ep_rows",
        AUXILIARY,
        "gradient of layers.3.moe.router.weight",
    ),
    (planted.loads_not_summed, "tp", FURTHER, "loads of layers.1.moe,"),
]


@pytest.mark.parametrize(
    ("plant", "name", "typed", "first"),
    PLANTED,
    ids=[f"{plant.__name__}-{name}" for plant, name, *_ in PLANTED],
)
def test_a_planted_error_is_found(pool, plant, name, typed, first):
    # All of these show in the first step.
    job, config = layout(name, *typed.split()), ParityConfig(steps=1, resume=False)
    if job.id not in rights:
        rights[job.id] = LayoutComparer(pool, config, references).verdict(name, job)
    require_agreement(rights[job.id])
    verdict = LayoutComparer(planted.PlantedPool(pool, plant), config, references).verdict(
        name, job
    )
    assert not verdict.passed
    assert verdict.first_wrong.startswith(f"step 1, {first}")


# Errors behind right gradients. Adam divides a gradient by its size, so a wrong clip shows after some steps.
AVERAGED = "optimizer.ema_decay=0.9"
PLANTED_BEHIND = [
    (planted.clipped_by_own_norm, "fsdp", "", r"step \d+, (norm of the )?(update|value) of "),
    (planted.unclipped_stage, "pp_1f1b", "", r"step \d+, (norm of the )?(update|value) of "),
    (
        planted.average_of_earlier_weights,
        "fsdp",
        AVERAGED,
        "step 1, average of tok_embeddings.weight",
    ),
    (planted.clipped_as_first_heads, "tp", QK_CLIP, "step 1, norm of the update of layers.0"),
    (planted.validation_too_large, "fsdp", "", "step 1, validation loss"),
    (planted.loads_of_copies, "tp", "model=mixtral_debug", "step 1, loads of layers.0.moe"),
    (planted.counted_from_the_resume, "fsdp", "", "nothing in a second run, which does not resume"),
]


@pytest.mark.parametrize(
    ("plant", "name", "typed", "first"),
    PLANTED_BEHIND,
    ids=[row[0].__name__ for row in PLANTED_BEHIND],
)
def test_an_error_behind_right_gradients_is_found(pool, plant, name, typed, first):
    job, config = layout(name, *typed.split()), ParityConfig(steps=6)
    longer = {}
    require_agreement(LayoutComparer(pool, config, longer).verdict(name, job))
    verdict = LayoutComparer(planted.PlantedPool(pool, plant), config, longer).verdict(name, job)
    assert not verdict.passed
    assert re.match(first, verdict.first_wrong)


# -- the comparison itself ----


def made_up(scale=1.0, **changes):
    """A trace of two equal steps; a change to None leaves a value out."""
    values = {
        "number of tokens": 90.0,
        "loss": 2.0,
        "gradient of a": torch.tensor([3.0, 4.0]) * scale,
        "gradient of b": torch.tensor([1.0]),
        "share of a in the gradient norm": 25.0 * scale**2,
        "share of b in the gradient norm": 1.0,
        "gradient norm": 5.0,
        "update of a": torch.ones(2),
        "loads of b": torch.tensor([3, 4]),
        **changes,
    }
    return [{what: value for what, value in values.items() if value is not None}] * 2


def test_compare_takes_the_worst_of_every_rank():
    assert compare("x", 1, made_up(), [made_up()], TOLERANCES).passed
    verdict = compare("x", 2, made_up(), [made_up(), made_up(1.001)], TOLERANCES)
    assert not verdict.passed
    assert verdict.worst_parameter == "a"
    assert verdict.gradient == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("loss", math.nan),
        ("loss", 2.0001),
        ("gradient norm", 5.001),
        ("number of tokens", 90.001),
        ("share of b in the gradient norm", None),
        ("loads of b", torch.tensor([3, 5])),
        ("update of a", torch.full((2,), 1.01)),
        ("update of a", None),
        ("gradient of b", None),
        ("gradient of a", torch.tensor([3.0, math.nan])),
    ],
    ids=str,
)
def test_compare_fails(what, value):
    assert not compare("x", 1, made_up(), [made_up(**{what: value})], TOLERANCES).passed


FIRST, SECOND = Piece(torch.tensor([3.0]), (0,)), Piece(torch.tensor([4.0]), (1,))
OTHER = Piece(torch.tensor([4.1]), (1,))


@pytest.mark.parametrize(
    ("pieces", "passes"),
    [
        ((FIRST, SECOND), True),
        ((FIRST, SECOND, FIRST, SECOND), True),
        ((FIRST,), False),
        ((FIRST, OTHER), False),
        # Also where only one of two ranks with the same piece differs.
        ((FIRST, SECOND, FIRST, OTHER), False),
        ((FIRST, OTHER, FIRST, SECOND), False),
        ((FIRST, SECOND, Piece(torch.tensor([5.0]), (2,))), False),
    ],
)
def test_pieces_make_a_whole_tensor(pieces, passes):
    found = [{"gradient of a": piece} for piece in pieces]
    off = difference("gradient of a", torch.tensor([3.0, 4.0]), found)
    assert (off == 0) == passes


def test_changed_numerics_are_refused():
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
def test_what_is_typed_takes_the_place_of_the_small_llama(typed, model, kind):
    job = layout("fsdp", *typed.split())
    assert (job.model.name, job.data.kind, job.cluster.device) == (model, kind, "cpu")


def test_layouts_that_a_model_cannot_have_are_skipped_unless_named():
    matrix = {"one": "parallelism=single", "three": "parallelism=fsdp parallelism.dp_shard=3"}
    refused: dict[str, ConfigError] = {}
    typed = ["model=qwen3_moe_debug"]
    assert list(compose_layouts(ParityConfig(matrix=matrix), typed, refused)) == ["one"]
    assert "8 experts cannot be sharded over 3 ranks" in str(refused["three"])
    with pytest.raises(ConfigError, match="over 3 ranks"):
        compose_layouts(ParityConfig(matrix=matrix, layouts=["three"]), typed, {})


def test_verb_prints_a_table_and_fails_where_one_differs(
    capsys,
):
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
    assert re.search(
        "DIFFERS.*\n    first wrong: step 1, .*, relative difference ", capsys.readouterr().out
    )


def test_a_layout_in_low_precision_may_be_as_exact_as_float32(pool):
    job = layout("fsdp", "precision.param_dtype=bfloat16")
    comparer = LayoutComparer(pool, ParityConfig(steps=2, resume=False))
    alone = single_process(job)
    exact = comparer._reference(in_float32(alone))
    comparer.references[alone.id] = [{**values, LOSS: math.nan} for values in exact]
    require_agreement(comparer._compare("fsdp", job))
