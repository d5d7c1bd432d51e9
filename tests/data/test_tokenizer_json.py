"""A tokenizer.json gives transformers' ids, and documents get the configured bos and eos."""

from __future__ import annotations

import json
import re
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from test_data_tokenizer import AWKWARD

from harness.compose.composer import compose_job
from harness.config.data import TokenizerConfig
from harness.data.tokenizer import build_tokenizer, vocabulary_size, with_bos_eos
from harness.util.errors import DataError
from harness.weights.tokenizer import export_tokenizer

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

STDLIB = Path(sysconfig.get_path("stdlib"))
TEXTS = [(STDLIB / name).read_text() for name in ("ast.py", "json/decoder.py", "textwrap.py")]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write(folder: Path, config: dict[str, Any] | None) -> Path:
    """Write a byte-level BPE of 1,000 tokens like Qwen's, with three special tokens and one added token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    # Some publishers leave these enabled in the file.
    tokenizer.enable_truncation(max_length=16)
    tokenizer.enable_padding(length=16, pad_id=1000, pad_token=SPECIAL[0])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


CHAT = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": "<|im_end|>"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("qwen"), CHAT)


def config_of(file: Path, **fields: str | None) -> TokenizerConfig:
    config = TokenizerConfig("huggingface", str(file), **fields)  # type: ignore[arg-type]
    config.validate()
    return config


@pytest.fixture(scope="module")
def theirs(file: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(file.parent)


def test_ids_are_transformers(file: Path, theirs: Any) -> None:
    ours = build_tokenizer(config_of(file))
    assert ours.vocab_size == len(theirs) == vocabulary_size(config_of(file)) == 1004
    for text in [*TEXTS, *AWKWARD, "a<think>b"]:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], repr(text[:80])
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]
    assert max(map(len, ours.encode_batch(TEXTS))) > 1000, "neither cut nor padded"


def test_round_trip(file: Path) -> None:
    ours = build_tokenizer(config_of(file))
    for text in [*TEXTS, "", " \n\t é ☃ 🦙", "a<think>b", "a<|im_end|>b"]:
        assert ours.decode(ours.encode(text)) == text
    assert ours.decode([ours.vocab_size, *ours.encode("a"), -1]) == "\ufffda\ufffd"


def test_ids_may_have_gaps(file: Path, tmp_path: Path) -> None:
    content = json.loads(file.read_text())
    content["added_tokens"], vocabulary = [], content["model"]["vocab"]
    [last] = [token for token, i in vocabulary.items() if i == 999]
    vocabulary[last] = 1010
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    ours = build_tokenizer(config_of(tmp_path / "tokenizer.json", bos="", eos=""))
    assert ours.vocab_size == 1011
    assert ours.decode([999, 1010, 1005]) == f"\ufffd{ours.decode([1010])}\ufffd"
    assert ours.decode(ours.encode(TEXTS[0])) == TEXTS[0]


def test_a_document_cannot_end_itself(file: Path, theirs: Any) -> None:
    ours = build_tokenizer(config_of(file))
    text = "a<|im_end|>b<|endoftext|>"
    assert not {theirs.convert_tokens_to_ids(token) for token in SPECIAL} & set(ours.encode(text))
    assert ours.encode(text) == theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert ours.encode_prompt(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert 1002 in ours.encode_prompt(text)
    # Also if the file does not mark the token as special.
    ours = build_tokenizer(config_of(file, bos="", eos="<think>"))
    assert ours.eos_id == 1003 and 1003 not in ours.encode("a<think>b")


def test_a_panic_of_the_library_is_one_line(file: Path, tmp_path: Path) -> None:
    """A regex that tries too much ends in Rust's PanicException, which is no Exception."""
    content = json.loads(file.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(h+)+$"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    ours, text = build_tokenizer(config_of(tmp_path / "tokenizer.json", bos="", eos="")), "h" * 60 + "x"
    assert ours.encode("hhh")
    calls: list[Any] = [ours.encode, ours.encode_prompt]
    calls += [lambda text: ours.encode_batch([text]), lambda text: ours.encode_marked([text])]
    for call in calls:
        with pytest.raises(DataError, match=r"tokenizer\.json: .*cannot encode a text: .*Regex") as caught:
            call(text)
        assert "\n" not in str(caught.value)


def test_bos_and_eos_from_transformers_files(file: Path, theirs: Any, tmp_path: Path) -> None:
    ours = build_tokenizer(config_of(file))
    assert (ours.bos_id, ours.eos_id) == (None, theirs.eos_token_id) == (None, 1002)
    assert with_bos_eos([7], ours) == [7, 1002]
    # A token as a mapping, and in the file of older versions of transformers.
    settings = {"bos_token": {"content": "<|im_start|>", "lstrip": False}, "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer.json").write_bytes(file.read_bytes())
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(settings))
    assert with_bos_eos([7], build_tokenizer(config_of(tmp_path / "tokenizer.json"))) == [1001, 7, 1000]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert with_bos_eos([7], build_tokenizer(config_of(tmp_path / "tokenizer.json"))) == [1001, 7, 1002]


