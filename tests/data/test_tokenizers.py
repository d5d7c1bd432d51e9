"""Tokenizers of every kind: texts, ids and special tokens are those of their exports in transformers."""

import base64
import json
import pickle
import random
import re
import unicodedata

import datasets
import pytest
import sentencepiece
import transformers
from one_line import one_line
from tokenizer_files import (
    AWKWARD,
    CHAT,
    KINDS,
    SPECIAL,
    STDLIB,
    config_of,
    exported,
    huggingface,
    merges_of_source_code,
    sources,
    write_huggingface,
    write_sentencepiece,
    write_tiktoken,
)

from harness.config.data import SETS, TokenizerConfig
from harness.data.stream_reader import RowReader
from harness.data.tokenizer import _cut_long_runs, build_tokenizer, split_long_text
from harness.util.errors import DataError
from harness.util.processes import pickled
from harness.weights.tokenizer import export_tokenizer

ALPHABETS = [
    " \n",
    "ab ",
    "aB\t \n1.'sStTrR",
    "<s>/<0xA> ",
    " é☃\u3000\xa0\x85\u2028",
    "=-#* ",
    "abc def_(.,:'\"\n    1",
]
CHARACTERS = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000 and chr(i) != "▁"]


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return exported(config_of(request.param, folder), folder, request.param)


def random_texts():
    """Short texts of few characters, where merges compete, and of all of Unicode."""
    rng = random.Random(0)
    few = ["".join(rng.choices(rng.choice(ALPHABETS), k=rng.randrange(40))) for _ in range(500)]
    rest = "a 👩‍👩‍👧‍👦 🇩🇪 é e\u0301"
    return few + ["".join(rng.choices(CHARACTERS, k=12)) + rest for _ in range(250)]


@pytest.mark.parametrize(
    "texts", [AWKWARD, sources(20), random_texts()], ids=["awkward", "code", "random"]
)
def test_ids_and_texts(pair, texts):
    ours, theirs = pair.ours, pair.theirs
    is_lossless = pair.kind not in ("sentencepiece_prefix", "sentencepiece_no_bytes")
    for text in texts:
        ids, shown = ours.encode(text), repr(text[:80])
        assert all(0 <= i < ours.vocab_size for i in ids)
        assert not {ours.bos_id, ours.eos_id} & set(ids), "a document cannot end itself"
        if is_lossless and (pair.kind != "huggingface" or unicodedata.is_normalized("NFC", text)):
            assert ours.decode(ids) == text, shown
        # A mark with a dummy prefix is compared with sentencepiece below; transformers does not cut.
        if (pair.kind == "sentencepiece_prefix" and "▁" in text) or len(
            list(_cut_long_runs(text))
        ) > 1:
            continue
        assert (
            theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == ids
        ), shown
        if pair.kind != "sentencepiece_no_bytes":  # unknown characters are decoded differently
            assert theirs.decode(ids) == ours.decode(ids), shown
    assert ours.encode_batch(texts) == [ours.encode(text) for text in texts]


def test_pieces_of_a_long_text_have_the_ids_of_the_full_text(pair, monkeypatch):
    monkeypatch.setattr("harness.data.tokenizer.PIECE_CHARS", 3_000)
    text = (STDLIB / "tarfile.py").read_text() * 2 + "☃" * 7_000 + "\n\n  x"
    parts = [text[begin : begin + 7_777] for begin in range(0, len(text), 7_777)]
    pieces = list(pair.ours.encode_in_pieces(parts))
    assert [int(i) for piece in pieces for i in piece] == pair.ours.encode(text)
    if pair.kind in ("sentencepiece", "huggingface"):  # tiktoken cuts where Meta's code does
        assert len(pieces) > 10


def test_a_text_is_not_cut_where_that_would_change_its_ids():
    """With a tokenizer whose ids depend on earlier lines: it numbers them."""
    text = "line\n" * 1_000_000
    assert list(split_long_text([text], lambda part: list(range(part.count("\n"))))) == [text]


