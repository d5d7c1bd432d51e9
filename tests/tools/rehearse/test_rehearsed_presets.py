"""Every preset of how a job is laid out and run, rehearsed: what a step calls, and what it takes.

Nothing is computed, so shapes may be those of real models; only the mixtures are debug models. A preset that
is new is rehearsed too, because the lists are those of conf/.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from test_docs import FIRST_HOUR, GPUS, runs_of_the_first_hour

from harness.compose.composer import compose_job
from harness.config.fields import with_value
from harness.model.spec import tensors
from harness.tools.plan.loads import rows_by_rank
from harness.tools.plan.make import make_plan
from harness.tools.plan.plan import Plan
from harness.tools.rehearse.config import RehearseJob, ranks_to_rehearse
from harness.tools.rehearse.figures import OUT_OF_MEMORY, RankFigures
from harness.tools.rehearse.render import memory_lines, traffic_lines
from harness.tools.rehearse.server import rehearse_rank

pytestmark = pytest.mark.rehearsal

CONF = Path(__file__).parents[3] / "conf"
DENSE = [
    *("model=llama32_1b", "model.tied_embeddings=false", "training.seq_len=4096"),
    *("training.global_batch_size=null", "training.local_batch_size=4", "cluster=slurm_h100"),
]
SHAPE = ["training.seq_len=512", "training.global_batch_size=16", "cluster=slurm_h100"]
MIXTURE = ["model=deepseek_v3_debug", *SHAPE]
FLUX = [
    *("model=flux_debug", "data=latents_synthetic", "training.seq_len=272", *SHAPE[1:]),
    "parallelism.cp_method=ulysses",
]
SMALL = ["model=llama3_debug", *SHAPE]
MASK = "data.attend_across_documents=false"
ON_RANK_3 = "parallelism=hsdp rehearse.ranks=[3]"
GATHERS = "precision.enable_fsdp_float8_all_gather=true"

EXPERTS = {"parallelism/expert.py", "model/grouped.py"}
"""Where rows travel to experts the host has to know how many."""

SMALL_SUMS = 2**22
"""Bytes of a step's sums that the plan leaves out."""


@dataclass(frozen=True)
class Rehearsed:
    """Ranks of a job beside their plan."""

    plan: Plan
    ranks: list[RankFigures]


def rehearsed(*overrides):
    named = {each.partition("=")[0] for each in overrides}
    common = ("data=synthetic", "tokenizer=bytes", "precision=bf16")
    typed = [*(each for each in common if each.split("=")[0] not in named), *overrides]
    job = compose_job(typed, config_name="rehearse", schema=RehearseJob)
    ranks = [
        rehearse_rank(job.plain, rank, job.rehearse)
        for rank in ranks_to_rehearse(job, job.rehearse)
    ]
    plain = job.plain
    if job.debug.routing is None:
        # Nothing is computed, so every expert has as many rows; a plan takes the busiest rank's.
        plain = with_value(plain, "model.moe.force_balance", job.model.moe.enabled)
    return Rehearsed(make_plan(plain), ranks)


def options(group):
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def check(found, *, waits=frozenset()):
    """Check what holds for every step: it ends, calls nothing unknown, waits only where it must."""
    for figures in found.ranks:
        assert figures.failure is None, figures.failure
        assert figures.unknown == []
        assert figures.communicators == [], (
            "a communicator is made in the first step, and none later"
        )
        assert {wait.where.partition(":")[0] for wait in figures.waits} <= waits, figures.waits
        assert figures.recompilations == 0
        memory = {line.name: line for line in memory_lines(figures, found.plan)}
        for name in ("parameters", "gradients", "optimizer"):
            check_close(memory[name], 0.02)
        assert figures.allocation_retries == 0


def check_close(line, tolerance):
    assert line.planned is not None
    assert line.rehearsed == pytest.approx(line.planned, rel=tolerance, abs=2**20), line


