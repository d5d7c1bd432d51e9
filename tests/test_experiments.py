"""What experiments/ measures: tables and ratios of made-up rows, what fits, and how memory is counted."""

import argparse
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from processes import python

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments" / "cpu_baseline"))
sys.path.insert(0, str(Path(__file__).parents[1] / "experiments" / "gpu_single"))
sys.path.insert(0, str(Path(__file__).parents[1] / "experiments" / "llama3_h100"))
sys.path.insert(0, str(Path(__file__).parents[1] / "experiments" / "measure"))

import bare_loop
import gpu_cases
import pass_memory as measure
import run
import tables
import titan_gpu
import torchtitan_rows

from harness.compose.composer import compose_job
from harness.config.fields import with_value
from harness.launch.rows import as_planned, completed, load
from harness.model.accounting import account
from harness.model.decoder import Decoder

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"


def gpu_row(mode, side, number, rate, **more):
    figures = {
        "tokens_per_second": rate,
        "memory_gib": 70.0,
        "first_step_seconds": 30.0,
        "peak_origin": "the peak",
    }
    return {
        "shape": "8B",
        "activation_checkpoint": "full",
        "n_layers": 10,
        "mode": mode,
        "side": side,
        "round": number,
        **figures,
        **more,
    }


FACTS = {
    "device": "NVIDIA H200",
    "memory": 141 * 2**30,
    "cuda": "12.8",
    "hip": None,
    "rounds": 2,
    "steps": 20,
    "batch": 1,
    "versions": {"torch": "2.x", "torchao": None},
    "commit": "0123456789abcdef",
    "dirty": False,
}


def test_gpu_table_judges_the_targets_by_ratios_within_a_round():
    """The machine is twice as fast in the second round; ratios do not notice."""
    rows = []
    for number, speed in ((0, 1.0), (1, 2.0)):
        rows += [
            gpu_row("bf16_compile", "harness", number, 1000 * speed, mfu=0.56, mfu_causal=0.5),
            gpu_row("bf16_compile", "torchtitan", number, 1000 * speed),
            gpu_row("float8_rowwise", "harness", number, 1300 * speed, mfu=0.7, mfu_causal=0.6),
            gpu_row("float8_rowwise", "torchtitan", number, 1000 * speed),
        ]
    table = gpu_cases.render(FACTS, rows)
    [compiled] = [line for line in table.splitlines() if "| bf16_compile |" in line]
    [float8] = [line for line in table.splitlines() if "| float8_rowwise |" in line]
    assert "1,500 (1,000 to 2,000)" in compiled
    assert "MFU 56.0% of 55%: yes; torchtitan 1.000 of 1.05: no" in compiled
    assert "1.300 (1.300 to 1.300)" in float8
    assert "float8 1.300 of 1.25: yes; torchtitan 1.300 of 1.05: yes" in float8
    assert "- at least 1.05 x torchtitan's tokens/s: torchtitan 1.300 of 1.05: yes" in table
    assert table.startswith(
        "NVIDIA H200, 141.0 GiB, CUDA 12.8; torch 2.x; commit 0123456789; 2 rounds of 20 steps"
    )


def test_estimate_of_memory():
    """Against the closed form by hand for Llama 3 8B with 2 layers, T 8192, everything kept."""
    case = gpu_cases.Case("8B", "none", "bf16", n_layers=2, device="cpu")
    tables, block = 2 * 128256 * 4096, 218112000
    logits = 12 * 8192 * 128256
    activations = 2 * 8192 * 3 * (6 * 4096 + 2 * 1024 + 4 * 14336)
    expected = 16 * (2 * block + tables) + 4 * (tables + 2 * block) + activations + 1.5 * 2**30
    estimate = gpu_cases.estimated_bytes(case.job(), whole_logits=False)
    assert estimate == pytest.approx(expected + logits / gpu_cases.LOSS_CHUNKS, rel=1e-3)
    assert gpu_cases.estimated_bytes(case.job(), whole_logits=True) == pytest.approx(
        expected + logits, rel=1e-3
    )