def test_every_id_decodes_and_others_are_shown(pair):
    ours = pair.ours
    assert all(isinstance(ours.decode([i]), str) for i in range(ours.vocab_size))
    assert ours.decode(range(ours.vocab_size))
    a = ours.encode("a")
    found = ours.decode([*a, ours.vocab_size, -1, *a])
    assert found == "a\ufffd\ufffda"


def test_special_tokens(pair):
    ours, theirs = pair.ours, pair.theirs
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    assert len(theirs) == ours.vocab_size
    text = f"a{theirs.eos_token}b"
    assert ours.eos_id not in ours.encode(text)
    # Chat templates need special tokens in texts.
    found = theirs(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]
    assert found.count(ours.eos_id) == 1
    assert ours.encode_prompt(text) == found or pair.kind == "sentencepiece_prefix"
    if pair.kind != "huggingface":
        assert ours.eos_id not in theirs(text, add_special_tokens=False)["input_ids"]
        a, b = ([ours.bos_id, *ours.encode(each)] for each in "ab")
        assert (theirs("")["input_ids"], theirs("a", "b")["input_ids"]) == ([ours.bos_id], [*a, *b])
        assert theirs.decode(theirs("a b")["input_ids"], skip_special_tokens=True) == "a b"
    assert {"input_ids", "attention_mask"} == set(theirs("a")) or pair.kind == "huggingface"