def check_collectives(found):
    """Check that a step has the collectives that are planned, with their bytes, and no others of any size."""
    for figures in found.ranks:
        for line in traffic_lines(figures, found.plan):
            if line.name.startswith("optimizer") and line.unit == "count":
                continue  # the plan knows the volume of Muon's exchange, and not its rounds
            if line.planned is None:
                # Sums of counts, of squares, and of gradients of norms.
                assert line.name.endswith("all_reduce"), line
                assert line.unit == "count" or line.rehearsed < SMALL_SUMS, line
            elif line.unit == "bytes":
                assert line.rehearsed == pytest.approx(line.planned, rel=0.02), line
            elif not line.name.endswith("all_reduce"):
                assert abs(line.rehearsed - line.planned) <= 0.02 * line.planned, line


@pytest.mark.parametrize("preset", options("parallelism"))
def test_layouts(preset):
    experts = "ep" in preset.split("_")
    found = rehearsed(*(MIXTURE if experts else DENSE), f"parallelism={preset}")
    check(found, waits=EXPERTS if experts else set())
    check_collectives(found)
    if found.plan.job.fsdp_ranks == 1:
        # Parameters are cast and gradients reduced in place; torch would copy 1.5 times the gradients' bytes.
        for figures in found.ranks:
            copied = sum(copy.bytes for copy in figures.copies if copy.how == "device to device")
            assert copied < 0.3 * figures.memory["gradients"]
    if found.plan.job.parallelism.pp == 1 and not experts:
        for figures in found.ranks:
            check_close(
                {line.name: line for line in memory_lines(figures, found.plan)}["reserved"], 0.2
            )


@pytest.mark.parametrize(
    "choice",
    [
        *(
            "parallelism=fsdp",
            "parallelism=hsdp",
            "parallelism=fsdp_tp",
            "parallelism=fsdp_cp",
            "compile=on",
        ),
        *("precision=float8_rowwise", "activation_checkpoint=full"),
    ],
)
def test_flux(choice):
    """Its batches are pictures."""
    layout = [] if choice.startswith("parallelism") else ["parallelism=fsdp"]
    found = rehearsed(*FLUX, *layout, choice)
    check(found)
    [figures] = found.ranks
    formats = {product.formats for product in figures.products}
    assert any(name.startswith("float8") for name in formats) == choice.startswith(
        "precision=float8"
    )
    assert "bfloat16" in formats


@pytest.mark.parametrize("preset", options("precision"))
def test_formats(preset):
    on = ["cluster.accelerator=B200"] if preset == "mxfp8" else []
    found = rehearsed(*SMALL, "parallelism=fsdp", f"precision={preset}", *on)
    if preset == "mxfp8" and torch.__version__ >= "2.15":
        [failure] = [figures.failure for figures in found.ranks]
        assert (
            failure is not None and "do not load with the Triton of torch 2.15" in failure.message
        )
        return
    check(found)
    [figures] = found.ranks
    formats = {product.formats for product in figures.products}
    narrow = [name for name in formats if name.startswith("float8")]
    assert bool(narrow) == (preset.startswith("float8") or preset == "mxfp8")
    wide = {"fp32": "float32"}.get(preset, "bfloat16")
    assert wide in formats, "the head is not narrowed, and the tables are not multiplied"


@pytest.mark.parametrize(
    "override",
    [
        *(f"parallelism=hsdp_tp optimizer={preset}" for preset in options("optimizer")),
        *(
            f"parallelism=fsdp activation_checkpoint={preset}"
            for preset in options("activation_checkpoint")
        ),
        "parallelism=fsdp_tp optimizer.state_dtype=8bit",
        "parallelism=fsdp parallelism.fsdp_prefetch=3 training.flash=FA3",
        *(
            f"{ON_RANK_3} parallelism.fsdp_buffers={buffers}"
            for buffers in ("registered", "symmetric")
        ),
    ],
)
def test_updates_and_recomputation(override):
    """Muon sends pieces of every matrix over FSDP's, the replicas' and tensor parallel's ranks."""
    compiled = ["compile=on"] if "memory_budget" in override else []
    found = rehearsed(*DENSE, *compiled, *override.split())
    check(found)
    check_collectives(found)
    [figures] = found.ranks
    assert "muon" not in override or figures.launches < 1500, "most kernels are of many matrices"
    if "lion" in override or "8bit" in override:
        updates = sum(
            count for name, count in figures.kernels.items() if name.startswith("triton_")
        )
        assert updates == len(tensors(found.plan.job.model)), "one kernel each"
    check_close({line.name: line for line in memory_lines(figures, found.plan)}["reserved"], 0.2)


