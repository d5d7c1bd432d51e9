"""Exported tokenizers, loaded by transformers, against ours and against the libraries ours use."""

from __future__ import annotations

import base64
import io
import json
import random
import sysconfig
import time
from functools import cache
from itertools import chain, islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from test_data_tokenizer import AWKWARD, write_tiktoken
from tiers import THOROUGH, rest_is_thorough

from harness.config.data import TokenizerConfig
from harness.data.tokenizer import Tokenizer, _cut_long_runs, build_tokenizer
from harness.util.errors import DataError
from harness.weights.tokenizer import export_tokenizer

sentencepiece = pytest.importorskip("sentencepiece")
transformers = pytest.importorskip("transformers")

STDLIB = Path(sysconfig.get_path("stdlib"))
ALPHABETS = [
    " \n",
    "ab ",
    "aB\t \n1.'sStTrR",
    "<s>/<0xA> ",
    " é☃\u3000\xa0\x85\u2028",
    "=-#* ",
    "abc def_(.,:'\"\n    1",
]
KINDS = ["bytes", "sentencepiece", "sentencepiece_prefix", "sentencepiece_no_bytes", "tiktoken"]


@cache
def short_files() -> list[Path]:
    files = (file for file in sorted(STDLIB.glob("**/*.py")) if "site-packages" not in file.parts)
    return [file for file in files if 500 < file.stat().st_size < 30_000]


def sources(files: int) -> list[str]:
    """Short files from all parts of the standard library."""
    own = short_files()
    return [file.read_bytes().decode("utf-8", errors="replace") for file in own[:: len(own) // files]][:files]


def write_sentencepiece(file: Path, *, files: int = 50, **options: object) -> TokenizerConfig:
    """Write a model of 1,000 pieces of source code, by default with the options of Llama 2's."""
    model = io.BytesIO()
    like_llama2 = {
        "model_type": "bpe",
        "vocab_size": 1000,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "character_coverage": 0.9995,
        "minloglevel": 2,
    }
    lines = (line for text in sources(files) for line in text.split("\n"))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, **{**like_llama2, **options}
    )
    file.write_bytes(model.getvalue())
    return TokenizerConfig("sentencepiece", str(file))


@cache
def merges_of_source_code() -> list[bytes]:
    """The multi-byte pieces of a sentencepiece model, in order, as merges of a tiktoken file."""
    with TemporaryDirectory() as folder:
        config = write_sentencepiece(Path(folder) / "pieces", vocab_size=4000, add_dummy_prefix=False)
        model = sentencepiece.SentencePieceProcessor(model_file=config.path)
    plain = [
        i for i in range(len(model)) if not (model.is_control(i) or model.is_byte(i) or model.is_unknown(i))
    ]
    return [
        each for each in (model.id_to_piece(i).replace("▁", " ").encode() for i in plain) if len(each) > 1
    ]


def config_of(kind: str, folder: Path) -> TokenizerConfig:
    if kind == "bytes":
        return TokenizerConfig("bytes")
    if kind == "tiktoken":
        return write_tiktoken(folder / "ranks", merges_of_source_code())
    if kind == "sentencepiece":
        return TokenizerConfig("sentencepiece", "asset:python_2k.model")
    if kind == "sentencepiece_prefix":
        return write_sentencepiece(folder / "pieces")
    return write_sentencepiece(folder / "pieces", add_dummy_prefix=False, byte_fallback=False)


class Pair:
    """One of our tokenizers, and its export loaded by transformers."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder / "exported"
        self.config = config_of(kind, folder)
        self.ours, self.theirs = exported(self.config, folder)

    def check(self, text: str) -> None:
        ids = self.theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == self.ours.encode(text), repr(text[:80])
        if self.kind != "sentencepiece_no_bytes":  # unknown characters are decoded differently
            assert self.theirs.decode(ids) == self.ours.decode(ids), repr(text[:80])


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp(request.param))


def exported(config: TokenizerConfig, folder: Path) -> tuple[Tokenizer, Any]:
    """Our tokenizer, and transformers' from its export."""
    export_tokenizer(config, folder / "exported")
    return build_tokenizer(config), transformers.AutoTokenizer.from_pretrained(folder / "exported")


def test_source_code(pair: Pair) -> None:
    files = 200 if THOROUGH else 20
    texts = sources(files)
    assert len(texts) == files
    for text in texts:
        pair.check(text)


@pytest.mark.parametrize("text", AWKWARD, ids=range(len(AWKWARD)))
def test_awkward_texts(pair: Pair, text: str) -> None:
    if pair.kind == "sentencepiece_prefix" and "▁" in text:
        pytest.skip("compared with sentencepiece itself below")
    if pair.kind == "tiktoken" and len(list(_cut_long_runs(text))) > 1:
        pytest.skip("Meta's code cuts such texts, and transformers does not")
    pair.check(text)


def test_random_texts(pair: Pair) -> None:
    """Short texts of few characters, where merges compete, and of all of Unicode."""
    rng = random.Random(0)
    texts = 2000 if THOROUGH else 500
    for _ in range(texts):
        pair.check("".join(rng.choices(rng.choice(ALPHABETS), k=rng.randrange(40))))
    characters = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000 and chr(i) != "▁"]
    for _ in range(texts // 2):
        pair.check("".join(rng.choices(characters, k=12)) + "a 👩‍👩‍👧‍👦 🇩🇪 é e\u0301")


def test_special_tokens(pair: Pair) -> None:
    ours, theirs = pair.ours, pair.theirs
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    assert len(theirs) == ours.vocab_size
    text = "a b"
    assert theirs(text)["input_ids"] == [ours.bos_id, *ours.encode(text)]
    assert theirs("a", "b")["input_ids"] == [ours.bos_id, *ours.encode("a"), ours.bos_id, *ours.encode("b")]
    assert theirs("")["input_ids"] == [ours.bos_id]
    assert theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True) == text
    assert set(theirs(text)) == {"input_ids", "attention_mask"}, "what LlamaForCausalLM takes"


