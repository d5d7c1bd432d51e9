"""A packed batch of conversations has transformers' loss and gradients of the conversations one by one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from families_table import CASES, close, random_model, set_fields, to_transformers
from loaders import loader
from test_chat_packing import CONFIG, CONVERSATIONS
from tokenizer_files import CHAT, huggingface, write_huggingface

from harness.data.chat_template import TEMPLATES
from harness.data.loader import IGNORE_INDEX
from harness.data.tokenizer import build_tokenizer
from harness.model.spec import tensor_shapes
from harness.weights.hf_tensors import fill, our_tensors

T = 256


@pytest.mark.parametrize("name", ["llama_scaled", "mistral"])
def test_loss_and_gradients(name: str, tmp_path: Path) -> None:
    file = write_huggingface(tmp_path / "tokenizer", CHAT, pads=False)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in CONVERSATIONS))
    config = set_fields(CASES[name], vocab_size=1024)
    data = dataclasses.replace(CONFIG, paths=[f"{tmp_path}/a.jsonl"], chat_template="chatml")
    settings = {"seq_len": T, "global_batch_size": 4, "model_vocab_size": config.vocab_size}
    batch = loader(data, tokenizer=build_tokenizer(huggingface(file)), **settings).next()
    assert batch.documents_BT is not None and int(batch.documents_BT.max()) > 2
    model = random_model(config, T)
    logits = model(batch.inputs_BT, documents_BT=batch.documents_BT)
    valid = int((batch.labels_BT != IGNORE_INDEX).sum())
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels_BT.flatten(), reduction="sum") / valid
    loss.backward()

    theirs = to_transformers(model, tmp_path / "model")
    alone = one_by_one(transformers.AutoTokenizer.from_pretrained(file.parent), batch)
    assert sum(int((labels[:, 1:] != IGNORE_INDEX).sum()) for _, labels in alone) == valid
    total = 0.0
    for ids, labels in alone:
        part = theirs(input_ids=ids, labels=labels, num_items_in_batch=valid).loss
        part.backward()
        total += part.item()
    assert loss.item() == pytest.approx(total, rel=1e-5)
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    own, shapes = dict(model.named_parameters()), tensor_shapes(config)
    compared = 0
    for key, pieces in our_tensors(config).items():
        expected = torch.empty(shapes[key])
        fill(
            expected, pieces, shapes[key], list(map(range, shapes[key])), lambda of, part: gradients[of][part]
        )
        gradient = own[key].grad
        assert gradient is not None
        close(gradient, expected, tolerance=5e-5, name=key)
        compared += 1
    assert compared == len(own)


def one_by_one(tokenizer: Any, batch: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """transformers' tokens and labels of the conversations whose tokens are in the batch."""
    rows = [
        inputs[documents == number].tolist()
        for inputs, documents in zip(batch.inputs_BT, batch.documents_BT, strict=True)
        for number in range(int(documents.max()) + 1)
    ]
    alone = []
    for messages in CONVERSATIONS:
        out = tokenizer.apply_chat_template(
            messages,
            chat_template=TEMPLATES["chatml"],
            return_dict=True,
            return_assistant_tokens_mask=True,
            return_tensors="pt",
        )
        ids, mask = out["input_ids"], torch.as_tensor(out["assistant_masks"]).bool()
        if ids[0, :-1].tolist() in rows:
            alone.append((ids, torch.where(mask, ids, IGNORE_INDEX)))
    return alone