ZERO_BUBBLE = [
    *("parallelism.pp=2", "training.local_batch_size=8", "training.global_batch_size=null"),
    *("training.seq_len=512", "cluster=slurm_h100"),
]


@pytest.mark.parametrize("mode", ["none", "full", "selective_op", "full compile=on"])
@pytest.mark.parametrize(
    "overrides",
    [
        "model=llama3_debug parallelism=pp parallelism.pp_schedule=InterleavedZeroBubble",
        "model=llama3_debug parallelism=tp_pp parallelism.pp_schedule=ZBVZeroBubble",
        "model=deepseek_v3_debug parallelism=fsdp_ep_pp parallelism.pp_schedule=ZBVZeroBubble",
    ],
    ids=["pp", "tp", "ep"],
)
def test_a_split_backward_pass_recomputes_a_block_once(overrides, mode):
    """torch calls autograd for the inputs, and then again for every group of parameters."""
    typed = [*ZERO_BUBBLE, *overrides.split(), *f"activation_checkpoint={mode}".split()]
    found = rehearsed(*typed)
    check(found, waits=EXPERTS)
    for figures in found.ranks:
        waits = sum(wait.count for wait in figures.waits)
        assert waits in (0, 24), "one for a layer with experts and a microbatch"


@pytest.mark.parametrize(
    "override",
    [
        *(f"compile={preset}" for preset in options("compile")),
        "compile=on,compile.mode=coordinate-descent",
        *(f"cluster.accelerator={name}" for name in ("A100 SXM 80GB", "H200 SXM", "B200")),
    ],
)
def test_compilation_and_other_gpus(override):
    found = rehearsed(*SMALL, "parallelism=fsdp", *override.split(","))
    check(found)
    [figures] = found.ranks
    compiled = override.startswith("compile") and override != "compile=off"
    assert (figures.graphs > 0) == compiled
    assert any(name.startswith("triton_") for name in figures.kernels) == compiled
    rotations = 0 if compiled else 2 * found.plan.job.model.n_layers
    assert figures.kernels.get("_turn", 0) == rotations, (
        "queries and keys at once, forward and backward"
    )
    assert override.startswith("compile") or override.partition("=")[2].split()[0] in figures.device


@pytest.mark.parametrize(
    "overrides",
    [
        [*SMALL, "parallelism=fsdp_cp", "precision=fp32"],
        [*DENSE, "parallelism=fsdp", "precision=fp32", "training.local_batch_size=1"],
        [*DENSE, "parallelism=fsdp", "data=python_stdlib", MASK, "training.seq_len=4032"],
    ],
    ids=["ring", "float32", "mask"],
)
def test_memory_efficient_attention(overrides):
    """Of float32, and of masks of half tiles: neither all scores of a head, nor cuDNN's gradients."""
    found = rehearsed(*overrides)
    check(found)
    [figures] = found.ranks
    kernels = " ".join(figures.kernels)
    assert ("mem_eff" in kernels or "fmha" in kernels) and "cudnn" not in kernels


@pytest.mark.parametrize("local_batch_size", [1, 4])
def test_asynchronous_tensor_parallel_multiplies_what_comes_piece_by_piece(local_batch_size):
    layout = [
        "parallelism=fsdp_tp",
        "compile=on",
        f"training.global_batch_size={4 * local_batch_size}",
    ]
    both = [
        rehearsed(*SMALL, *layout, f"parallelism.async_tp={async_tp}")
        for async_tp in ("false", "true")
    ]
    for found in both:
        check(found)
    plain, pieces = (found.ranks[0] for found in both)
    assert pieces.product_count > plain.product_count
    assert pieces.product_flops == plain.product_flops
    gathered = [
        sum(
            each.count
            for each in figures.collectives
            if (each.axis, each.kind) == ("tp", "all_gather")
        )
        for figures in (plain, pieces)
    ]
    assert gathered == [26, 2], "all of the blocks'"


