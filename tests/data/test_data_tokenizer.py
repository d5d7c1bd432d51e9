"""Tokenizers: round trips, special tokens, and errors of invalid files."""

import base64
import re
import sys
import sysconfig
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "measure"))

import python_tokenizer

from harness.config.data import TokenizerConfig
from harness.data import tokenizer_base
from harness.data.tokenizer import SentencePieceTokenizer, _cut_long_runs, build_tokenizer, vocabulary_size
from harness.util.errors import DataError

STDLIB = Path(sysconfig.get_path("stdlib"))
SOURCES = ["ast.py", "this.py", "tokenize.py", "tarfile.py", "json/decoder.py"]

AWKWARD = [
    "",
    " ",
    "\n",
    "a\r\nb\rc\n\n\n",
    "\tif x:\n\t\t  y   =  1\n" + " " * 100 + "z   \n",
    "  leading and trailing  ",
    "☃ é ﷽ 𝔘𝔫𝔦 \u3000 \ufeff \x00 \x7f",
    "space mark ▁ and ▁▁ twice",
    "<s> </s> <unk> <0x0A> <|begin_of_text|> <|end_of_text|>",
    "x" * 100_000,
    " " * 60_000 + "x" + "\n" * 30_000,
    "word " * 100_000,
]


def write_tiktoken(file, merges=(b"th", b"the", b"  ", b"\n\n", b"xx", b"xxxx")):
    tokens = [bytes([byte]) for byte in range(256)] + list(merges)
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    file.write_bytes(b"\n".join(lines) + b"\n")
    return TokenizerConfig("tiktoken", str(file), "llama3")


@pytest.fixture(scope="module", params=["bytes", "sentencepiece", "tiktoken"])
def tokenizer(request, tmp_path_factory):
    if request.param == "bytes":
        return build_tokenizer(TokenizerConfig("bytes"))
    if request.param == "sentencepiece":
        return build_tokenizer(TokenizerConfig("sentencepiece", "asset:python_2k.model"))
    return build_tokenizer(write_tiktoken(tmp_path_factory.mktemp("tiktoken") / "tokenizer.model"))


@pytest.mark.parametrize("text", AWKWARD, ids=range(len(AWKWARD)))
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("name", SOURCES)
def test_round_trip_of_source_code(tokenizer, name):
    text = (STDLIB / name).read_bytes().decode()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_batch_is_encoded_as_its_texts_are(tokenizer):
    assert tokenizer.encode_batch(AWKWARD) == [tokenizer.encode(text) for text in AWKWARD]
    plain = ["a b", "", "c\n"]
    assert tokenizer.encode_batch(plain) == [tokenizer.encode(text) for text in plain]


def test_pieces_of_a_long_text_have_the_ids_of_the_full_text(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer_base, "PIECE_CHARS", 3_000)
    text = "".join((STDLIB / name).read_bytes().decode() for name in SOURCES) + "☃" * 7_000 + "\n\n  x"
    for part in (700, 10_000, len(text)):
        parts = [text[start : start + part] for start in range(0, len(text), part)]
        pieces = list(tokenizer.encode_in_pieces(parts))
        assert [int(i) for piece in pieces for i in piece] == tokenizer.encode(text)
        if isinstance(tokenizer, SentencePieceTokenizer):  # tiktoken cuts where Meta's code does
            assert len(pieces) > 10


def test_a_text_is_not_cut_where_that_would_change_its_ids():
    """With a tokenizer whose ids depend on earlier lines: it numbers them."""
    text = "line\n" * 1_000_000
    assert list(tokenizer_base.split_long_text([text], lambda part: list(range(part.count("\n"))))) == [text]


def test_the_size_of_a_vocabulary_is_known_without_building(tmp_path):
    for config in (
        TokenizerConfig("bytes"),
        TokenizerConfig("sentencepiece", "asset:python_2k.model"),
        write_tiktoken(tmp_path / "tokenizer.model"),
    ):
        assert vocabulary_size(config) == build_tokenizer(config).vocab_size
    assert vocabulary_size(TokenizerConfig("tiktoken", str(tmp_path / "elsewhere"), "llama3")) is None


def test_every_id_decodes(tokenizer):
    for i in range(tokenizer.vocab_size):
        assert isinstance(tokenizer.decode([i]), str)
    tokenizer.decode(list(range(tokenizer.vocab_size)))


def test_ids_outside_the_vocabulary_are_shown(tokenizer):
    a = tokenizer.encode("a")
    assert tokenizer.decode([*a, tokenizer.vocab_size, -1, *a]) == "a\ufffd\ufffda"


def test_bytes_are_bytes():
    tokenizer = build_tokenizer(TokenizerConfig("bytes"))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (258, 256, 257)
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.decode([256, 0xC3, 257]) == "\ufffd"


