"""A tokenizer.json: its bos and eos, in the job and in its export, and files of other shapes."""

import json
import pickle
import re
import shlex

import pytest
from one_line import one_line
from tokenizer_files import CHAT, SPECIAL, TEXTS, exported, huggingface, write_huggingface

from harness.compose.composer import compose_job
from harness.data.tokenizer import build_tokenizer, with_bos_eos
from harness.util.errors import DataError
from harness.weights.tokenizer import export_tokenizer


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_huggingface(tmp_path_factory.mktemp("qwen"), None).read_bytes()


@pytest.fixture
def file(original, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(original)
    return tmp_path / "tokenizer.json"


def write_settings(file, **settings):
    for name, content in settings.items():
        if content is not None:
            file.with_name(f"{name}.json").write_text(json.dumps(content))


# A token as a mapping, and in the file of older versions of transformers.
OLDER = {"bos_token": {"content": "<|im_start|>", "lstrip": False}, "eos_token": "<|endoftext|>"}
START, END = "<|im_start|>", "<|endoftext|>"


@pytest.mark.parametrize(
    ("tokenizer_config", "special_tokens_map", "fields", "document"),
    [
        (CHAT, None, {}, [7, 1002]),
        (None, OLDER, {}, [1001, 7, 1000]),
        ({"eos_token": "<|im_end|>", "added_tokens_decoder": {}}, OLDER, {}, [7, 1002]),
        (CHAT, None, {"bos": START, "eos": END}, [1001, 7, 1000]),
        (CHAT, None, {"eos": ""}, [7]),
        (None, None, {"bos": "", "eos": END}, [7, 1000]),
    ],
)
def test_bos_and_eos_and_those_of_the_export(
    tokenizer_config, special_tokens_map, fields, document, file
):
    write_settings(file, tokenizer_config=tokenizer_config, special_tokens_map=special_tokens_map)
    file.with_name("chat_template.jinja").write_text("{{ messages }}")
    _, ours, theirs, folder, _ = exported(huggingface(file, **fields), file.parent)
    assert with_bos_eos([7], ours) == document
    if tokenizer_config is None:
        assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    assert theirs(TEXTS[0], add_special_tokens=False)["input_ids"] == ours.encode(TEXTS[0])
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == file.with_name(name).read_bytes()
    if tokenizer_config is not None:
        kept = {
            f"{name}_token": token for name, token in fields.items() if token
        } | tokenizer_config
        assert json.loads((folder / "tokenizer_config.json").read_text()) == kept


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
        ([], {}, "an array, not an object"),
    ],
)
def test_unknown_bos_or_eos(settings, fields, says, file):
    write_settings(file, tokenizer_config=settings)
    for use in (build_tokenizer, lambda config: export_tokenizer(config, file.parent / "out")):
        with one_line(DataError, re.escape(says)):
            use(huggingface(file, **fields))


def test_values_in_an_error_can_be_typed(file):
    """They are quoted for the shell and Hydra."""
    with pytest.raises(DataError) as caught:
        build_tokenizer(huggingface(file, bos=""))
    offered = str(caught.value).split("would work: ")[1].removesuffix(" for none").split(", ")
    typed = [shlex.split(option) for option in offered]
    assert [compose_job(["tokenizer=qwen3", *each]).tokenizer.eos for each in typed] == [
        *SPECIAL,
        "",
    ]


def test_ids_may_have_gaps(file):
    content = json.loads(file.read_text())
    content["added_tokens"], vocabulary = [], content["model"]["vocab"]
    [last] = [token for token, i in vocabulary.items() if i == 999]
    vocabulary[last] = 1010
    file.write_text(json.dumps(content))
    ours = build_tokenizer(huggingface(file, bos="", eos=""))
    assert ours.vocab_size == 1011
    assert ours.decode([999, 1010, 1005]) == f"\ufffd{ours.decode([1010])}\ufffd"
    assert ours.decode(ours.encode(TEXTS[0])) == TEXTS[0]


def test_a_document_cannot_end_itself_also_if_the_file_does_not_mark_the_token(file):
    ours = build_tokenizer(huggingface(file, bos="", eos="<think>"))
    assert ours.eos_id == 1003 and 1003 not in ours.encode("a<think>b")
    ours = build_tokenizer(huggingface(file, bos="", eos=END))
    assert not {1000, 1001, 1002} & set(ours.encode("".join(SPECIAL))) and 1003 in ours.encode(
        "a<think>b"
    )
    assert ours.encode_prompt("".join(SPECIAL)) == [1000, 1001, 1002]


def test_a_panic_of_the_library_is_one_line(file):
    """A regex that tries too much ends in Rust's PanicException, which is no Exception."""
    content = json.loads(file.read_text())
    split = {
        "type": "Split",
        "pattern": {"Regex": "(h+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split, content["pre_tokenizer"]],
    }
    file.write_text(json.dumps(content))
    ours, text = build_tokenizer(huggingface(file, bos="", eos="")), "h" * 60 + "x"
    assert ours.encode("hhh")
    calls = [ours.encode, ours.encode_prompt]
    calls += [lambda text: ours.encode_batch([text]), lambda text: ours.encode_marked([text])]
    for call in calls:
        with one_line(DataError, r"tokenizer\.json: .*cannot encode a text: .*Regex"):
            call(text)


@pytest.mark.parametrize("value", [["<eos>"], 3, {}, {"content": ["<eos>"]}])
@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map"])
def test_tokens_of_any_type(value, name, file):
    """Each is a line with the field, or a token that must be given."""
    write_settings(file, **{name: {"eos_token": value}})
    for use in (build_tokenizer, lambda config: export_tokenizer(config, file.parent / "out")):
        with one_line(DataError, r"eos_token is |defines eos_token"):
            use(huggingface(file, bos=""))


def test_sampling_of_subwords_is_off(tmp_path):
    """BPE's dropout and Unigram's alpha would give other ids each time."""
    file = write_huggingface(tmp_path / "bpe", CHAT, pads=False)
    ids = build_tokenizer(huggingface(file)).encode(TEXTS[0])
    content = json.loads(file.read_text())
    content["model"]["dropout"] = 0.5
    file.write_text(json.dumps(content))
    ours = build_tokenizer(huggingface(file))
    again = pickle.loads(pickle.dumps(ours))
    for tokenizer in (ours, again):
        assert tokenizer.encode(TEXTS[0]) == tokenizer.encode_prompt(TEXTS[0]) == ids
        assert tokenizer.encode_batch([TEXTS[0]]) == [ids]
        assert tokenizer.encode_marked([TEXTS[0]])[0].ids == ids
