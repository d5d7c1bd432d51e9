"""``harness.train`` on virtual GPUs: launcher, loop, checkpoints, traces and failures of a job for CUDA.

Every rank is a process of its own, as on a node. NCCL's calls return without moving anything; losses are 0.
The jobs are in float32, because the library has no cuDNN attention (harness/tools/rehearse/substitutes.py).
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.checkpoint.catalog import CheckpointFolder
from harness.tools.rehearse.build import library
from harness.tools.rehearse.server import environment
from harness.util.errors import EXIT_USER

pytestmark = pytest.mark.rehearsal

BASE = [
    *(
        "model=llama3_debug",
        "data=synthetic",
        "tokenizer=bytes",
        "precision=fp32",
        "parallelism=fsdp",
    ),
    *("training.steps=4", "parallelism.dp_shard=2"),
]
EXIT_FAILED = 3


# Numbers of rows and shapes of stages that ranks tell each other do not arrive here.
KNOWN_SHAPES = """
from torch.distributed.pipelining import PipelineStage
from harness.parallelism.expert import ExpertExchange
from harness.tools.rehearse import substitutes
ExpertExchange._lengths = substitutes._lengths(0.0)
PipelineStage._prepare_forward_infra = substitutes._shapes_are_known
"""


def train(folder, *overrides, gpus=None):
    command = [sys.executable, "-m", "harness.train", *BASE, f"runs_dir={folder}", *overrides]
    variables = environment(library()) | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)


def run_folder(folder):
    [found] = (path.parent for path in folder.glob("*/[0-9a-f]*/job.json"))
    return found


def result(folder):
    return dict(json.loads((run_folder(folder) / "result.json").read_text()))


@pytest.mark.parametrize("graphs", ["false", "true"])
def test_a_run_saves_asynchronously_traces_and_resumes(graphs, tmp_path):
    watching = ["profiling=on", "profiling.interval=4", "profiling.memory_snapshot=true"]
    saving = [
        f"compile.cuda_graphs={graphs}",
        "checkpoint=async_pinned",
        "checkpoint.interval=2",
        "validation.interval=2",
        "validation.steps=1",
    ]
    done = train(tmp_path, *watching, *saving, gpus="0,1")
    assert done.returncode == 0, done.stderr
    row = result(tmp_path)
    assert (row["exit_reason"], row["step"], row["world_size"]) == ("completed", 4, 2)
    assert row["device"] == "NVIDIA H100 80GB HBM3" and row["memory_gib"] > 0
    run = run_folder(tmp_path)
    checkpoints = CheckpointFolder(str(run / "checkpoints"))
    assert [found.step for found in checkpoints.complete()[0]] == [4, 2]
    assert "step-2 in the background" in done.stdout + done.stderr
    snapshot = pickle.loads((run / "profile" / "step-4" / "memory" / "rank0.pickle").read_bytes())
    assert snapshot["segments"] and snapshot["device_traces"][0]
    assert (run / "profile" / "step-4" / "rank0.json.gz").is_file()
    # As if it had been killed before the end.
    shutil.rmtree(run / "checkpoints" / "step-4")
    (run / "result.json").unlink()
    again = train(tmp_path, *watching, *saving, gpus="0,1")
    assert again.returncode == 0, again.stderr
    row = result(tmp_path)
    assert (row["exit_reason"], row["start_step"], row["step"]) == ("completed", 2, 4)
    other = train(
        tmp_path / "other",
        f"checkpoint.initial_load_path={run}/checkpoints/step-4",
        *saving,
        gpus="0,1",
    )
    assert other.returncode == 0, other.stderr


@pytest.mark.parametrize(
    "overrides",
    [
        "parallelism=fsdp_tp_pp",
        "parallelism=fsdp_cp",
        "parallelism=fsdp_ep model=qwen3_moe_debug",
        "parallelism=fsdp_pp optimizer=muon",
    ],
)
def test_groups_are_made_in_one_order(overrides, tmp_path, monkeypatch):
    """Eight ranks split NCCL's communicators as on GPUs: ranks that do so in different orders would hang."""
    layout = ["parallelism.dp_shard=-1", "cluster.ranks_per_node=8", *overrides.split()]
    sizes = ["training.steps=1", "training.seq_len=64", "training.global_batch_size=8"]
    (tmp_path / "sitecustomize.py").write_text(KNOWN_SHAPES)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).parents[3]}")
    done = train(tmp_path, *layout, *sizes, "checkpoint=disabled", gpus="0,1,2,3,4,5,6,7")
    assert done.returncode == 0, done.stderr
    row = result(tmp_path)
    assert (row["exit_reason"], row["step"], row["world_size"]) == ("completed", 1, 8)


def test_formats_of_products(tmp_path):
    alone = ["parallelism.dp_shard=1", "training.steps=2"]
    done = train(tmp_path / "tf32", *alone, "training.matmul_precision=high")
    assert done.returncode == 0 and "dense tf32" in done.stdout + done.stderr, done.stderr
    narrow = ["precision=float8_tensorwise", "training.attention=flex"]
    done = train(tmp_path / "float8", *alone, *narrow, gpus="0")
    assert done.returncode == 0 and "WARNING" in done.stdout + done.stderr, done.stderr
    assert "compile=on" in done.stdout + done.stderr


