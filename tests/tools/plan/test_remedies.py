"""What would make a job fit: legal changes, planned as typed, and no larger than needed."""

import contextlib
from dataclasses import replace

import pytest
from cases import rows, words

from harness.compose.composer import compose_job
from harness.config.cluster import ClusterConfig
from harness.tools.plan.config import PlanJob
from harness.tools.plan.make import make_plan
from harness.tools.plan.remedies import multiply_ranks, remedies, render_remedies
from harness.tools.plan.verb import plan
from harness.util.encoding import dumps, loads
from harness.util.errors import UserError

GIB = 2**30
JOB = words("""
    model=llama3_debug model.max_seq_len=2048 cluster=slurm_h100 parallelism.dp_shard=4
    training.seq_len=2048 training.global_batch_size=64
""")
UNPIPELINED = [*JOB, "model.tied_embeddings=true"]
"""No pipeline is legal, and none imports torch."""


@pytest.fixture
def limit(monkeypatch):
    """Set the memory of every device, in GiB."""

    def set_limit(gib):
        for where in ("make", "search"):
            monkeypatch.setattr(
                f"harness.tools.plan.{where}.memory_limit", lambda job, device: gib * GIB
            )

    return set_limit


def planned(*overrides):
    return make_plan(compose_job(overrides, config_name="plan", schema=PlanJob).plain)


def found(limit, gib, *overrides):
    job = [*(overrides or UNPIPELINED)]
    limit(gib)
    return remedies(planned(*job), job)


def typed(found):
    return [each.typed for each in found if each.plan.fits]


def test_changes_that_fit(limit):
    """On the same ranks first, by speed; then on more, then with other numbers; none larger than needed."""
    fit = [each for each in found(limit, 3.5) if each.plan.fits]
    assert [(each.typed, each.takes_more, each.changes_numbers) for each in fit] == [
        ("training.local_batch_size=8", False, False),
        ("activation_checkpoint.mode=selective_op", False, False),
        ("parallelism.dp_shard=2 parallelism.tp=2 training.local_batch_size=16", False, False),
        ("parallelism.dp_shard=8", True, False),
        ("precision.param_dtype=bfloat16 precision.master_dtype=bfloat16", False, True),
        ("precision.param_dtype=bfloat16", False, True),
    ]
    changes = found(limit, 1.5)
    assert set(typed(changes)[:2]) == {
        "activation_checkpoint.mode=full",
        "training.local_batch_size=4",
    }
    for smaller in ("training.local_batch_size=8", "activation_checkpoint.mode=selective_op"):
        assert planned(*UNPIPELINED, smaller).fits is False
    # Context is split for long sequences only.
    assert not any("cp=" in each.typed for each in changes)
    long = ["model.max_seq_len=16384", "training.seq_len=16384", "training.global_batch_size=4"]
    changes = found(limit, 1.6, *UNPIPELINED, *long)
    assert "parallelism.dp_shard=2 parallelism.cp=2 training.local_batch_size=1" in typed(changes)
    # A smaller pipeline is found if a larger one does not fit.
    assert "parallelism.pp=2 parallelism.dp_shard=2" in typed(found(limit, 0.5, *JOB))


def test_pairs_of_changes_and_the_closest(limit):
    pairs = [each.overrides for each in found(limit, 0.35) if each.plan.fits]
    assert pairs and {each[0] for each in pairs} == {"training.local_batch_size=1"}
    assert all(len(each) > 1 for each in pairs)
    changes = found(limit, 0.01)
    peaks = [each.plan.peak for each in changes]
    assert peaks == sorted(peaks) and not typed(changes)
    first, *rows, last = render_remedies(changes).splitlines()
    assert first == "no change makes it fit; the closest are" and len(rows) == 4
    assert last == "search=true tries every layout of these ranks"


@pytest.mark.parametrize("gib", [3.5, 0.35])
def test_what_is_typed_gives_what_is_planned(limit, gib):
    """No override is needless: without one, the job is illegal or another one."""
    for each in found(limit, gib):
        made = planned(*UNPIPELINED, *each.overrides)
        assert made.memory == each.plan.memory
        assert each.offloads or made.speed == each.plan.speed
        for left_out in each.overrides:
            fewer = [other for other in each.overrides if other != left_out]
            with contextlib.suppress(UserError):
                assert planned(*UNPIPELINED, *fewer).memory != made.memory


def test_offloading_has_no_known_speed(limit):
    small = ["training.seq_len=64", "training.global_batch_size=4", "activation_checkpoint=full"]
    [offloaded] = [each for each in found(limit, 0.1, *UNPIPELINED, *small) if each.offloads]
    assert offloaded.plan.fits and offloaded.plan.speed is None
    assert any("host" in note for note in offloaded.plan.notes)


def test_from_the_command_line(limit):
    composed = compose_job(UNPIPELINED, config_name="plan", schema=PlanJob)
    fits = plan(composed, UNPIPELINED)
    assert fits.data["remedies"] == [] and "fit; cheapest" not in fits.text
    limit(3.5)
    result = plan(composed, UNPIPELINED)
    plain = loads(dumps(result.data))["remedies"]
    assert plain[0]["overrides"] == ["training.local_batch_size=8"] and plain[0]["fits"]
    assert plain[0]["tokens_per_second_per_rank"] > 0 and not plain[0]["changes_numbers"]
    table = result.text.partition("\neach of these makes it fit; cheapest first\n")[2].splitlines()
    assert table[1].split()[:2] == ["training.local_batch_size=8", "2.45"]
    assert table[4].endswith("8 GPUs") and table[6].endswith("changes the numbers")


@pytest.mark.parametrize(
    ("fields", "world", "change"),
    rows("""
        {kind: slurm}                      16  [cluster.nodes=4]
        {kind: slurm, nodes: 2}            16  [cluster.nodes=4]
        {kind: slurm}                      4   [cluster.ranks=8]
        {kind: slurm, ranks: 8, nodes: 2}  8   [cluster.ranks=16, cluster.nodes=4]
        {kind: local}                      4   [cluster.ranks=8]
        {kind: local}                      8   null
    """),
)
def test_more_ranks_of_a_cluster(fields, world, change):
    cluster = ClusterConfig(**fields, ranks_per_node=8 if fields["kind"] == "slurm" else None)
    found = multiply_ranks(cluster, world, 2)
    assert (found and list(found)) == change
    for each in change or ():
        field, _, value = each.removeprefix("cluster.").partition("=")
        cluster = replace(cluster, **{field: int(value)})
    assert change is None or cluster.nodes_for(2 * world)


def test_a_search_in_which_nothing_fits_names_the_closest_layout(limit):
    typed = [*UNPIPELINED, "parallelism=fsdp_tp", "search=true"]
    limit(0.07)
    with pytest.raises(UserError, match=r"fits; the closest .*; would work: more ranks") as caught:
        plan(compose_job(typed, config_name="plan", schema=PlanJob), typed)
    _, _, closest = str(caught.value).partition("what harness plan says to ")
    assert planned(*UNPIPELINED, *closest.split()).fits is False
