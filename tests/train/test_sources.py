"""Losses and tokens of a mixture's sources, on every layout and in the metrics."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from tiers import rest_is_thorough
from waits import waits

from harness.checkpoint.catalog import CheckpointFolder
from harness.config.job import Job
from harness.data.loader import IGNORE_INDEX, Batch
from harness.data.tokenizer import build_tokenizer
from harness.launch.pool import RankPool
from harness.metrics.jsonl import read_metrics
from harness.parallelism.loss import TokenLoss
from harness.run.folder import RunFolder
from harness.train.engine import Engine
from harness.train.objective import loader_of
from harness.train.step import SourceLosses
from harness.util.errors import EXIT_OK, EXIT_USER

SMALL = ("training.seq_len=32", "training.global_batch_size=8")
MIXTURE = (
    "data=mixture",
    "data.sources={few: {kind: synthetic, mask_fraction: 0.5}, late: {kind: synthetic}}",
    "data.sources.most.kind=synthetic",
    "data.weights={few: 1, most: 3}",
    "data.weight_changes=[{step: 5, late: 1}]",
)
Losses = dict[str, Any]


def job_of(*overrides: str) -> Job:
    return jobs.tiny(*SMALL, *MIXTURE, *overrides)


def losses_of(job_json: str) -> Losses:
    """Losses and tokens of the sources in a step and in an evaluation of the first global batch."""
    job = Job.from_json(job_json)
    engine = Engine(job, torch.device("cpu"))
    batch = loader_of(job, build_tokenizer(job.tokenizer), engine.rows).next()
    plain = engine.gradients(batch._replace(sources_B=None))
    engine.optimizer.zero_grad()
    outcome = engine.gradients(batch)
    return {
        "step": (outcome.source_losses, outcome.source_tokens),
        "total": (outcome.loss, outcome.valid_tokens),
        "plain": (plain.loss, plain.grad_norm / outcome.grad_norm, plain.source_losses),
        "evaluated": [tuple(each) for each in engine.evaluate(batch)],
    }


def expected_losses(job: Job) -> tuple[list[float], list[int]]:
    """Sum of the losses and number of the valid tokens by source, from one plain forward pass."""
    from harness.model.decoder import Decoder
    from harness.parallelism.materialize import materialize

    batch = loader_of(job, build_tokenizer(job.tokenizer), range(job.global_batch_size)).next()
    model = Decoder(job.model, job.training.seq_len)
    materialize(model, job.training.seed, torch.device("cpu"), torch.device("cpu"))
    with torch.no_grad():
        logits = model(batch.inputs_BT)
    losses = torch.nn.functional.cross_entropy(logits.mT, batch.labels_BT, reduction="none")
    assert batch.sources_B is not None
    own = [batch.sources_B == source for source in range(3)]
    valid = batch.labels_BT != IGNORE_INDEX
    return [float(losses[rows].sum()) for rows in own], [int(valid[rows].sum()) for rows in own]


LAYOUTS = [
    "training.local_batch_size=2",
    "training.loss_chunks=5 training.local_batch_size=4",
    "compile=on compile.backend=aot_eager",
    "parallelism=hsdp",
    "parallelism=fsdp_tp parallelism.loss_parallel=false",
    "parallelism=fsdp_tp training.local_batch_size=2",
    "parallelism=tp training.loss_chunks=3",
    "parallelism=tp parallelism.sequence_parallel=false training.loss_chunks=3",
    "parallelism=tp_pp training.local_batch_size=4",
    "parallelism=pp parallelism.pp_schedule=ZBVZeroBubble training.loss_chunks=3",
    "parallelism=pp parallelism.pp_schedule=DualPipeV",
    "parallelism=pp parallelism.pp_schedule=Interleaved1F1B",
    "parallelism=fsdp_tp_pp_cp parallelism.dp_shard=1",
    "parallelism=fsdp_cp training.loss_chunks=3",
]


@pytest.mark.parametrize("layout", rest_is_thorough(LAYOUTS, LAYOUTS[8], LAYOUTS[-1]))
def test_losses_of_sources_are_exact_on_every_layout(pool: RankPool, layout: str) -> None:
    job = job_of(*layout.split())
    sums, tokens = expected_losses(job)
    assert tokens[0] > 0 and tokens[1] == 0, "one source has masked labels, one has no sample"
    results = pool.run(job.world_size, losses_of, job.to_json())
    assert results == results[:1] * job.world_size
    found = results[0]
    losses, found_tokens = found["step"]
    assert found_tokens == tokens and losses[1] is None
    expected = [total / max(1, count) for total, count in zip(sums, tokens, strict=True)]
    assert [losses[0], losses[2]] == pytest.approx([expected[0], expected[2]], rel=1e-5)
    loss, valid = found["total"]
    assert valid == sum(tokens)
    shared = sum((each or 0.0) * count for each, count in zip(losses, tokens, strict=True))
    assert shared / valid == pytest.approx(loss, rel=1e-6)
    assert found["plain"] == (pytest.approx(loss, rel=1e-6), pytest.approx(1.0, rel=1e-6), [])
    assert [each[1] for each in found["evaluated"]] == [valid, *tokens]
    assert [each[0] for each in found["evaluated"]] == pytest.approx([loss * valid, *sums], rel=1e-5)


def test_multi_token_prediction_is_not_part_of_a_source(pool: RankPool) -> None:
    for options in (("training.local_batch_size=2",), ("training.loss_chunks=3",)):
        job = job_of("model.mtp.depth=1", *options)
        [found] = pool.run(1, losses_of, job.to_json())
        losses, tokens = found["step"]
        loss, valid = found["total"]
        shared = sum((each or 0.0) * count for each, count in zip(losses, tokens, strict=True))
        assert shared / valid == pytest.approx(loss, rel=1e-6)


def test_the_host_does_not_wait_for_losses_of_sources() -> None:
    job = job_of()
    loss = TokenLoss(16, None)
    sources = SourceLosses(job, loss)
    labels = torch.zeros(4, 8, dtype=torch.int64, device="meta")
    batch = Batch(labels, labels, sources_B=torch.zeros(4, dtype=torch.int64, device="meta"))
    with waits() as found:
        with sources.recorded(batch) as rows:
            for _ in range(2):
                loss(torch.empty(2, 8, 16, device="meta", requires_grad=True), labels[:2]).backward()
        by_source = sources.losses(batch, rows)
    assert len(by_source) == 3 and by_source[0].is_meta
    assert found == []


def train(tmp_path: Path, *overrides: str) -> tuple[int, RunFolder]:
    done = jobs.train(tmp_path, *SMALL, *MIXTURE, "training.steps=6", *overrides)
    return done.code, done.folder


def rows_of(folder: RunFolder) -> list[dict[str, Any]]:
    return read_metrics(folder.path / "metrics.jsonl")


def test_rows_have_the_metrics_of_sources(tmp_path: Path) -> None:
    files = "['{stdlib}/json/*.py']"
    most = f"data.sources.most={{kind: local, paths: {files}, validation_paths: {files}}}"
    options = (f"data.cache_dir={tmp_path / 'cache'}", "model.vocab_size=258")
    code, folder = train(tmp_path, most, *options, "validation.interval=3", "validation.steps=2")
    assert code == EXIT_OK
    rows = rows_of(folder)
    trained = [row for row in rows if "loss" in row]
    for row in trained:
        tokens = {name: row[f"valid_tokens.{name}"] for name in ("few", "late", "most")}
        assert sum(tokens.values()) == row["valid_tokens"]
        shared = sum(row[f"loss.{name}"] * count for name, count in tokens.items() if count)
        assert shared / row["valid_tokens"] == pytest.approx(row["loss"], rel=1e-6)
        assert {name: row[f"loss.{name}"] is None for name in tokens} == {n: not c for n, c in tokens.items()}
        assert sum(row[f"tokens.{name}"] for name in tokens) == row["tokens"]
        assert 0 < row["epochs.most"] < 1 and "epochs.few" not in row
    assert [row["valid_tokens.late"] > 0 for row in trained] == [False] * 4 + [True] * 2
    validated = [row for row in rows if "validation_loss" in row]
    assert [row["step"] for row in validated] == [3, 6]
    losses = [validated[-1][f"validation_loss.{name}"] for name in ("few", "late", "most")]
    assert min(losses) < validated[-1]["validation_loss"] < max(losses)
    result = folder.row
    assert [result[f"validation_loss.{name}"] for name in ("few", "late", "most")] == losses
    assert [result[f"tokens.{name}"] for name in ("few", "late", "most")] == [256, 512, 768]


def test_a_resumed_run_sees_the_same_samples(tmp_path: Path) -> None:
    """Also if it goes on with another step count; the tokens of sources count from step 1."""
    _, complete = train(tmp_path / "complete")
    shared = f"checkpoint.folder={tmp_path / 'shared'}"
    train(tmp_path, shared, "training.steps=3")
    _, folder = train(tmp_path, shared, "checkpoint.allow_changed=[training.steps]")
    names = ("step", "loss", "loss.few", "loss.most", "tokens.few", "tokens.late", "tokens.most")
    expected = [[row[name] for name in names] for row in rows_of(complete)]
    assert [[row[name] for name in names] for row in rows_of(folder)] == expected[3:]


CHANGES = [
    ("data.weights={few: 1, most: 1}", "data.weights.most=3.0 there and 1.0 here", ["data.weights.most"]),
    (
        "data.sources.new={kind: synthetic}",
        "data.sources.new=none there and synthetic here, data.weights.new=none there and 2.0 here",
        ["data.sources.new", "data.weights.new"],
    ),
    (
        "data.sources.few.mask_fraction=0.1",
        "data.sources.few.mask_fraction=0.5 there and 0.1 here",
        ["data.sources"],
    ),
    (
        "data.weight_changes=[]",
        "data.weight_changes=[{step:5,late:1}] there and [] here",
        ["data.weight_changes"],
    ),
]


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of three steps."""
    folder = tmp_path_factory.mktemp("three_steps")
    train(folder, f"checkpoint.folder={folder / 'shared'}", "training.steps=3")
    return folder / "shared"


