"""The command: text, JSON, prompts from everywhere, and a line for each mistake."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families_table import CASES, random_model, set_fields, to_transformers
from processes import python

from harness.compose.composer import compose_job
from harness.compose.verb import guarded
from harness.data.tokenizer import build_tokenizer
from harness.tools.inference.generate import GenerateJob, generate, read_prompts, read_texts
from harness.util.errors import EXIT_MACHINE, UserError


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of safetensors; the model has a vocabulary for the tokenizer of bytes, and 256 positions."""
    folder = tmp_path_factory.mktemp("weights") / "hf"
    to_transformers(random_model(set_fields(CASES["llama_grouped_query"], vocab_size=258)), folder)
    return folder


def run(weights: Path, *overrides: str) -> dict[str, Any]:
    """Generate; return the data that ``--json`` prints."""
    typed = [f"checkpoint={weights}", "cluster.device=cpu", *overrides]
    if not any(each.startswith("tokenizer") for each in typed):
        typed.append("tokenizer=bytes")
    job = compose_job(typed, config_name="generate", schema=GenerateJob)
    return generate(job, GenerateJob.spelled_out(typed)).data


def test_text_goes_to_stdout_and_rates_to_stderr(weights: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(weights, "prompt=def f(x): ", "generate.max_new_tokens=5")
    output = capfd.readouterr()
    assert output.out.startswith("def f(x): ")
    assert "11 prompt tokens in" in output.err and "4 more in" in output.err


@pytest.mark.parametrize("wanted", ["--json", "generate.json=true"])
def test_json(wanted: str, weights: Path) -> None:
    done = python(
        *("-m", "harness", "generate", f"checkpoint={weights}", "cluster.device=cpu", "tokenizer=bytes"),
        *("prompt=x", "generate.max_new_tokens=5", "generate.prompts=[a,bcd]", wanted),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [text["prompt"] for text in found["texts"]] == ["x", "a", "bcd"]
    assert [text["prompt_tokens"] for text in found["texts"]] == [2, 2, 4]
    assert all(len(text["tokens"]) == 5 and text["ended_by"] == "length" for text in found["texts"])
    assert found["decode_tokens_per_second"] > 0 and found["prefill_tokens_per_second"] > 0
    assert found["checkpoint"] == str(weights)


def test_out_of_memory_is_one_line(
    weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.\nGPU 0 has 1 GiB.")

    monkeypatch.setattr("harness.tools.inference.model.InferenceModel.load", load)
    assert guarded(lambda: len(run(weights, "prompt=x"))) == EXIT_MACHINE
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out of memory: CUDA out of memory. Tried to allocate 2.50 GiB.\\nGPU 0")
    assert "; would work: a smaller batch_size" in line


def test_prompts_from_files_and_standard_input(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, rows = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_text("one\n\ntwo (2)\n")
    rows.write_text('{"prompt": "a\\nb"}\n{"prompt": "c\u2028d"}\n')
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin\n"))
    for name, wanted in (
        (str(lines), ["one", "two (2)"]),
        (str(rows), ["a\nb", "c\u2028d"]),
        ("-", ["from stdin"]),
    ):
        texts = run(weights, f"generate.prompt_file={name}", "generate.max_new_tokens=1")["texts"]
        assert [text["prompt"] for text in texts] == wanted


def test_conversations(weights: Path, tmp_path: Path) -> None:
    """A prompt is a message of the user, or messages; the end of a turn ends the text."""
    rows = tmp_path / "p.jsonl"
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rows.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"prompt": "d"}) + "\n")
    options = ("generate.chat=plain", "generate.max_new_tokens=3")
    found = run(weights, "prompt=x", f"generate.prompt_file={rows}", *options)["texts"]
    assert [text["prompt"] for text in found] == [
        "<s>user: x\nassistant:",
        "<s>user: a\nassistant: b</s>\nuser: c\nassistant:",
        "<s>user: d\nassistant:",
    ]
    # <s> and </s> are one token each.
    assert [text["prompt_tokens"] for text in found] == [
        len(text["prompt"]) - n for text, n in zip(found, (2, 5, 2), strict=True)
    ]
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}<s>{% endfor %}")
    job = compose_job(
        [f"checkpoint={weights}", "tokenizer=bytes", "prompt=x", f"generate.chat={template}"],
        config_name="generate",
        schema=GenerateJob,
    )
    [prompt] = read_prompts(job, read_texts(job), build_tokenizer(job.tokenizer))
    assert (prompt.ids, prompt.end_of_turn) == ([ord("x"), 256], 256)
    template.write_text("{% macro a() %}b{% endmacro %}")
    with pytest.raises(UserError, match="the chat template renders no text; would work: "):
        read_prompts(job, read_texts(job), build_tokenizer(job.tokenizer))


def test_special_tokens_in_prompts(weights: Path) -> None:
    """As in transformers, and the token that begins a document is not doubled; or as in documents."""
    prompts = "generate.prompts=['<s>a</s>b','a</s>b']"
    for options, lengths in ((), [4, 4]), (("generate.special_tokens=false",), [10, 7]):
        texts = run(weights, prompts, "generate.max_new_tokens=1", *options)["texts"]
        assert [text["prompt_tokens"] for text in texts] == lengths