@pytest.mark.parametrize("local_batch_size", [1, 4])
def test_a_single_sequence_is_split_without_copies(local_batch_size):
    batch = f"training.global_batch_size={local_batch_size}"
    [figures] = rehearsed(*SMALL, "parallelism=tp", batch).ranks
    joined = sum(count for name, count in figures.kernels.items() if "CatArray" in name)
    scattered = sum(each.count for each in figures.collectives if each.kind == "reduce_scatter")
    assert (joined < scattered) == (local_batch_size == 1)


@pytest.mark.parametrize(
    "overrides",
    [
        [*DENSE, "parallelism=fsdp", "activation_checkpoint=selective_op"],
        [*SMALL, "parallelism=hsdp_tp", "optimizer=muon", "training.loss_chunks=4"],
        [
            *SMALL,
            "parallelism.dp_shard=1",
            "cluster.ranks_per_node=1",
            "training.local_batch_size=4",
        ],
        [*SMALL, "parallelism=fsdp_cp", "optimizer.ema_decay=0.9", "optimizer=lion"],
        [*SMALL, "parallelism=fsdp", "precision=float8_tensorwise", GATHERS, "compile=on"],
        [*MIXTURE, "parallelism=fsdp", "parallelism.reshard_after_forward=always"],
        [*MIXTURE, "parallelism=fsdp_ep", "parallelism.ep_capacity=1.25"],
    ],
    ids=["fsdp", "muon", "alone", "ring", "float8", "experts", "exchange"],
)
def test_a_captured_step_is_launched_as_two_graphs(overrides):
    plain, captured = (
        rehearsed(*overrides, f"compile.cuda_graphs={graphs}") for graphs in ("false", "true")
    )
    check(plain)
    check(captured)
    [host], [device] = plain.ranks, captured.ranks
    assert (host.replays, device.replays) == (0, 2)
    assert host.host_launches == host.launches + host.product_count
    assert device.host_launches < 20 and device.replayed > host.host_launches - 20
    assert (device.products, device.collectives) == (host.products, host.collectives)
    # In a graph the scales of losses are tensors; a mixture has one per layer and pass.
    scales = 24 if MIXTURE[0] in overrides else 8
    assert abs(device.launches - host.launches) < scales
    assert device.memory["allocated"] <= 1.02 * host.memory["allocated"] + 2**22
    assert device.memory["reserved"] <= 1.05 * host.memory["reserved"] + 2**27


@pytest.mark.parametrize(
    "overrides",
    [
        "parallelism=fsdp_ep activation_checkpoint=full compile=on",
        "parallelism=fsdp_ep activation_checkpoint=selective_op compile=on",
        "parallelism=fsdp_tp_pp_ep activation_checkpoint=full",
    ],
)
def test_messages_of_a_fixed_size_need_no_wait(overrides):
    found = rehearsed(*MIXTURE, *overrides.split(), "parallelism.ep_capacity=1.5")
    check(found)
    check_collectives(found)
    for figures in found.ranks:
        assert figures.graphs <= 3, "a block is one graph: dense, or with experts"


@pytest.mark.parametrize("broken", ["training.attention=varlen", "parallelism.cpu_offload=true"])
def test_what_a_capture_does_not_allow_fails_as_on_a_gpu(broken):
    typed = [
        *SMALL,
        "parallelism=fsdp",
        "data=python_stdlib",
        "tokenizer=bytes",
        "precision=bf16",
        MASK,
        broken,
    ]
    job = compose_job(typed, config_name="rehearse", schema=RehearseJob)  # graphs would be refused
    figures = rehearse_rank(with_value(job.plain, "compile.cuda_graphs", True), 0, job.rehearse)
    assert figures.failure is not None and "captur" in figures.failure.message


def test_memory_that_is_not_there_is_missed_as_on_a_gpu():
    [figures] = rehearsed(
        "model=llama3_8b", "parallelism=fsdp", "cluster=slurm_h100", "training.seq_len=8192",
        "training.global_batch_size=32",
    ).ranks  # fmt: skip
    assert figures.failure is not None
    assert (figures.failure.kind, figures.failure.step) == (OUT_OF_MEMORY, 0)
    assert "Tried to allocate" in figures.failure.message
    assert figures.failure.where.startswith(("model/", "train/", "parallelism/"))