@pytest.mark.parametrize(("change", "words", "names"), CHANGES)
def test_a_changed_mixture_is_refused_unless_allowed_by_name(
    tmp_path: Path, three_steps: Path, change: str, words: str, names: list[str]
) -> None:
    shutil.copytree(three_steps, tmp_path / "shared")
    shared = (f"checkpoint.folder={tmp_path / 'shared'}",)
    changed = (*shared, change, "checkpoint.allow_changed=[training.steps]")
    if "new" in change:
        changed += ("data.weights.new=2",)
    if "changes" in change:
        changed += ("data.weights.late=1", "checkpoint.allow_changed=[training.steps,data.weights.late]")
    code, folder = train(tmp_path, *changed)
    assert code == EXIT_USER
    error = folder.first_error()
    assert error is not None and words in error["message"] and "\n" not in error["message"]
    allowed = [each for each in changed if "allow_changed" in each][-1].removesuffix("]")
    code, folder = train(tmp_path, *changed, f"{allowed},{','.join(names)}]")
    assert code == EXIT_OK
    state = CheckpointFolder(str(tmp_path / "shared")).find(6).state["data_loader"]
    assert sum(state["mixture"]["counts"].values()) == state["samples"] == 48
    before = CheckpointFolder(str(tmp_path / "shared")).find(3).state["data_loader"]["mixture"]["counts"]
    after = state["mixture"]["counts"]
    assert all(after[name] >= count for name, count in before.items())
    assert json.dumps(state)


