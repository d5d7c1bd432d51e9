"""What an export says beside the geometry: transformers stops where a turn or a document ends."""

import json

import pytest
import torch
from families_table import changed, random_model, tensors_of
from held import Held
from tokenizer_files import huggingface
from tokenizer_files import write_huggingface as write_tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig

from harness.config.data import DataConfig
from harness.weights.generation import Origin
from harness.weights.huggingface import write_huggingface

DOCUMENT, TURN = 1000, 1002  # <|endoftext|> and <|im_end|>
CHAT = DataConfig(kind="chat", chat_template="chatml")
MODEL = changed("qwen3_debug", vocab_size=1016, tied_embeddings=False)
SAID = {
    "pad_token_id": 1000,
    "bos_token_id": 1001,
    "attention_dropout": 0.0,
    "use_cache": False,
    "initializer_range": 0.5,
    "id2label": {"0": "a"},
}


def export(folder, origin, model=MODEL):
    """Write a model with the tokenizer of a chat repository; return config.json and the one of generation."""
    file = write_tokenizer(
        folder / "tokenizer", {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    )
    before = file.with_name("tokenizer_config.json").read_bytes()
    out = folder / "out"
    tokenizer = huggingface(file, bos="", eos="<|endoftext|>")
    write_huggingface(Held(tensors_of(random_model(model))), model, tokenizer, out, origin=origin)
    assert (out / "tokenizer_config.json").read_bytes() == before
    config = json.loads((out / "config.json").read_text())
    return config, json.loads((out / "generation_config.json").read_text())


def test_a_model_of_conversations_stops_after_a_turn(tmp_path):
    config, generation = export(tmp_path, Origin(data=CHAT))
    assert config["eos_token_id"] == generation["eos_token_id"] == [TURN, DOCUMENT]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():  # whatever it reads, it says <|im_end|>
        model.lm_head.weight.zero_()
        model.lm_head.weight[TURN] = 1.0
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.fill_(1.0)
    assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=9, do_sample=False)[0].tolist()[
        2:
    ] == [TURN]


@pytest.mark.parametrize(
    ("before", "data", "ends"),
    [
        (None, None, DOCUMENT),
        ([TURN, DOCUMENT], None, [TURN, DOCUMENT]),
        (TURN, CHAT, [TURN, DOCUMENT]),
        ([DOCUMENT, 7], CHAT, [TURN, DOCUMENT, 7]),
    ],
)
def test_the_folder_that_it_came_from_is_kept(before, data, ends, tmp_path):
    source = tmp_path / "source"
    write_huggingface(Held(tensors_of(random_model(MODEL))), MODEL, None, source)
    theirs = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**theirs, **SAID, "eos_token_id": before}))
    said = {"do_sample": True, "top_k": 20, "eos_token_id": before, "pad_token_id": 3}
    (source / "generation_config.json").write_text(json.dumps(said))
    config, generation = export(tmp_path, Origin(source, data))
    assert {name: config[name] for name in SAID} == SAID
    assert config["eos_token_id"] == ends
    assert generation == {**said, "eos_token_id": ends}
    assert GenerationConfig.from_pretrained(tmp_path / "out").top_k == 20


def test_geometry_is_the_models(tmp_path):
    """Of a source with another number of layers only the rest is kept."""
    write_huggingface(Held(tensors_of(random_model(MODEL))), MODEL, None, tmp_path / "source")
    smaller = changed("qwen3_debug", vocab_size=1016, tied_embeddings=False, n_layers=1)
    config, generation = export(tmp_path, Origin(tmp_path / "source"), smaller)
    assert config["num_hidden_layers"] == 1 and generation == {"eos_token_id": DOCUMENT}