def test_special_tokens_in_text_can_be_enabled(pair: Pair) -> None:
    """Chat templates need this; by default special tokens are plain text, as in our tokenizers."""
    text = f"a{pair.theirs.eos_token}b"
    found = pair.theirs(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]
    assert found.count(pair.ours.eos_id) == 1
    assert pair.ours.encode_prompt(text) == found or pair.kind == "sentencepiece_prefix"
    assert pair.ours.eos_id not in pair.theirs(text, add_special_tokens=False)["input_ids"]


def test_beside_a_model_and_saved_again(pair: Pair, tmp_path: Path) -> None:
    """With a Llama's config.json in the folder, transformers would by default choose another class."""
    pair.theirs.save_pretrained(tmp_path)
    for file in pair.folder.iterdir():
        (tmp_path / "beside" / file.name).parent.mkdir(exist_ok=True)
        (tmp_path / "beside" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "beside" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    text = (STDLIB / "ast.py").read_text()
    for folder in (tmp_path, tmp_path / "beside"):
        again = transformers.AutoTokenizer.from_pretrained(folder)
        assert again(text)["input_ids"] == [pair.ours.bos_id, *pair.ours.encode(text)]


def test_the_original_file_is_kept(pair: Pair) -> None:
    copy = pair.folder / "tokenizer.model"
    assert copy.exists() == (pair.kind != "bytes")
    assert pair.kind == "bytes" or copy.read_bytes() == pair.config.file.read_bytes()


def test_a_dummy_prefix_is_sentencepieces(tmp_path: Path) -> None:
    """Also with U+2581 in the text, which sentencepiece treats as a space."""
    pair = Pair("sentencepiece_prefix", tmp_path)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "pieces"))
    for text in ["", " ", "a", " a", "▁a", "a▁b ▁ c▁", "\n", "  two", "é▁☃"]:
        ids = pair.theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == reference.encode(text)
        assert pair.theirs.decode(ids) == reference.decode(ids)
    assert json.loads((pair.folder / "tokenizer_config.json").read_text())["add_prefix_space"] is True


@pytest.mark.parametrize("size", rest_is_thorough([32_000, 128_000], 32_000))
def test_a_large_vocabulary_takes_seconds(tmp_path: Path, size: int) -> None:
    words = (product(b"etaoinshrdlcum _", repeat=length) for length in range(2, 6))
    merges = list(islice(map(bytes, chain.from_iterable(words)), size - 256))
    config = write_tiktoken(tmp_path / "ranks", merges)
    start = time.perf_counter()
    export_tokenizer(config, tmp_path / "timed")
    assert time.perf_counter() - start < 30 * size / 128_000
    ours, theirs = exported(config, tmp_path)
    assert len(theirs) == ours.vocab_size == size + 256
    for text in sources(20):
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)


