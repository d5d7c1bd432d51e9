"""Special tokens have their published ids, given the published number of byte pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiktoken
from test_data_tokenizer import write_tiktoken
from test_hf_tokenizer import merges_of_source_code, sources

from harness.config.data import SETS, TokenizerConfig
from harness.data.tokenizer import build_tokenizer
from harness.weights.tokenizer import export_tokenizer

# Number of byte pairs in the published file, total number of ids, and ids of some tokens.
PUBLISHED = {
    "llama3": (128_000, 128_256, {"<|begin_of_text|>": 128_000, "<|eot_id|>": 128_009}),
    "llama4": (
        200_000,
        202_048,
        {
            "<|begin_of_text|>": 200_000,
            "<|end_of_text|>": 200_001,
            "<|header_start|>": 200_005,
            "<|eot|>": 200_008,
            "<|finetune_right_pad|>": 200_018,
            "<|text_post_train_reserved_special_token_68|>": 200_079,
            "<|image_start|>": 200_080,
            "<|patch|>": 200_092,
            "<|vision_reserved_special_token_1047|>": 201_133,
            "<|reasoning_reserved_special_token_0|>": 201_134,
            "<|reasoning_thinking_end|>": 201_143,
            "<|reserved_special_token_0|>": 201_144,
        },
    ),
    "o200k_harmony": (
        199_998,
        201_088,
        {"<|endoftext|>": 199_999, "<|return|>": 200_002, "<|call|>": 200_012},
    ),
}
WORDS = "HTTPServer's camelCase WE'LL 12345 ÉCOLE été a/b//\n\n  x = '\n// 東京タワー e\u0301"


def test_all_sets_are_known() -> None:
    assert set(PUBLISHED) == set(SETS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_ids(name: str) -> None:
    first, total, known = PUBLISHED[name]
    tokens = SETS[name].tokens
    assert first + len(tokens) == total
    assert len(set(tokens)) == len(tokens)
    assert {token: first + tokens.index(token) for token in known} == known


def test_harmony_is_tiktokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pattern and ids equal those of the installed library; its file of ranks is not needed."""
    public = pytest.importorskip("tiktoken_ext.openai_public")
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: {})
    if not hasattr(public, "o200k_harmony"):
        pytest.skip("this tiktoken is older than GPT-OSS")
    theirs = public.o200k_harmony()
    ours = SETS["o200k_harmony"]
    assert ours.pattern == theirs["pat_str"]
    ids = {token: 199_998 + index for index, token in enumerate(ours.tokens)}
    assert ids.items() <= theirs["special_tokens"].items()
    assert set(ids.values()) == set(theirs["special_tokens"].values())


@pytest.mark.parametrize("name", ["llama4", "o200k_harmony"])
def test_encoding_and_export(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    file = tmp_path / "tokenizer.model"
    write_tiktoken(file, merges_of_source_code())
    config = TokenizerConfig("tiktoken", str(file), name)
    ours = build_tokenizer(config)
    assert ours.decode([ours.bos_id, ours.eos_id]) == SETS[name].bos + SETS[name].eos
    export_tokenizer(config, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    assert len(theirs) == ours.vocab_size
    for text in [WORDS, *sources(20)]:
        assert ours.decode(ours.encode(text)) == text
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)


@pytest.mark.parametrize("folder", ["original", "."])
def test_the_tokenizer_json_that_came_with_it_is_exported(folder: str, tmp_path: Path) -> None:
    """Also with its chat template; but not the tokenizer.json of another tokenizer."""
    file = tmp_path / folder / "tokenizer.model"
    file.parent.mkdir(exist_ok=True)
    write_tiktoken(file, merges_of_source_code())
    config = TokenizerConfig("tiktoken", str(file), "llama4")
    export_tokenizer(config, tmp_path / "made")
    published = json.loads((tmp_path / "made" / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(published))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eot|>"}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    export_tokenizer(config, tmp_path / "out")
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / name).read_bytes()
    # The tokens that the model was trained with.
    special = {"bos_token": SETS["llama4"].bos, "eos_token": SETS["llama4"].eos}
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == special
    for other in (
        {**published, "model": {**published["model"], "merges": published["model"]["merges"][:300]}},
        {**published, "added_tokens": published["added_tokens"][:-1]},
        {},
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(other))
        export_tokenizer(config, tmp_path / "again")
        assert json.loads((tmp_path / "again" / "tokenizer.json").read_text()) == published


def test_words_are_split_as_o200k_does() -> None:
    """The pattern differs from earlier ones in case within a word, contractions and slashes."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = ["HTTPServer", "'s", " camelCase"]
    for word in (b"HTTPServer", b"HTTPServer's", b" camel", b" camelCase", b"Case"):
        ranks[word] = len(ranks)
    encoding = tiktoken.Encoding(
        "x", pat_str=SETS["llama4"].pattern, mergeable_ranks=ranks, special_tokens={}
    )
    found = [encoding.decode([i]) for i in encoding.encode_ordinary("".join(words))]
    assert found == ["HTTPServer's", " camel", "Case"]