def test_batches_do_not_change_the_text(weights: Path) -> None:
    options = ("generate.prompts=[a,bcdef,gh]", "generate.temperature=1.5", "generate.max_new_tokens=12")
    texts = []
    for size in (1, 2, 3):
        made = run(weights, *options, f"generate.batch_size={size}")
        texts.append([text["tokens"] for text in made["texts"]])
    assert texts[0] == texts[1] == texts[2]


def test_stop_string(weights: Path) -> None:
    [text] = run(weights, "prompt=ab", "generate.max_new_tokens=30")["texts"]
    stop = next(
        each for each in text["text"][3:] if each.isascii() and each.isprintable() and each not in "'\\$"
    )
    [stopped] = run(weights, "prompt=ab", "generate.max_new_tokens=30", f"generate.stop=['{stop}']")["texts"]
    assert stopped["ended_by"] == "stop" and stopped["text"] == text["text"][: text["text"].index(stop)]


MISTAKES = {
    "no checkpoint": (["checkpoint=null", "model=llama3_tiny", "prompt=x"], "checkpoint=null: must be given"),
    "no weights": (["checkpoint=/", "prompt=x"], "generate.checkpoint=/: holds no weights"),
    "no such folder": (["checkpoint=nowhere", "prompt=x"], "generate.checkpoint=nowhere: no such folder"),
    "no prompt": ([], "prompt=null: there is no prompt; would work: prompt=TEXT"),
    "no template": (
        ["prompt=x", "tokenizer=bytes", "generate.chat=own"],
        "the tokenizer has no chat template (it has no files); would work: generate.chat=chatml, plain",
    ),
    "no tokenizer": (["prompt=x"], "has no tokenizer, and records none"),
    "long prompt": (
        [f"prompt={'x' * 300}"],
        "prompt 1: has 301 tokens, and model.max_seq_len=256; would work: at most 255",
    ),
    "too many new tokens": (
        ["prompt=abc", "generate.max_new_tokens=300"],
        "generate.max_new_tokens=300: with a prompt of 4 tokens exceeds model.max_seq_len=256; "
        "would work: at most 252",
    ),
    "pipeline": (["prompt=x", "parallelism=pp"], "parallelism.pp=2: generation computes one position"),
    "context": (["prompt=x", "parallelism.cp=2"], "parallelism.cp=2: generation computes one position"),
    "float8": (
        ["prompt=x", "precision=float8_rowwise"],
        "precision.linear=float8_rowwise: float8 products need many rows",
    ),
    "heads": (["prompt=x", "parallelism.tp=3"], "parallelism.tp=3: must divide"),
    "no file": (["generate.prompt_file=none.txt"], "generate.prompt_file=none.txt: cannot be read"),
    "special tokens": (
        ["prompt=x", "generate.chat=plain", "generate.special_tokens=false"],
        "generate.special_tokens=false: has no effect with generate.chat=plain",
    ),
    "empty stop": (
        ["prompt=x", "generate.stop=['']"],
        "generate.stop=['']: an empty string is in every text",
    ),
    "large vocabulary": (
        ["prompt=print hello", "tokenizer=python_2k"],
        "and model.vocab_size=258; would work: the tokenizer that the model was trained with",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    overrides, wanted = MISTAKES[mistake]
    names = {each.partition("=")[0] for each in overrides}
    typed = [*overrides, *([] if "checkpoint" in names else [f"checkpoint={weights}"])]
    typed += [] if mistake == "no tokenizer" or "tokenizer" in names else ["tokenizer=bytes"]
    with pytest.raises(UserError) as raised:
        job = compose_job(typed, config_name="generate", schema=GenerateJob)
        generate(job, GenerateJob.spelled_out(typed))
    assert wanted in str(raised.value) and "\n" not in str(raised.value)


def test_empty_file(weights: Path, tmp_path: Path) -> None:
    for name, content, wanted in (
        ("empty.txt", "\n \n", "is empty; would work: a prompt on each line"),
        ("rows.jsonl", "{}\n", 'has no text in "prompt"'),
        ("bad.jsonl", "\n{\n", "line 2: is not JSON"),
        ("digits.jsonl", "9" * 5000, "line 1: is not JSON: a number has more than 4300 digits"),
        ("long.txt", "a\n" + "b" * 4_000_001, "line 2: has more than 4000000 characters"),
        ("half.jsonl", '{"prompt": "\\ud800"}', "line 1: has half a surrogate pair"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=re.escape(wanted)):
            run(weights, f"generate.prompt_file={tmp_path / name}")


def test_standard_input(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\udcff"))  # as Python reads the byte 0xFF
    with pytest.raises(UserError, match=r"generate.prompt_file=-: is not UTF-8 text"):
        run(weights, "generate.prompt_file=-")
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"generate.prompt_file=-: 2 ranks .* cannot share standard input"):
        run(weights, "generate.prompt_file=-", "parallelism.dp_shard=2")


@pytest.mark.parametrize(
    ("typed", "prompt"),
    [
        ("'it' and 'that'", "'it' and 'that'"),
        ('"a", "b"', '"a", "b"'),
        ("'quoted'", "quoted"),
        (r"'it\'s'", "it's"),
        ("it's", "it's"),
        ("'", "'"),
        ("a\\", "a\\"),
        ("[x, {y: 1}] ${z}", "[x, {y: 1}] ${z}"),
    ],
)
def test_quotes_of_a_prompt(typed: str, prompt: str) -> None:
    job = compose_job([f"prompt={typed}", "model=llama3_tiny"], config_name="generate", schema=GenerateJob)
    assert job.prompt == prompt
