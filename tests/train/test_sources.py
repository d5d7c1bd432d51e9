"""Losses and tokens of a mixture's sources, on every layout and in the metrics."""

import json
import shutil

import jobs
import pytest
import torch
from jobs import batches_of, plain_losses
from waits import waits

from harness.checkpoint.catalog import CheckpointFolder
from harness.data.batch import IGNORE_INDEX, Batch
from harness.parallelism.loss import TokenLoss
from harness.train.engine import Engine
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


def job_of(*overrides):
    return jobs.tiny(*SMALL, *MIXTURE, *overrides)


def losses_of(job):
    """Losses and tokens of the sources in a step and in an evaluation of the first global batch."""
    engine = Engine(job, torch.device("cpu"))
    batch = batches_of(job, engine.rows).next()
    plain = engine.gradients(batch._replace(sources_B=None))
    engine.optimizer.zero_grad()
    outcome = engine.gradients(batch)
    return {
        "step": (outcome.source_losses, outcome.source_tokens),
        "total": (outcome.loss, outcome.valid_tokens),
        "plain": (plain.loss, plain.grad_norm / outcome.grad_norm, plain.source_losses),
        "evaluated": [tuple(each) for each in engine.evaluate(batch)],
    }


def shared_loss(found):
    losses, tokens = found["step"]
    return sum((each or 0.0) * count for each, count in zip(losses, tokens, strict=True)) / sum(
        tokens
    )


@pytest.mark.parametrize(
    "layout",
    [
        "parallelism=tp_pp training.local_batch_size=4",
        "parallelism=fsdp_cp training.loss_chunks=3",
        "parallelism=fsdp parallelism.dp_shard=3 training.local_batch_size=2",
    ],
)
def test_losses_of_sources_are_exact(pool, layout):
    job = job_of(*layout.split())
    batch = batches_of(job, range(job.global_batch_size)).next()
    losses, valid = plain_losses(job, batch), batch.labels_BT != IGNORE_INDEX
    own = [batch.sources_B == source for source in range(3)]
    sums, tokens = (
        [float(losses[rows].sum()) for rows in own],
        [int(valid[rows].sum()) for rows in own],
    )
    assert tokens[0] > 0 and tokens[1] == 0, "one source has masked labels, one has no sample"
    results = pool.run(job.world_size, losses_of, job)
    assert results == results[:1] * job.world_size
    found = results[0]
    assert found["step"] == (
        [
            pytest.approx(sums[0] / tokens[0], rel=1e-5),
            None,
            pytest.approx(sums[2] / tokens[2], rel=1e-5),
        ],
        tokens,
    )
    loss, trained = found["total"]
    assert trained == sum(tokens)
    assert shared_loss(found) == pytest.approx(loss, rel=1e-6)
    assert found["plain"] == (pytest.approx(loss, rel=1e-6), pytest.approx(1.0, rel=1e-6), [])
    assert [each[1] for each in found["evaluated"]] == [trained, *tokens]
    assert [each[0] for each in found["evaluated"]] == pytest.approx(
        [loss * trained, *sums], rel=1e-5
    )


@pytest.mark.parametrize("options", ["training.local_batch_size=2", "training.loss_chunks=3"])
def test_multi_token_prediction_is_not_part_of_a_source(pool, options):
    [found] = pool.run(1, losses_of, job_of("model.mtp.depth=1", options))
    assert shared_loss(found) == pytest.approx(found["total"][0], rel=1e-6)


def test_the_host_does_not_wait_for_losses_of_sources():
    job = job_of()
    loss = TokenLoss(16, None)
    sources = SourceLosses(job, loss)
    labels = torch.zeros(4, 8, dtype=torch.int64, device="meta")
    batch = Batch(labels, labels, sources_B=torch.zeros(4, dtype=torch.int64, device="meta"))
    with waits() as found:
        with sources.recorded(batch) as rows:
            for _ in range(2):
                loss(
                    torch.empty(2, 8, 16, device="meta", requires_grad=True), labels[:2]
                ).backward()
        by_source = sources.losses(batch, rows)
    assert len(by_source) == 3 and by_source[0].is_meta
    assert found == []


def train(tmp_path, *overrides):
    return jobs.train(tmp_path, *SMALL, *MIXTURE, "training.steps=6", *overrides)


def test_rows_have_the_metrics_of_sources(tmp_path):
    files = "['{stdlib}/json/*.py']"
    most = f"data.sources.most={{kind: local, paths: {files}, validation_paths: {files}}}"
    options = (f"data.cache_dir={tmp_path / 'cache'}", "model.vocab_size=258")
    code, folder, _ = done = train(
        tmp_path, most, *options, "validation.interval=3", "validation.steps=2"
    )
    assert code == EXIT_OK
    rows = done.rows
    trained = [row for row in rows if "loss" in row]
    for row in trained:
        tokens = {name: row[f"valid_tokens.{name}"] for name in ("few", "late", "most")}
        assert sum(tokens.values()) == row["valid_tokens"]
        shared = sum(row[f"loss.{name}"] * count for name, count in tokens.items() if count)
        assert shared / row["valid_tokens"] == pytest.approx(row["loss"], rel=1e-6)
        assert {name: row[f"loss.{name}"] is None for name in tokens} == {
            n: not c for n, c in tokens.items()
        }
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


JSON = "['{stdlib}/json/*.py']"
SETS = f"validation.sets={{json: {{kind: local, paths: {JSON}}}, drawn: {{kind: synthetic}}}}"


