"""Statistics of activations: against their definitions in float64, and what a probe leaves unchanged."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jobs import tiny
from plain_llama import frequencies, norm, rotated
from waits import ON_HOST, waits

from harness.data.batch import PADDING, Batch
from harness.model import kernels
from harness.model.decoder import Decoder
from harness.train import watch
from harness.train.engine import Engine
from harness.train.probe import Probe
from harness.train.setup import process_group
from harness.train.watch import Watch

CPU = torch.device("cpu")
HEADS = 8
WINDOW = 9
ROWS, LENGTH = 4, 24
MODEL = (
    *("model=mixtral_debug", "model.n_layers=2", f"training.seq_len={LENGTH}"),
    *(f"training.global_batch_size={ROWS}", f"model.attention.window={WINDOW}"),
)


def batch_of():
    """Rows with one to three documents, and padding at the end of some."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 256, (ROWS, LENGTH), generator=generator)
    documents = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    documents[1, 7:] = 1
    documents[2, 5:15] = 1
    documents[2, 15:] = PADDING
    documents[3, 20:] = PADDING
    return Batch(tokens, tokens.roll(-1, 1), documents)


def by_definition(w, batch, score):
    """The streams, the mean entropies, and the largest scores of every head."""
    place = torch.arange(LENGTH)
    apart = place.unsqueeze(1) - place
    documents = batch.documents_BT
    real = documents != PADDING
    seen = (apart >= 0) & (apart < WINDOW) & (documents.unsqueeze(2) == documents.unsqueeze(1))
    x = w["tok_embeddings.weight"][batch.inputs_BT]
    streams, entropies, largest = [x], [], []
    angles = place.outer(frequencies(1e6, x.shape[-1] // HEADS))
    turn = torch.polar(torch.ones_like(angles), angles)
    for layer in range(2):
        own = {key.removeprefix(f"layers.{layer}."): value for key, value in w.items()}
        h = norm(x, own["attention_norm.weight"])
        q, k, v = (
            (h @ own[f"attention.w{n}.weight"].T).unflatten(-1, (-1, 8)).transpose(1, 2)
            for n in "qkv"
        )
        q, k = (rotated(each, turn, interleaved=False) for each in (q, k))
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        scores = (q @ k.mT * 8**-0.5).masked_fill(~seen.unsqueeze(1), float("-inf"))
        of_tokens = scores.masked_fill(~real[:, None, :, None], float("-inf"))
        largest.append(of_tokens.amax((0, 2, 3)))
        out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + out @ own["attention.wo.weight"].T
        h = norm(x, own["ffn_norm.weight"])
        logits = h @ own["moe.router.weight"].T
        given = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
        p = given / given.sum(-1, keepdim=True)
        entropies.append(-(p * p.log()).sum(-1)[real].mean())
        best = given.topk(2, -1)
        shares = torch.zeros_like(given).scatter(-1, best.indices, best.values)
        shares = shares / shares.sum(-1, keepdim=True) * real.unsqueeze(-1)
        for e in range(8):
            w1, w2, w3 = (own[f"moe.experts.w{n}"][e] for n in (1, 2, 3))
            x = x + shares[..., e : e + 1] * ((F.silu(h @ w1.T) * (h @ w3.T)) @ w2.T)
        streams.append(x)
    return streams, torch.stack(entropies), torch.stack(largest)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_statistics_are_those_of_their_definitions(score, monkeypatch):
    """Also if the scores of five queries are in memory at once."""
    monkeypatch.setattr(kernels, "LOGITS_AT_ONCE", 2 * HEADS * LENGTH * 5)
    job = tiny(*MODEL, f"model.moe.score={score}", "training.local_batch_size=2")
    batch = batch_of()
    with process_group(job, CPU):
        engine = Engine(job, CPU)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for _, parameter in engine.named_parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
        w = {name: p.detach().double() for name, p in engine.named_parameters()}
        probe = Probe(engine)
        assert probe.names == ["tok_embeddings", "layers.0", "layers.1"]
        found = probe(batch)
    streams, entropies, largest = by_definition(w, batch, score)
    rms, peaks, kurtosis, entropy, logits = found.statistics
    for place, x in enumerate(streams):
        square = x.square()
        expected = [square.mean().sqrt(), x.abs().max(), (x**4).mean() / square.mean() ** 2]
        got = torch.stack([rms[place], peaks[place], kurtosis[place]])
        torch.testing.assert_close(got, torch.stack(expected), rtol=1e-5, atol=0)
    assert entropy[0].isnan() and logits[0].isnan()
    torch.testing.assert_close(entropy[1:], entropies, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.max_logits.double(), largest, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[1:], largest.amax(1), rtol=1e-5, atol=1e-5)


def seen(job, *, documents=True):
    """Statistics of all rows, from this rank."""
    engine = Engine(job, CPU)
    rows = slice(engine.rows.start, engine.rows.stop)
    batch = batch_of() if documents else batch_of()._replace(documents_BT=None)
    found = Probe(engine)(batch.each(lambda tensor: tensor[rows]))
    return torch.cat((found.statistics.flatten(), found.max_logits.double().flatten()))


@pytest.mark.parametrize(
    "layout",
    [
        ("parallelism=tp", "parallelism.cp=2", "parallelism.cp_method=ulysses"),
        ("parallelism=tp", "parallelism.expert_tensor_parallel=true", "parallelism.pp=2"),
        ("parallelism=fsdp_ep", "training.local_batch_size=1"),
    ],
    ids=" ".join,
)
def test_documents_and_padding_are_those_of_one_process(pool, layout):
    [alone] = pool.run(1, seen, tiny(*MODEL))
    job = tiny(*MODEL, *layout)
    for own in pool.run(job.world_size, seen, job):
        torch.testing.assert_close(own, alone, rtol=1e-5, atol=1e-6, equal_nan=True)


def seen_by_older_torch(job):
    """The statistics by a function that torch has before 2.13 too."""
    with patch.object(watch, "dist", SimpleNamespace(all_gather=dist.all_gather)):
        return seen(job, documents=False)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_split_sequences_need_no_newer_torch(pool, method):
    [alone] = pool.run(1, seen_by_older_torch, tiny(*MODEL[2:4]))
    split = tiny("parallelism=cp", f"parallelism.cp_method={method}", *MODEL[2:4])
    for own in pool.run(2, seen_by_older_torch, split):
        torch.testing.assert_close(own, alone, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_the_host_waits_for_nothing_but_experts():
    job = tiny(*MODEL)
    meta = torch.device("meta")
    with meta:
        part = Decoder(job.model, LENGTH)
    watched = Watch(job, SimpleNamespace(rank=lambda _: 0), meta)
    batch = batch_of().each(lambda tensor: tensor.to(meta))
    with waits() as found, torch.no_grad(), watched.watching(part):
        part(batch.inputs_BT, documents_BT=batch.documents_BT)
    assert set(found) == {ON_HOST}
