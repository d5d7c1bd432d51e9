"""torch.compile: shared graphs, counters and refused settings; parity is tested by the matrix."""

from functools import partial
from unittest import mock

import jobs
import pytest
import torch
from cases import words
from torch._dynamo.exc import FailOnRecompileLimitHit

from harness.config.fields import with_value
from harness.config.job import Job
from harness.model.feed_forward import gated
from harness.parallelism.compile import CompileWatch, _of_several_rows, prepare_compiler
from harness.train.engine import Engine
from harness.train.setup import process_group

CPU = torch.device("cpu")
COMPILED = words("""
    training.steps=10 training.seq_len=32 training.global_batch_size=4 compile=on
    compile.backend=aot_eager
""")


def graphs_after_two_steps(*overrides):
    job = jobs.tiny(*COMPILED, "model.n_layers=1", *overrides)
    with process_group(job, CPU):
        return graphs_of_rank(job.to_json())[0]


def graphs_of_rank(job):
    """Graphs that two steps compile, and graphs that a third one compiles again."""
    watch, engine = CompileWatch(), Engine(Job.from_json(job), CPU)
    for _ in range(2):
        engine.update(engine.gradients(jobs.random_batch(4, 32)).grad_norm)
    graphs = watch.graphs
    watch.mark_expected()
    engine.gradients(jobs.random_batch(4, 32))
    return graphs, watch.unexpected


def test_depth_adds_no_graphs():
    """Blocks share compiled code: one graph for all blocks, and one for the loss."""
    assert graphs_after_two_steps() == graphs_after_two_steps("model.n_layers=3") == 2
    assert graphs_after_two_steps("compile.components=[blocks]") == 1
    assert graphs_after_two_steps("compile.components=[loss]") == 1
    assert graphs_after_two_steps("compile.components=[blocks,loss]", "training.loss_chunks=2") == 2


def test_the_loss_of_a_split_vocabulary_is_compiled(pool):
    """Rows of parity compare its values."""
    job = jobs.tiny(*COMPILED, "compile.components=[loss]", "parallelism=tp", "model.n_layers=1")
    assert pool.run(2, graphs_of_rank, job.to_json()) == [(1, 0)] * 2


def test_a_new_number_of_rows_compiles_nothing(pool):
    """Blocks in pieces: the loss; attention, three pieces of routing, and the gate between the products."""
    layout = ("model=qwen3_moe_debug", "parallelism=fsdp_ep", "training.global_batch_size=16")
    assert pool.run(4, graphs_of_rank, jobs.tiny(*COMPILED, *layout).to_json()) == [(6, 0)] * 4