def test_more_layers_fit_where_less_is_kept():
    gib, fitting = 2**30, {}
    for mode in gpu_cases.ACTIVATION_CHECKPOINTS:
        case = gpu_cases.Case("8B", mode, "bf16", device="cpu")
        fitting[mode] = gpu_cases.layers_that_fit(case, 79 * gib, whole_logits=False)
        assert gpu_cases.layers_that_fit(case, 79 * gib, whole_logits=True) < fitting[mode]
        assert gpu_cases.layers_that_fit(case, 8 * gib, whole_logits=False) == 0
        assert gpu_cases.layers_that_fit(case, 400 * gib, whole_logits=False) == 32
    assert 0 < fitting["none"] < fitting["selective_op"] < fitting["full"] < 32


def has_precision_of(mode):
    precision = gpu_cases.Case("tiny", "none", mode).precision
    return (
        precision == "bf16"
        or (EXPERIMENTS.parent / "conf" / "precision" / f"{precision}.yaml").is_file()
    )


ON_A_CPU = [mode for mode in gpu_cases.MODES if has_precision_of(mode) and "graphs" not in mode]


@pytest.mark.parametrize("mode", ON_A_CPU)
@pytest.mark.parametrize("checkpointing", gpu_cases.ACTIVATION_CHECKPOINTS)
def test_gpu_cases_compose(mode, checkpointing):
    case = gpu_cases.Case("tiny", checkpointing, mode, n_layers=2, device="cpu")
    job = case.job()
    assert (job.model.n_layers, job.activation_checkpoint.mode) == (2, checkpointing)
    assert job.compile.enable == case.compiled == (mode != "bf16")
    assert job.precision.param_dtype == "bfloat16"
    if mode.startswith("float8"):
        assert (job.precision.linear, job.precision.emulate) == (mode, True)


@pytest.mark.parametrize("mode", gpu_cases.TITAN_MODES)
def test_torchtitan_is_told_the_same(mode, tmp_path):
    case = gpu_cases.Case("tiny", "selective_op", mode, n_layers=2, batch=2, elsewhere=True)
    python = argparse.Namespace(titan_python="python")
    words = run.titan_command(python, case, tmp_path / "x")
    told = titan_gpu.parse_arguments(words[words.index("--model") :])
    assert (told.batch, told.seq_len, told.steps) == (2, case.job().training.seq_len, case.steps)
    assert (told.precision, told.compile) == (case.precision, case.compiled)
    assert told.activation_checkpoint == "selective_op"


def test_bare_loop_is_our_model_of_that_shape():
    """As many parameters at the measured size, and the same loss from the same weights at a small one."""
    measured = bare_loop.Shape()
    with torch.device("meta"):
        whole = sum(parameter.numel() for parameter in bare_loop.Llama(measured).parameters())
    shape = compose_job(["experiment=cpu_baseline/shape"])
    assert whole == account(shape.model, 512).parameters
    assert (shape.global_batch_size, shape.training.seq_len) == (measured.batch, measured.seq_len)
    few = bare_loop.Shape(layers=2, vocabulary=64, seq_len=16)
    small = ["model.n_layers=2", "model.vocab_size=64", "model.rope.scaling=none"]
    model = Decoder(compose_job(["experiment=cpu_baseline/shape", *small]).model, 16)
    bare = bare_loop.build(few)
    weights = {}
    for name, weight in bare.named_parameters():
        name = name.replace("embedding.", "tok_embeddings.").replace("blocks.", "layers.")
        weights[re.sub(r"\.(w[qkvo])\.", r".attention.\1.", name)] = weight
    model.load_state_dict(weights)
    tokens = torch.randint(64, (2, 17))
    with torch.no_grad():
        logits = model(tokens[:, :-1])
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        assert float(bare(tokens[:, :-1], tokens[:, 1:])) == pytest.approx(
            float(expected), rel=1e-5
        )
    seconds, losses, _ = bare_loop.train(bare, few, 3, compiled=False)
    assert len(seconds) == 3
    assert all(abs(loss - math.log(64)) < 1 for loss in losses)
    assert len(set(losses)) == 3


def test_allocations_are_counted_exactly():
    mib = 2**20
    kept = []

    def work():
        a = torch.empty(mib)  # 4 MiB of float32
        b = a + 1  # 8
        del a
        kept.append(b * 2)  # 8

    peak, held = measure.measured(work)
    # The numbers 1 and 2 are tensors of a few bytes.
    assert 8 * mib <= peak < 8 * mib + 64
    assert held == 4 * mib


