"""Packed documents that do not see each other: a sample of several is each of them alone, in every layout."""

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import words
from jobs import tiny
from layouts import require_parity, verdict_of
from planted import PlantedPool, documents_forgotten

from harness.data.batch import IGNORE_INDEX
from harness.model.decoder import Decoder
from harness.parallelism.materialize import materialize
from harness.tools.parity.parity import ParityConfig, compose_layouts

CPU = torch.device("cpu")
T = 32
LENGTHS = [9, 1, 15, 7]


def gradients_of(inputs, labels, documents):
    """Summed loss of a small decoder, and its gradients."""
    model = Decoder(tiny(f"training.seq_len={T}").model, T)
    materialize(model, 0, CPU, CPU)
    logits = model(inputs, documents_BT=documents).flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_a_packed_sample_is_its_documents_one_by_one():
    """Each document alone begins at position 0 and is padded; packed, it stands where it stands."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 256, (length + 1,), generator=generator) for length in LENGTHS]
    alone_inputs = torch.zeros(len(LENGTHS), T, dtype=torch.int64)
    alone_labels = torch.full((len(LENGTHS), T), IGNORE_INDEX)
    for row, (length, document) in enumerate(zip(LENGTHS, tokens, strict=True)):
        alone_inputs[row, :length], alone_labels[row, :length] = document[:-1], document[1:]
    expected_loss, expected = gradients_of(alone_inputs, alone_labels, None)
    packed = [
        torch.cat(parts)[None] for parts in ([t[:-1] for t in tokens], [t[1:] for t in tokens])
    ]
    numbers = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]
    loss, gradients = gradients_of(*packed, numbers)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert float((gradient - expected[name]).norm() / expected[name].norm()) < 1e-5, name
    together, _ = gradients_of(*packed, None)
    assert abs(together - expected_loss) > 1e-4 * expected_loss


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Overrides for documents from shorter than a sample to longer."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(30):
        (folder / f"{number:02}.txt").write_text(f"document {number} " * (1 + number * number % 9))
    return [
        *words("""
        data=local_text tokenizer=bytes model.vocab_size=258 data.validation_fraction=0
    """),
        *(f"data.paths=[{folder}/*.txt]", f"data.cache_dir={folder}/cache"),
        "data.attend_across_documents=false",
    ]


LAYOUTS = {
    "fsdp": "parallelism=fsdp parallelism.dp_shard=2",
    "pp": "parallelism=pp",
    "pp_interleaved": "parallelism=pp parallelism.pp_schedule=Interleaved1F1B",
    "compiled": "compile=on compile.backend=aot_eager activation_checkpoint=selective_op",
    "cp_ulysses": "parallelism=cp parallelism.cp_method=ulysses",
    "cp_gather": "parallelism=cp parallelism.cp_method=gather",
    "pp_cp_ulysses": "parallelism=pp parallelism.cp=2 parallelism.cp_method=ulysses",
}


@cache
def layout(name, *overrides):
    return compose_layouts(ParityConfig(matrix=LAYOUTS, layouts=[name]), list(overrides))[name]


@pytest.mark.parametrize("name", ["fsdp", "pp_interleaved", "compiled", "cp_ulysses", "cp_gather"])
def test_layouts_agree(pool, corpus, name):
    require_parity(pool, name, layout(name, *corpus), resume=False)


def test_layouts_agree_about_conversations(pool, tmp_path):
    """Several of those that are shipped fit into a sample."""
    shipped = Path(__file__).parents[1] / "experiments" / "chat" / "conversations.jsonl"
    name = "pp_cp_ulysses"
    typed = [
        *(
            "data=chat",
            "data.chat_template=plain",
            f"data.paths=[{shipped}]",
            f"data.cache_dir={tmp_path}",
        ),
        *words("""
        tokenizer=python_2k model.vocab_size=2048 training.seq_len=128 model.max_seq_len=128
    """),
    ]
    require_parity(pool, name, layout(name, *typed), resume=False)


@pytest.mark.parametrize("name", ["fsdp", "pp"])
def test_lost_documents_are_noticed(pool, corpus, name):
    assert not verdict_of(
        PlantedPool(pool, documents_forgotten), name, layout(name, *corpus)
    ).passed