def test_a_run_with_streams_resumes_from_the_first_documents(tmp_path: Path) -> None:
    """A row of the global batch that has not left its first document has no state of the library yet."""
    texts = [{"text": f"{number} " * (number % 17 + 3)} for number in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    files = f"dataset: json, data_files: ['{tmp_path}/a.jsonl'], streaming: true, workers: 0"
    sources = "data.sources={web: {kind: hub, " + files + "}, few: {kind: synthetic}}"
    own = (*SMALL, "data=mixture", sources, "data.weights={web: 1, few: 1}", "training.steps=4")
    own += ("model.vocab_size=258", "schedule.warmup_steps=0")
    complete = jobs.train(tmp_path / "complete", *own).folder
    shared = f"checkpoint.folder={tmp_path / 'shared'}"
    jobs.train(tmp_path, *own, shared, "training.steps=1")
    slots = CheckpointFolder(str(tmp_path / "shared")).find(1).state["data_loader"]["slots"].values()
    assert any(slot["document"] is None for slot in slots)
    folder = jobs.train(tmp_path, *own, shared, "checkpoint.allow_changed=[training.steps]").folder
    names = ("step", "loss.few", "loss.web", "valid_tokens.web")
    expected = [[row[name] for name in names] for row in rows_of(complete)]
    assert [[row[name] for name in names] for row in rows_of(folder)] == expected[1:]


CHAT = "{kind: chat, paths: [c.jsonl], chat_template: plain}"


def test_the_log_has_the_packing_of_conversations_in_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    Path("c.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    options = ("data.attend_across_documents=false", "data.cache_dir=cache", "model.vocab_size=258")
    talk = ("data=mixture", f"data.sources={{talk: {CHAT}}}", "data.weights.talk=1")
    job = jobs.tiny(*SMALL, *talk, *options)
    loader = loader_of(job, build_tokenizer(job.tokenizer), range(8))
    assert loader.note == "talk: data of train: 1 conversations in 1 samples, 68.8% full"