def losses_of_rank(job, cache):
    """The loss, compiled twice with one cache; torch reads the variable whenever it opens a cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
        return [
            Engine(Job.from_json(job), CPU).gradients(jobs.random_batch(4, 32)).loss
            for _ in range(2)
        ]


def test_ranks_that_share_a_cache_get_their_own_graphs(pool, tmp_path):
    layout = ("parallelism=tp", "model.n_layers=1")
    compiled = jobs.tiny(
        *COMPILED, *layout, "compile.components=[loss]", "compile.backend=inductor"
    )
    eager = jobs.tiny("training.seq_len=32", *layout)
    (expected, _), _ = pool.run(2, losses_of_rank, eager.to_json(), str(tmp_path))
    for losses in pool.run(2, losses_of_rank, compiled.to_json(), str(tmp_path)):
        assert losses == pytest.approx([expected] * 2, rel=1e-5)


def test_a_new_shape_is_counted_as_unexpected():
    job = jobs.tiny(*COMPILED, "model.n_layers=1", "training.local_batch_size=4")
    with process_group(job, CPU):
        Engine(job, CPU).gradients(
            jobs.random_batch(4, 32)
        )  # compile time before the watch begins is not counted
        watch, engine = CompileWatch(), Engine(job, CPU)
        engine.gradients(jobs.random_batch(4, 32))
        watch.mark_expected()
        engine.gradients(jobs.random_batch(4, 32))
        assert watch.unexpected == 0
        engine.gradients(jobs.random_batch(2, 32))
        assert watch.unexpected > 0
        assert watch.seconds > 0


def test_a_graph_break_is_an_error(monkeypatch):
    from harness.model.feed_forward import FeedForward

    original = FeedForward.forward

    def forward(self, x):
        torch._dynamo.graph_break()
        return original(self, x)

    monkeypatch.setattr(FeedForward, "forward", forward)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        graphs_after_two_steps()


@pytest.mark.parametrize(
    ("override", "compiles"),
    [
        ("optimizer=adamw", False),
        *(
            (f"optimizer={options}", True)
            for options in ("lion", "adamw optimizer.state_dtype=8bit")
        ),
        ("precision=bf16_full", True),
        ("model=llama3_debug training.attention=flex", True),
    ],
)
def test_what_is_compiled_on_gpus_without_being_asked_for(override, compiles):
    job = jobs.tiny("cluster=slurm", "cluster.device=cuda", *override.split())
    assert (job.compiles(on_gpu=True), job.compiles(on_gpu=False)) == (compiles, False)


def test_numbers_of_rows_of_an_expert_rank_share_a_graph():
    """Peers wait for a rank that compiles; torch compiles for 0 and for 1 row anew."""
    gate = partial(gated, activation="swiglu")
    torch._dynamo.reset()
    watch = CompileWatch()
    chosen = _of_several_rows(gate, torch.compile(gate, backend="aot_eager", dynamic=True))
    for rows in (5, 0, 1, 7, 2):
        both = (torch.randn(rows, 4, requires_grad=True) for _ in range(2))
        chosen(*both).sum().backward()
    assert watch.graphs == 1


@pytest.mark.parametrize(
    "layout, pieces", [([], 1), (["parallelism=cp", "parallelism.cp_method=gather"], 2)]
)
def test_the_limit_of_graphs_is_for_all_lengths(monkeypatch, layout, pieces):
    """Two masks, with gradients and without, for each length; nobody asks to compile FlexAttention."""
    lengths = [{"until_step": step, "tokens": 16 * step} for step in range(1, 4)]
    typed = "model=llama3_debug training.attention=flex cluster=slurm cluster.device=cuda"
    job = jobs.tiny(*typed.split(), *layout)
    job = with_value(job, "schedule.seq_len", lengths)
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    prepare_compiler(job, torch.device("cuda"))
    assert torch._dynamo.config.recompile_limit >= 8 * pieces * len(job.sizes.lengths) > 8


def test_more_graphs_than_the_limit_are_an_error():
    prepare_compiler(jobs.tiny(*COMPILED), CPU)
    doubled = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(FailOnRecompileLimitHit):
        for length in (2, 3):
            doubled(torch.ones(length))


def test_a_run_prints_what_it_compiled(tmp_path, capsys):
    """Validation's own graph, without gradients, does not count as a recompilation."""
    import json

    done = jobs.train(
        tmp_path,
        *(*COMPILED, "checkpoint=disabled", "metrics.console=plain", "training.steps=4"),
        *("validation.interval=2", "validation.steps=1", "schedule.warmup_steps=1"),
    )
    assert done.code == 0
    output = capsys.readouterr().out
    assert "compiled 2 graphs in" in output
    assert "again" not in output
    row = json.loads((done.folder.path / "result.json").read_text())
    assert row["recompiles"] == 0
    assert row["compile_seconds"] > 0


# -- asynchronous tensor parallel: the compiler pass, tested on CPUs with torch's own fallbacks ----


def fused_calls(job_json, cache):
    """Number of calls of the two fused operations in one step, and the gradient norm."""
    import torch.distributed as dist
    from torch.distributed import _symmetric_memory as symmetric

    from harness.parallelism import parallelize

    calls = {"fused_all_gather_matmul": 0, "fused_matmul_reduce_scatter": 0}
    library = torch.library.Library("symm_mem", "IMPL")

    def count(name):
        fallback = getattr(symmetric, f"_{name}_fallback")

        def call(*args, **kwargs):
            calls[name] += 1
            return fallback(*args, **kwargs)

        library.impl(name, call, "CPU")

    for name in calls:
        count(name)

    def enable(mesh, device):
        symmetric.enable_symm_mem_for_group(mesh.get_group().group_name)

    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            mock.patch.object(dist, "is_nccl_available", lambda: True),
            mock.patch.object(parallelize, "enable_async", enable),
        ):
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
            norm = (
                Engine(Job.from_json(job_json), CPU).gradients(jobs.random_batch(4, 32)).grad_norm
            )
    finally:
        torch._inductor.config._micro_pipeline_tp = False
        library._destroy()
    return *calls.values(), norm


@pytest.mark.thorough  # the compiler takes twenty seconds
def test_async_tensor_parallel_is_in_the_graph(pool, tmp_path):
    layout = ("parallelism=tp", "compile.backend=inductor", "training.local_batch_size=4")
    job = jobs.tiny(*COMPILED, *layout, "model.n_layers=1", "compile.components=[blocks]")
    # Set here, because it is refused on a CPU.
    for_fallback = with_value(job, "parallelism.async_tp", True)
    fused = pool.run(2, fused_calls, for_fallback.to_json(), str(tmp_path))
    plain = pool.run(2, fused_calls, job.to_json(), str(tmp_path))
    for gathers, scatters, norm in fused:
        # At least these in forward: gathers before wq wk wv and w1 w3, scatters after wo and w2.
        assert gathers >= 2 and scatters >= 2
        assert norm == pytest.approx(plain[0][2], rel=1e-5)
    assert [calls[:2] for calls in plain] == [(0, 0)] * 2