def test_saved_activations_are_counted():
    """sin keeps its input for backward: three of them three tensors, made again by a checkpoint none."""
    x = torch.randn(2**18, requires_grad=True)

    def three(x):
        return x.sin().sin().sin()

    held = []
    _, saved = measure.measured(lambda: held.append(three(x)))
    _, recomputed = measure.measured(
        lambda: held.append(torch.utils.checkpoint.checkpoint(three, x, use_reentrant=False))
    )
    assert saved == 3 * x.nbytes
    assert recomputed < 1.1 * x.nbytes


def test_gpu_command_lists_the_jobs_of_a_gpu(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["run.py", "--dry-run", "--shapes", "1B", "--activation-checkpoint", "none"]
    monkeypatch.setattr(sys, "argv", [*words, "--memory", "141", "--titan-python", "python"])
    assert run.main() == 0
    listed = capsys.readouterr().out
    jobs = [line for line in listed.splitlines() if line.startswith("  model=")]
    assert len(jobs) == len(gpu_cases.MODES)
    assert all("cluster.device=cuda" in job and "emulate" not in job for job in jobs)
    assert sum("compile.cuda_graphs=true" in job for job in jobs) == 2
    titan = [line.split() for line in listed.splitlines() if line.startswith("  torchtitan:")]
    assert all(line[1].endswith("python") and line[2] == "-m" for line in titan)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="needs --memory"):
        run.main()


def test_gpu_command_without_a_gpu(tmp_path):
    """One mode, end to end on a CPU: rows, facts and table."""
    typed = (
        "--device cpu --shapes tiny --modes bf16 --activation-checkpoint full --rounds 1 --steps 6"
    )
    script = str(EXPERIMENTS / "gpu_single" / "run.py")
    done = python(script, *typed.split(), "--out", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [row] = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert (row["shape"], row["n_layers"], row["mfu"]) == ("tiny", 4, None)
    assert row["software"]["torch"] == torch.__version__
    [of_report] = load(tmp_path)
    assert of_report["measured.tokens_per_second_per_rank"] == row["tokens_per_second"]
    assert row["tokens_per_second"] == pytest.approx(64 / row["step_seconds"], rel=1e-6)
    assert (tmp_path / "table.md").read_text() == done.stdout
    assert "| tiny | 4 | full | bf16 |" in done.stdout


def test_published_tables_are_those_of_today(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["tables.py", "--out", str(tmp_path), "--runs", str(tmp_path / "none")]
    )
    tables.main()
    kept = (EXPERIMENTS / "llama3_h100" / "tables.md").read_text()
    made = (tmp_path / "tables.md").read_text()
    without_pictures = [line for line in made.splitlines() if line and not line.startswith("![")]
    assert without_pictures == [line for line in kept.splitlines() if line]
    assert "18 published rows, 0 of them measured." in capsys.readouterr().out
    assert (tmp_path / "table.csv").is_file() and not (tmp_path / "results.jsonl").exists()


def test_a_run_of_another_length_measures_its_published_row(tmp_path, monkeypatch):
    pairs = {"table1": torchtitan_rows.tables()["table1"]}
    monkeypatch.setattr(torchtitan_rows, "tables", lambda: pairs)
    job = with_value(
        with_value(pairs["table1"][1][0].job, "training.steps", 50), "training.seed", 3
    )
    row = {
        **as_planned("mine", job, []),
        "state": "completed",
        "device": "NVIDIA H100 80GB HBM3",
        "window.tokens_per_second": 8 * 7350.0,
        "memory_gib": 70.0,
    }
    monkeypatch.setattr(tables, "read_kept", lambda folder: [completed(row)])
    [table] = tables.all_tables(tmp_path, None)
    states = [row["measured_on"] for row in table.rows]
    assert states == ["not measured", "NVIDIA H100 80GB HBM3", "not measured"]
    assert table.rows[1]["delta.measured.tokens_per_second_per_rank"] == pytest.approx(
        7350 / 6667 - 1
    )
    assert table.rows[1]["expected.tokens_per_second_per_rank"] > 0