def test_the_shipped_model():
    tokenizer = build_tokenizer(TokenizerConfig("sentencepiece", "asset:python_2k.model"))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (2048, 1, 2)
    assert len(tokenizer.encode("\n" + " " * 8)) == 2
    text = (STDLIB / "ast.py").read_text()
    assert len(text) / len(tokenizer.encode(text)) > 2.5


def test_llama3_specials(tmp_path):
    tokenizer = build_tokenizer(write_tiktoken(tmp_path / "tokenizer.model"))
    assert tokenizer.vocab_size == 262 + 256
    assert (tokenizer.bos_id, tokenizer.eos_id) == (262, 263)
    # same order as Meta's ids: bos 128000, start_header 128006, end_header 128007, eot 128009, last 128255
    assert tokenizer.decode([262, 263, 264]) == "<|begin_of_text|><|end_of_text|><|reserved_special_token_0|>"
    assert tokenizer.decode([262 + 6, 262 + 7]) == "<|start_header_id|><|end_header_id|>"
    assert tokenizer.decode([262 + 8, 262 + 9]) == "<|reserved_special_token_4|><|eot_id|>"
    assert tokenizer.decode([262 + 255]) == "<|reserved_special_token_250|>"


def test_tiktoken_merges(tmp_path):
    tokenizer = build_tokenizer(write_tiktoken(tmp_path / "tokenizer.model"))
    assert tokenizer.encode("the") == [257]
    assert tokenizer.encode("thx") == [256, ord("x")]


def test_tiktoken_reads_the_file_as_it_is_now(tmp_path):
    file = tmp_path / "tokenizer.model"
    before = build_tokenizer(write_tiktoken(file))
    after = build_tokenizer(write_tiktoken(file, merges=(b"th",)))
    assert before.encode("the") == [257] and after.encode("the") == [256, ord("e")]
    assert before.fingerprint != after.fingerprint


def test_fingerprints_differ(tmp_path):
    configs = [
        TokenizerConfig("bytes"),
        TokenizerConfig("sentencepiece", "asset:python_2k.model"),
        write_tiktoken(tmp_path / "tokenizer.model"),
    ]
    assert len({build_tokenizer(config).fingerprint for config in configs}) == 3
    assert build_tokenizer(configs[1]).fingerprint == build_tokenizer(configs[1]).fingerprint


ALL_BYTES = b"\n".join(base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256))


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "No such file"), (b"", "is empty"), (b"\n \n", "is empty"), (b"\x0anonsense", "tokenizer file")],
)
def test_bad_file(tmp_path, kind, content, says):
    file = tmp_path / "tokenizer.model"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        build_tokenizer(TokenizerConfig(kind, str(file), "llama3" if kind == "tiktoken" else ""))
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (ALL_BYTES + b"\n!!!! 256", "line 257"),
        (ALL_BYTES + b"\nYQ==", "line 257"),
        (ALL_BYTES + b"\ndGg= 257", "ranks are not 0 to 256"),
        (ALL_BYTES.split(b"\n", 1)[0], "not every single byte"),
        (b"version https://git-lfs.github.com/spec/v1", "line 1"),
    ],
)
def test_bad_tiktoken(tmp_path, content, says):
    file = tmp_path / "tokenizer.model"
    file.write_bytes(content)
    with pytest.raises(DataError, match=says):
        build_tokenizer(TokenizerConfig("tiktoken", str(file), "llama3"))


def test_training_gives_a_lossless_model(tmp_path):
    out = tmp_path / "x.model"
    python_tokenizer.train([(STDLIB / "keyword.py").read_text()], 340, out)
    first = out.read_bytes()
    tokenizer = build_tokenizer(TokenizerConfig("sentencepiece", str(out)))
    assert tokenizer.vocab_size == 340
    assert tokenizer.decode(tokenizer.encode("def ☃(▁):\n\t  return\n")) == "def ☃(▁):\n\t  return\n"
    python_tokenizer.train([(STDLIB / "keyword.py").read_text()], 340, out)
    assert out.read_bytes() == first, "the same input gives the same file"


@pytest.mark.parametrize("text", [*AWKWARD, "x" * 25_000 + " ", "x" * 25_001, "ab " * 300_000], ids=len)
def test_long_runs_are_cut_where_meta_cuts_them(text):
    pieces = list(_cut_long_runs(text))
    assert "".join(pieces) == text
    assert all(len(run) <= 25_000 for piece in pieces for run in re.findall(r"\S+|\s+", piece))
    assert all(len(piece) <= 400_000 for piece in pieces)
    longest = max(map(len, re.findall(r"\S+|\s+", text)), default=0)
    assert len(pieces) == -(-len(text) // 400_000) or longest > 25_000