def test_more_ranks_than_gpus_are_refused(tmp_path):
    done = train(tmp_path, gpus="0")
    assert done.returncode == EXIT_USER
    assert "the layout takes 2 ranks, one GPU each, and this machine has 1" in done.stderr
    # Where the job is composed, GPUs may not be visible; then the rank that has none refuses.
    done = train(tmp_path / "nine", "parallelism.dp_shard=9", "training.global_batch_size=9")
    assert done.returncode == EXIT_USER
    assert "local rank 8 has no GPU" in done.stderr and "would work: cpu" in done.stderr


def test_a_run_out_of_memory_says_so_and_leaves_a_snapshot(tmp_path):
    large = [
        "training.seq_len=8192",
        "training.local_batch_size=256",
        "training.global_batch_size=512",
    ]
    done = train(
        tmp_path, *large, "profiling=on", "profiling.interval=4", "profiling.memory_snapshot=true"
    )
    assert done.returncode == EXIT_FAILED, done.stderr
    row = result(tmp_path)
    assert (row["exit_reason"], row["error.kind"]) == ("failed", "out_of_memory")
    [snapshot] = run_folder(tmp_path).glob("profile/*/memory/rank0-out-of-memory.pickle")
    assert pickle.loads(snapshot.read_bytes())["segments"]


@pytest.mark.parametrize(
    "overrides",
    [
        "data.attend_across_documents=false compile=on",
        "training.attention=flex data.attend_across_documents=false",
        "parallelism=fsdp_tp parallelism.tp=2 validation.interval=2",
    ],
)
def test_mixtures_of_scheduled_sizes(tmp_path, overrides):
    """Losses of sources are added up on the device; each length has its own executor, kernels and stages."""
    source = "{kind: local, paths: ['{stdlib}/json/*.py'], validation_fraction: 0.5}"
    sources = [
        "data=mixture",
        f"data.sources={{web: {source}, code: {source}}}",
        "data.weights={web: 3, code: 1}",
    ]
    sizes = ["training.seq_len=64", "training.global_batch_size=8", "schedule.warmup_steps=1"]
    sizes += [
        "schedule.batch_size=[{until_step:1,sequences:4}]",
        "schedule.seq_len=[{until_step:2,tokens:32}]",
    ]
    words = [f"data.cache_dir={tmp_path}", "tokenizer=python_2k", "model.vocab_size=2048"]
    done = train(
        tmp_path, "data=mixture", *sources, *sizes, *words, *overrides.split(), gpus="0,1,2,3"
    )
    assert done.returncode == 0, done.stderr
    rows = [
        json.loads(line)
        for line in (run_folder(tmp_path) / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in rows if "loss.web" in row]
    assert [row["tokens"] for row in steps] == [4 * 32, 4 * 32 + 8 * 32, 384 + 512, 384 + 1024]
    assert {"valid_tokens.web", "epochs.code"} <= steps[-1].keys()


def test_flex_attention_of_many_lengths_is_compiled(tmp_path):
    """Two masks, with gradients and without, for each length; torch's limit is eight graphs of a function."""
    lengths = [
        "training.seq_len=128",
        "schedule.warmup_steps=1",
        "validation.interval=1",
        "validation.steps=1",
    ]
    lengths += ["schedule.seq_len=[{until_step:1,tokens:32},{until_step:2,tokens:64}]"]
    model = ["model=gpt_oss_debug", "training.attention=flex", "parallelism.dp_shard=1"]
    done = train(tmp_path, *model, *lengths, gpus="0")
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "recompile_limit" not in output and "unfused" not in output
    assert "in the first step" in output and "graphs compiled for sequences of 128 tokens" in output
    assert result(tmp_path)["recompiles"] == 0


def test_conversations(tmp_path):
    """Packed conversations; the kernel of varlen needs lengths that a virtual GPU does not compute."""
    file = tmp_path / "a.jsonl"
    turns = [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "It is a test."},
    ]
    file.write_text(f"{json.dumps({'messages': turns})}\n" * 64)
    chat = [
        "data=chat",
        f"data.paths=[{file}]",
        "data.chat_template=plain",
        f"data.cache_dir={tmp_path}",
    ]
    for attention in ("flex", "sdpa"):
        kernel = [f"training.attention={attention}", "training.seq_len=64"]
        done = train(
            tmp_path / attention,
            *chat,
            *kernel,
            "model.vocab_size=2048",
            "tokenizer=python_2k",
            gpus="0,1",
        )
        assert done.returncode == 0, done.stderr


def test_the_doctor_looks_at_gpus():
    """Its numbers mean nothing here; each check runs to its end."""
    variables = environment(library()) | {"CUDA_VISIBLE_DEVICES": "0,1"}
    command = [sys.executable, "-m", "harness", "doctor", "precision=float8_tensorwise", "--json"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    found = {row["what"]: row for row in json.loads(done.stdout)["checks"]}
    assert "fail" not in {row["verdict"] for row in found.values()}, done.stdout
    assert (
        "2 x NVIDIA H100 80GB HBM3" in found["GPUs"]["found"]
        and "planned 338" in found["links"]["found"]
    )
    assert found["attention"]["found"].startswith("bfloat16 takes CUDNN_ATTENTION")


def test_tests_of_a_gpu_whose_values_do_not_matter():
    """By flash attention: the library has no cuDNN."""
    run = "import pytest, sys, torch; torch.backends.cuda.enable_cudnn_sdp(False); sys.exit(pytest.main())"
    variables = environment(library()) | {"CUDA_VISIBLE_DEVICES": "0"}
    chosen = ["-m", "gpu(values=False)", "-n", "0", str(Path(__file__).parents[2] / "test_gpu.py")]
    done = subprocess.run(
        [sys.executable, "-c", run, *chosen], env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0 and "12 passed" in done.stdout, done.stdout[-3000:]