def test_skewed_routing_takes_more_memory_on_the_first_rank():
    shape = ["model=deepseek_v3_debug", "training.seq_len=2048", "training.global_batch_size=16"]
    shape += ["parallelism=fsdp_ep", "cluster=slurm_h100"]
    even, skewed = (rehearsed(*shape, f"rehearse.skew={skew}").ranks[0] for skew in (0.0, 0.5))
    assert skewed.memory["allocated"] > even.memory["allocated"]


@pytest.mark.parametrize(
    ("how", "passes"), [("", 1), ("activation_checkpoint=full parallelism.tp=2", 2)]
)
def test_a_workload_takes_what_the_plan_counts(how, passes):
    """Bytes are those of counts, and of rows to others and back, in every pass and in backward."""
    typed = ["model=qwen3_moe_debug", "model.dim=512", "model.moe.hidden_dim=512", *SHAPE[1:]]
    typed += ["training.seq_len=2048", "parallelism.dp_shard=4", "parallelism.ep=4", *how.split()]
    found = rehearsed(*typed, "debug.routing=zipf", "rehearse.ranks=[0,1]")
    check(found, waits=EXPERTS)
    check_close(memory_lines(found.ranks[0], found.plan)[3], 0.05)  # allocated
    job = found.plan.job
    for figures in found.ranks:
        expected = 0
        for layer in job.model.expert_layers:
            rows = rows_by_rank(job, layer)[0].fill_diagonal_(0)
            moved = int(rows[figures.rank].sum() + rows[:, figures.rank].sum())
            counts = 8 * job.model.moe.num_experts * 3 // 4
            expected += passes * counts + (1 + passes) * 2 * job.model.dim * moved
        assert [each.bytes for each in figures.collectives if each.axis == "ep"] == [expected]


@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("precision", ["bf16", "float8_rowwise"])
def test_a_rank_of_experts_without_rows(precision, compiled):
    typed = [*MIXTURE, "parallelism=fsdp_ep", f"precision={precision}", f"compile={compiled}"]
    empty, even = (rehearsed(*typed, f"rehearse.skew={skew}") for skew in (-1.0, 0.0))
    check(empty, waits=EXPERTS)
    assert empty.ranks[0].memory["allocated"] < even.ranks[0].memory["allocated"]
    assert empty.ranks[0].graphs <= even.ranks[0].graphs, (
        "its peers would wait for a graph of its own"
    )


def test_every_rank_of_a_world_can_be_rehearsed():
    """Ranks that hold equal shares do the same."""
    found = rehearsed(*SMALL, "parallelism=hsdp_tp", "rehearse.ranks=[0,3,7]")
    check(found)
    kinds = [
        [(each.axis, each.kind, each.count) for each in figures.collectives]
        for figures in found.ranks
    ]
    assert kinds[0] == kinds[1] == kinds[2]
    assert {axis for axis, *_ in kinds[0]} == {"dp", "tp", "world"}


HOUR = [
    pytest.param(*run, marks=[pytest.mark.thorough] * ("compile=on" in run[1]), id=" ".join(run[1]))
    for run in runs_of_the_first_hour()
]


@pytest.mark.parametrize(("section", "words"), HOUR)
def test_the_first_hour_fits(section, words, monkeypatch):
    gpus = GPUS[section]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    nodes = ["cluster=slurm_h100", f"cluster.ranks_per_node={gpus.count(',') + 1}"]
    # A rehearsal saves nothing, and refuses fields of what is saved.
    rehearsable = [word for word in words if not word.startswith("checkpoint")]
    found = rehearsed(*rehearsable, *nodes)
    check(found, waits=EXPERTS)
    reserved = max(figures.memory["reserved"] for figures in found.ranks) / 2**30
    shown = re.findall(r"\| ([\d.]+) \|$", FIRST_HOUR.read_text(), re.MULTILINE)
    near = (
        {"abs": 0.3} if torch.__version__ < "2.14" else {"rel": 0.04}
    )  # the page has torch 2.13's
    assert "metrics.warmup_steps=2" not in words or reserved in [
        pytest.approx(float(x), **near) for x in shown
    ]