def test_all_splits_of_a_token_are_merges(tmp_path: Path) -> None:
    """tiktoken joins b"xy" + b"z" and b"x" + b"yz" alike, and a word that is a token needs no merges."""
    config = write_tiktoken(tmp_path / "ranks", [b"yz", b"wx", b"xy", b"xyz", b"wxyz", b"qrs"])
    ours, theirs = exported(config, tmp_path)
    assert len(ours.encode("qrs")) == 1 and len(ours.encode("qrst")) == 4
    for text in ["xyz", "wxyz", "wxy", "awxyzb", "xy", "axyz", "vwxyzz", "qrs", "qrst"]:
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)


def test_merges_are_those_of_transformers_converter(tmp_path: Path) -> None:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    pair = Pair("tiktoken", tmp_path)
    converted = json.loads(TikTokenConverter(str(pair.config.file)).tokenizer().to_str())["model"]
    written = json.loads((pair.folder / "tokenizer.json").read_text())["model"]
    assert len(written["merges"]) > 4000
    assert written["merges"] == converted["merges"] and written["vocab"] == converted["vocab"]


def test_a_control_token_is_not_merged_from_characters(tmp_path: Path) -> None:
    config = write_sentencepiece(tmp_path / "pieces", control_symbols=["re", "▁self"])
    ours, theirs = exported(config, tmp_path)
    for text in ["return self.re", "<s>re</s>", "selfself"]:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == ours.encode(text)
        assert theirs.convert_tokens_to_ids("re") not in ids


def test_a_model_without_bos_and_eos(tmp_path: Path) -> None:
    config = write_sentencepiece(tmp_path / "pieces", bos_id=-1, eos_id=-1)
    ours, theirs = exported(config, tmp_path)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id) == (None, None)
    assert theirs("a b")["input_ids"] == ours.encode("a b") and len(theirs) == ours.vocab_size


def test_settings_for_other_libraries(pair: Pair) -> None:
    """transformers 4 would otherwise pass token_type_ids on; llama.cpp reads add_bos_token."""
    content = json.loads((pair.folder / "tokenizer_config.json").read_text())
    assert content["model_input_names"] == ["input_ids", "attention_mask"]
    assert content["add_bos_token"] is True and content["add_eos_token"] is False
    specials = json.loads((pair.folder / "special_tokens_map.json").read_text())
    assert specials.items() <= content.items()
    # llama.cpp's converter copies this; without it llama.cpp puts a space before a sentencepiece text.
    assert content["add_prefix_space"] is (pair.kind == "sentencepiece_prefix")
    assert pair.theirs.convert_tokens_to_ids(specials["eos_token"]) == pair.ours.eos_id


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model_type": "unigram"}, "is not of type bpe"),
        ({"normalization_rule_name": "nmt_nfkc"}, r"normalizes characters \(nmt_nfkc\)"),
        ({"remove_extra_whitespaces": True}, "removes repeated spaces"),
        ({"treat_whitespace_as_suffix": True}, "treats spaces in an unusual way"),
        ({"user_defined_symbols": ["<x>"]}, "has both a dummy prefix and user defined symbols"),
        ({"user_defined_symbols": ["a b"], "add_dummy_prefix": False}, "has pieces with plain spaces"),
    ],
)
def test_features_without_support_are_refused(options: dict[str, object], says: str, tmp_path: Path) -> None:
    config = write_sentencepiece(tmp_path / "pieces", files=3, vocab_size=400, **options)
    message = f"^tokenizer file .*pieces {says}, which tokenizer.json does not support$"
    with pytest.raises(DataError, match=message):
        export_tokenizer(config, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_a_bad_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "ranks").write_bytes(base64.b64encode(b"a") + b" 0")
    with pytest.raises(DataError, match="not every single byte"):
        export_tokenizer(TokenizerConfig("tiktoken", str(tmp_path / "ranks"), "llama3"), tmp_path / "out")