def test_a_set_has_the_loss_of_all_its_documents(tmp_path):
    """It is that of validation files, whatever the data are, and no part of the job's identity."""
    same = ("training.steps=2", "optimizer.lr=0", "model.vocab_size=258", "validation.steps=2")
    same = (*SMALL, *same, f"data.cache_dir={tmp_path / 'cache'}", "validation.interval=2")
    files = ("data=local_text", f"data.paths={JSON}", "data.validation_fraction=0")
    held_out = jobs.train(tmp_path, *same, *files, f"data.validation_paths={JSON}")
    expected = held_out.folder.row["validation_loss"]
    mixed = jobs.train(tmp_path, *same, *MIXTURE, SETS)
    # The data hold out nothing.
    alone = jobs.train(tmp_path, *same, *files, SETS)
    assert mixed.job.id == jobs.tiny("model.n_layers=1", *same, *MIXTURE).id
    for run in (mixed, alone):
        losses = [row for row in run.rows if "validation_loss.json" in row]
        assert [row["step"] for row in losses] == [2]
        for values in (losses[0], run.folder.row):
            assert values["validation_loss.json"] == expected
            assert values["validation_loss.drawn"] not in (None, expected)
    assert mixed.folder.row["validation_loss"] not in (None, expected)
    assert not any("validation_loss" in row for row in alone.rows)
    assert alone.folder.row["validation_loss"] is None


STREAM = (
    *(
        *SMALL,
        "data=mixture",
        "data.weights={web: 1, few: 1}",
        "training.steps=4",
        "model.vocab_size=258",
    ),
    "schedule.warmup_steps=0",
)


@pytest.mark.parametrize("stopped", [1, 3], ids=["a stream", "weights that change"])
def test_a_resumed_run_sees_the_same_samples(tmp_path, stopped):
    """A row of the global batch that has not left the first document of a stream has no state of the library
    yet. The tokens of sources count from step 1."""
    own = (*SMALL, *MIXTURE, "training.steps=6")
    if stopped == 1:
        texts = [{"text": f"{number} " * (number % 17 + 3)} for number in range(60)]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
        web = f"kind: hub, dataset: json, data_files: ['{tmp_path}/a.jsonl'], streaming: true, workers: 0"
        own = (*STREAM, f"data.sources={{web: {{{web}}}, few: {{kind: synthetic}}}}")
    complete = jobs.train(tmp_path / "complete", *own)
    shared = f"checkpoint.folder={tmp_path / 'shared'}"
    jobs.train(tmp_path, *own, shared, f"training.steps={stopped}")
    if stopped == 1:
        slots = (
            CheckpointFolder(str(tmp_path / "shared"))
            .find(1)
            .state["data_loader"]["slots"]
            .values()
        )
        assert any(slot["document"] is None for slot in slots)
    resumed = jobs.train(tmp_path, *own, shared, "checkpoint.allow_changed=[training.steps]")
    names = [*("step", "loss", "loss.few"), "loss.web" if stopped == 1 else "tokens.late"]
    expected, found = (
        [[row[name] for name in names] for row in each.rows] for each in (complete, resumed)
    )
    assert found == expected[stopped:]


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    """Checkpoints of three steps."""
    folder = tmp_path_factory.mktemp("three_steps")
    train(folder, f"checkpoint.folder={folder / 'shared'}", "training.steps=3")
    return folder / "shared"


@pytest.mark.parametrize(
    ("changed", "words", "names"),
    [
        (
            ["data.weights={few: 1, most: 1}"],
            "data.weights.most=3.0 there and 1.0 here",
            "training.steps,data.weights.most",
        ),
        (
            ["data.sources.new={kind: synthetic}", "data.weights.new=2"],
            "data.sources.new=none there and synthetic here, data.weights.new=none there and 2.0 here",
            "training.steps,data.sources.new,data.weights.new",
        ),
        (
            ["data.sources.few.mask_fraction=0.1"],
            "data.sources.few.mask_fraction=0.5 there and 0.1 here",
            "training.steps,data.sources",
        ),
        (
            ["data.weight_changes=[]", "data.weights.late=1"],
            "data.weight_changes=[{step:5,late:1}] there and [] here",
            "training.steps,data.weights.late,data.weight_changes",
        ),
    ],
)
def test_a_changed_mixture_is_refused_unless_allowed_by_name(
    tmp_path, three_steps, changed, words, names
):
    shutil.copytree(three_steps, tmp_path / "shared")
    own = (f"checkpoint.folder={tmp_path / 'shared'}", *changed)
    allowed = "training.steps" if "late=1" not in own[-1] else "training.steps,data.weights.late"
    code, folder, _ = train(tmp_path, *own, f"checkpoint.allow_changed=[{allowed}]")
    error = folder.errors.first()
    assert code == EXIT_USER
    assert error is not None and words in error["message"] and "\n" not in error["message"]
    assert train(tmp_path, *own, f"checkpoint.allow_changed=[{names}]").code == EXIT_OK
    saved = CheckpointFolder(str(tmp_path / "shared"))
    before, after = (saved.find(step).state["data_loader"] for step in (3, 6))
    assert sum(after["mixture"]["counts"].values()) == after["samples"] == 48
    counts = after["mixture"]["counts"]
    assert all(counts[name] >= count for name, count in before["mixture"]["counts"].items())


def test_the_log_has_the_packing_of_conversations_in_a_mixture(tmp_path):
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    talk = f"data.sources={{talk: {{kind: chat, paths: ['{tmp_path}/c.jsonl'], chat_template: plain}}}}"
    options = (
        "data.attend_across_documents=false",
        f"data.cache_dir={tmp_path}",
        "model.vocab_size=258",
    )
    job = jobs.tiny(*SMALL, "data=mixture", talk, "data.weights.talk=1", *options)
    loader = batches_of(job, range(8))
    assert loader.note == "talk: data of train: 1 conversation in 1 sample, 68.8% full"