def test_beside_a_model_and_saved_again(pair, tmp_path):
    """With a Llama's config.json in the folder, transformers would by default choose another class."""
    pair.theirs.save_pretrained(tmp_path / "again")
    (tmp_path / "beside").mkdir()
    for file in pair.folder.iterdir():
        (tmp_path / "beside" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "beside" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    text = (STDLIB / "ast.py").read_text()
    for folder in ("again", "beside"):
        again = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        assert again(text, add_special_tokens=False)["input_ids"] == pair.ours.encode(text)


def test_files_of_an_export(pair):
    """transformers 4 would otherwise pass token_type_ids on; llama.cpp reads add_bos_token."""
    content = json.loads((pair.folder / "tokenizer_config.json").read_text())
    if pair.kind == "huggingface":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (pair.folder / name).read_bytes() == pair.config.file.with_name(
                name
            ).read_bytes()
        return
    assert content["model_input_names"] == ["input_ids", "attention_mask"]
    assert content["add_bos_token"] is True and content["add_eos_token"] is False
    specials = json.loads((pair.folder / "special_tokens_map.json").read_text())
    assert specials.items() <= content.items()
    # llama.cpp's converter copies this; without it llama.cpp puts a space before a sentencepiece text.
    assert content["add_prefix_space"] is (pair.kind == "sentencepiece_prefix")
    assert pair.theirs.convert_tokens_to_ids(specials["eos_token"]) == pair.ours.eos_id
    copy = pair.folder / "tokenizer.model"
    assert copy.exists() == (pair.kind != "bytes")
    assert pair.kind == "bytes" or copy.read_bytes() == pair.config.file.read_bytes()


def test_a_process_that_reads_ahead_gets_the_same_tokenizer(pair):
    text = "the  text, \u2581 \U0001f600 <|im_end|><s></s><think>\n\n" * 3
    dataset = datasets.Dataset.from_dict({"text": [text]}).to_iterable_dataset()
    reader = RowReader(dataset, pair.ours, 0, 1, "text", "it", 0, None)
    sent = pickle.loads(pickled(reader))
    assert next(sent.read(sent.beginning)).tokens.tolist() == [
        *([] if pair.ours.bos_id is None else [pair.ours.bos_id]),
        *pair.ours.encode(text),
        pair.ours.eos_id,
    ]
    assert sent.tokenizer.fingerprint == pair.ours.fingerprint


def test_fingerprints_differ(tmp_path):
    file = write_huggingface(tmp_path, CHAT)
    configs = [
        TokenizerConfig("bytes"),
        TokenizerConfig("sentencepiece", "asset:python_2k.model"),
        *(write_tiktoken(tmp_path / special, special=special) for special in SETS),
        write_tiktoken(tmp_path / "other", merges=(b"th",)),
        *(huggingface(file, eos=eos) for eos in SPECIAL),
    ]
    found = [build_tokenizer(config).fingerprint for config in configs]
    assert len(set(found)) == len(configs)
    assert [build_tokenizer(config).fingerprint for config in configs] == found


# -- sentencepiece ----


def test_a_dummy_prefix_is_sentencepieces(tmp_path):
    """Also with U+2581 in the text, which sentencepiece treats as a space."""
    config = write_sentencepiece(tmp_path / "pieces")
    theirs, reference = (
        exported(config, tmp_path).theirs,
        sentencepiece.SentencePieceProcessor(config.path),
    )
    for text in ["", " ", "a", " a", "▁a", "a▁b ▁ c▁", "\n", "  two", "é▁☃"]:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == reference.encode(text)
        assert theirs.decode(ids) == reference.decode(ids)


def test_a_control_token_is_not_merged_from_characters(tmp_path):
    config = write_sentencepiece(tmp_path / "pieces", control_symbols=["re", "▁self"])
    both = exported(config, tmp_path)
    for text in ["return self.re", "<s>re</s>", "selfself"]:
        ids = both.theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == both.ours.encode(text)
        assert both.theirs.convert_tokens_to_ids("re") not in ids


def test_a_model_without_bos_and_eos(tmp_path):
    _, ours, theirs, *_ = exported(
        write_sentencepiece(tmp_path / "pieces", bos_id=-1, eos_id=-1), tmp_path
    )
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id) == (None, None)
    assert theirs("a b")["input_ids"] == ours.encode("a b") and len(theirs) == ours.vocab_size


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram"},
        {"normalization_rule_name": "nmt_nfkc"},
        {"remove_extra_whitespaces": True},
        {"treat_whitespace_as_suffix": True},
        {"user_defined_symbols": ["<x>"]},
        {"user_defined_symbols": ["a b"], "add_dummy_prefix": False},
    ],
)
def test_features_without_support_are_refused(options, tmp_path):
    config = write_sentencepiece(tmp_path / "pieces", files=3, vocab_size=400, **options)
    message = "^tokenizer file .*pieces: a tokenizer.json would give other ids for "
    with one_line(DataError, message):
        export_tokenizer(config, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


# -- tiktoken ----

# Number of byte pairs in the published file, total number of ids, and ids of some tokens.
PUBLISHED = {
    "llama3": (128_000, 128_256, {"begin_of_text": 0, "start_header_id": 6, "eot_id": 9}),
}


@pytest.mark.parametrize("name", SETS)
def test_special_tokens_have_their_published_ids(name, tmp_path):
    first, total, known = PUBLISHED[name]
    tokens = SETS[name].tokens
    assert first + len(tokens) == total
    assert len(set(tokens)) == len(tokens)
    assert {name: tokens.index(f"<|{name}|>") for name in known} == known
    tokenizer = build_tokenizer(write_tiktoken(tmp_path / "ranks", special=name))
    assert tokenizer.decode([tokenizer.bos_id, tokenizer.eos_id]) == SETS[name].bos + SETS[name].eos
    assert tokenizer.decode([262 + i for i in range(len(tokens))]) == "".join(tokens)


def test_tiktoken_reads_the_file_as_it_is_now(tmp_path):
    before = build_tokenizer(write_tiktoken(tmp_path / "ranks"))
    after = build_tokenizer(write_tiktoken(tmp_path / "ranks", merges=(b"th",)))
    assert before.encode("the") == [257] and after.encode("the") == [256, ord("e")]


@pytest.mark.parametrize(
    "text", [*AWKWARD, "x" * 100_000, "x" * 25_000 + " ", "x" * 25_001, "ab " * 300_000], ids=len
)
def test_long_runs_are_cut_where_meta_cuts_them(text):
    pieces = list(_cut_long_runs(text))
    assert "".join(pieces) == text
    assert all(len(run) <= 25_000 for piece in pieces for run in re.findall(r"\S+|\s+", piece))
    assert all(len(piece) <= 400_000 for piece in pieces)
    longest = max(map(len, re.findall(r"\S+|\s+", text)), default=0)
    assert len(pieces) == -(-len(text) // 400_000) or longest > 25_000


def test_all_splits_of_a_token_are_merges(tmp_path):
    """tiktoken joins b"xy" + b"z" and b"x" + b"yz" alike, and a word that is a token needs no merges."""
    config = write_tiktoken(tmp_path / "ranks", [b"yz", b"wx", b"xy", b"xyz", b"wxyz", b"qrs"])
    _, ours, theirs, *_ = exported(config, tmp_path)
    assert len(ours.encode("qrs")) == 1 and len(ours.encode("qrst")) == 4
    for text in ["xyz", "wxyz", "wxy", "awxyzb", "xy", "axyz", "vwxyzz", "qrs", "qrst"]:
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)


@pytest.mark.parametrize("folder", ["original", "."])
def test_the_tokenizer_json_that_came_with_it_is_exported(folder, tmp_path):
    """Also with its chat template; but not the tokenizer.json of another tokenizer."""
    file = tmp_path / folder / "tokenizer.model"
    file.parent.mkdir(exist_ok=True)
    config = write_tiktoken(file, merges_of_source_code(), "llama3")
    export_tokenizer(config, tmp_path / "made")
    published = json.loads((tmp_path / "made" / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(published))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eot_id|>"}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    export_tokenizer(config, tmp_path / "out")
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / name).read_bytes()
    # Only what it does not say is added.
    special = {"eos_token": "<|eot_id|>", "bos_token": SETS["llama3"].bos}
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == special
    for other in (
        {
            **published,
            "model": {**published["model"], "merges": published["model"]["merges"][:20]},
        },
        {**published, "added_tokens": published["added_tokens"][:-1]},
        {},
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(other))
        export_tokenizer(config, tmp_path / "again")
        assert json.loads((tmp_path / "again" / "tokenizer.json").read_text()) == published


# -- files that are none ----

ALL_BYTES = b"".join(b"%s %d\n" % (base64.b64encode(bytes([byte])), byte) for byte in range(256))


@pytest.mark.parametrize(
    ("kinds", "content", "says"),
    [
        ("sentencepiece tiktoken huggingface", None, "No such file"),
        ("sentencepiece tiktoken huggingface", b"", "is empty"),
        ("sentencepiece tiktoken huggingface", b"\n \n", "is empty"),
        ("sentencepiece", b"\x0anonsense", "is not a sentencepiece model"),
        ("tiktoken", b"\x0anonsense", "line 2: not a base64 token"),
        ("tiktoken", ALL_BYTES + b"!!!! 256", "line 257"),
        ("tiktoken", ALL_BYTES + b"YQ==", "line 257"),
        ("tiktoken", ALL_BYTES + b"dGg= 257", "ranks are not 0 to 256"),
        ("tiktoken", ALL_BYTES.split(b"\n", 1)[0], "not every single byte"),
        ("tiktoken", b"version https://git-lfs.github.com/spec/v1", "line 1"),
        *(
            ("huggingface", content, r"is not a tokenizer\.json: ")
            for content in (b"{}", b"[1]", b"no JSON", b'{"model": {"type": "BPE"}}')
        ),
    ],
)
def test_a_bad_file_is_one_line(kinds, content, says, tmp_path):
    for kind in kinds.split():
        file = tmp_path / kind
        if content is not None:
            file.write_bytes(content)
        fields = {"bos": "", "eos": ""} if kind == "huggingface" else {}
        config = TokenizerConfig(kind, str(file), "llama3" if kind == "tiktoken" else "", **fields)
        for use in (build_tokenizer, lambda config: export_tokenizer(config, tmp_path / "out")):
            with one_line(DataError, f"^tokenizer file {file}.*{says}"):
                use(config)