def test_bos_and_eos_from_the_job(file: Path, tmp_path: Path) -> None:
    chosen = build_tokenizer(config_of(file, bos="<|im_start|>", eos="<|endoftext|>"))
    assert with_bos_eos([7], chosen) == [1001, 7, 1000]
    assert with_bos_eos([7], build_tokenizer(config_of(file, eos=""))) == [7]
    assert chosen.fingerprint != build_tokenizer(config_of(file)).fingerprint
    (tmp_path / "tokenizer.json").write_bytes(file.read_bytes())
    alone = build_tokenizer(config_of(tmp_path / "tokenizer.json", bos="", eos="<|endoftext|>"))
    assert with_bos_eos([7], alone) == [7, 1000]


@pytest.mark.parametrize(
    ("settings", "fields", "says"),
    [
        (None, {}, "no tokenizer_config.json in its folder defines bos_token"),
        (None, {"bos": ""}, "no tokenizer_config.json in its folder defines eos_token"),
        (
            {"bos_token": None},
            {},
            "defines eos_token; would work: tokenizer.eos=\"'<|endoftext|>'\"",
        ),
        ({"eos_token": "</s>"}, {}, "has no token '</s>' for eos; would work: tokenizer.eos="),
        (CHAT, {"bos": "<s>"}, "has no token '<s>' for bos; would work: tokenizer.bos="),
    ],
)
def test_unknown_bos_or_eos(
    settings: dict[str, Any] | None, fields: dict[str, str], says: str, file: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(file.read_bytes())
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match=re.escape(says)) as caught:
        build_tokenizer(config_of(tmp_path / "tokenizer.json", **fields))
    assert "\n" not in str(caught.value)


def test_values_in_an_error_can_be_typed(file: Path, tmp_path: Path) -> None:
    """They are quoted for the shell and Hydra."""
    import shlex

    (tmp_path / "tokenizer.json").write_bytes(file.read_bytes())
    with pytest.raises(DataError) as caught:
        build_tokenizer(config_of(tmp_path / "tokenizer.json", bos=""))
    offered = str(caught.value).split("would work: ")[1].removesuffix(" for none").split(", ")
    tokens = []
    for option in offered:
        [typed] = shlex.split(option)
        job = compose_job(["tokenizer=qwen3", typed])
        tokens.append(job.tokenizer.eos)
    assert tokens == [*SPECIAL, ""]


@pytest.mark.parametrize("content", ["{}", "[1]", "no JSON", '{"model": {"type": "BPE"}}'])
def test_a_bad_file_is_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(
        DataError, match=r"^tokenizer file .*tokenizer\.json is not a tokenizer\.json: "
    ) as caught:
        build_tokenizer(config_of(tmp_path / "tokenizer.json", bos="", eos=""))
    assert "\n" not in str(caught.value)


def test_bad_transformers_files(file: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(file.read_bytes())
    for content, says in (("{", "cannot be read as JSON"), ("[]", "an array, not an object")):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(DataError, match=says):
            build_tokenizer(config_of(tmp_path / "tokenizer.json"))


# -- export ----


def test_the_export_is_the_original(file: Path, tmp_path: Path) -> None:
    (file.parent / "chat_template.jinja").write_text("{{ messages }}")
    export_tokenizer(config_of(file), tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (file.parent / name).read_bytes()
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = build_tokenizer(config_of(file))
    assert again(TEXTS[0], add_special_tokens=False)["input_ids"] == ours.encode(TEXTS[0])
    assert again.eos_token_id == ours.eos_id


def test_the_export_has_the_tokens_of_the_job(file: Path, tmp_path: Path) -> None:
    export_tokenizer(config_of(file, bos="", eos="<|endoftext|>"), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {
        **CHAT,
        "eos_token": "<|endoftext|>",
    }
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (again.bos_token_id, again.eos_token_id) == (None, 1000)


def test_an_export_without_transformers_files(file: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(file.read_bytes())
    config = config_of(tmp_path / "tokenizer.json", bos="<|im_start|>", eos="<|endoftext|>")
    export_tokenizer(config, tmp_path / "out")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (again.bos_token_id, again.eos_token_id) == (1001, 1000)
    assert again("a b", add_special_tokens=False)["input_ids"] == build_tokenizer(config).encode("a b")
