"""harness generate: text, JSON, prompts from everywhere, and a line for each mistake."""

import io
import json
import re
from pathlib import Path

import pytest
import torch
from cases import texts
from families_table import CASES, random_model, set_fields, to_transformers
from inference_jobs import generation

from harness.compose.composer import compose_job
from harness.compose.verb import guarded
from harness.data.tokenizer import build_tokenizer
from harness.tools.inference.generate import VERB, GenerateJob, generate, read_prompts, read_texts
from harness.util.errors import EXIT_MACHINE, UserError


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A folder of safetensors; the model has a vocabulary for the tokenizer of bytes, and 256 positions."""
    folder = tmp_path_factory.mktemp("weights") / "hf"
    to_transformers(random_model(set_fields(CASES["llama_grouped_query"], vocab_size=258)), folder)
    return folder


def data_of(*typed):
    """Generate; return the data that ``--json`` prints."""
    job = compose_job(typed, config_name="generate", schema=GenerateJob)
    return generate(job, GenerateJob.spelled_out(typed)).data


def run(weights, *overrides):
    return data_of(f"checkpoint={weights}", "cluster.device=cpu", "tokenizer=bytes", *overrides)


def test_text_goes_to_stdout_and_rates_to_stderr(weights, capfd):
    run(weights, "prompt=def f(x): ", "generate.max_new_tokens=5")
    output = capfd.readouterr()
    assert output.out.startswith("def f(x): ")
    assert "11 prompt tokens in" in output.err and "4 more in" in output.err


def test_json(weights, capsys):
    typed = [f"checkpoint={weights}", "tokenizer=bytes", "prompt=x", "generate.prompts=[a,bcd]"]
    assert VERB.run_line([*typed, "cluster.device=cpu", "generate.max_new_tokens=5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    shown = [
        (text["prompt"], text["prompt_tokens"], len(text["tokens"])) for text in found["texts"]
    ]
    assert shown == [("x", 2, 5), ("a", 2, 5), ("bcd", 4, 5)]
    assert {text["ended_by"] for text in found["texts"]} == {"length"}
    assert found["decode_tokens_per_second"] > 0 and found["prefill_tokens_per_second"] > 0
    assert found["checkpoint"] == str(weights)


def test_out_of_memory_is_one_line(weights, monkeypatch, capsys):
    def load(*_):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.50 GiB.\nGPU 0 has 1 GiB."
        )

    monkeypatch.setattr("harness.tools.inference.model.InferenceModel.load", load)
    assert guarded(lambda: len(run(weights, "prompt=x"))) == EXIT_MACHINE
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: out of memory: CUDA out of memory. Tried to allocate 2.50 GiB.\\nGPU 0"
    )
    assert "; would work: a smaller batch_size" in line


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("p.txt", "one\n\ntwo (2)\n", ["one", "two (2)"]),
        ("p.jsonl", '{"prompt": "a\\nb"}\n{"prompt": "c\u2028d"}\n', ["a\nb", "c\u2028d"]),
        ("-", "from stdin\n", ["from stdin"]),
        ("empty.txt", "\n \n", "is empty; would work: a prompt on each line"),
        ("rows.jsonl", "{}\n", 'has no text in "prompt"'),
        ("half.jsonl", '{"prompt": "\\ud800"}', "line 1: is not JSON of UTF-8 text: "),
        ("-", "a\udcff", "generate.prompt_file=-: is not UTF-8 text"),  # the byte 0xFF
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_files_of_prompts(
    name,
    content,
    prompts,
    tmp_path,
    monkeypatch,
):
    monkeypatch.chdir(tmp_path)
    if name == "-":
        monkeypatch.setattr("sys.stdin", io.StringIO(content))
    else:
        Path(name).write_text(content)
    job = generation(tmp_path, "model=llama3_tiny", f"generate.prompt_file={name}")
    if isinstance(prompts, str):
        with pytest.raises(UserError, match=re.escape(prompts)):
            read_texts(job)
    else:
        assert read_texts(job) == prompts


def test_ranks_of_a_launcher_cannot_share_standard_input(monkeypatch):
    for name, value in (
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "here"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    job = generation(
        Path("x"), "model=llama3_tiny", "generate.prompt_file=-", "parallelism.dp_shard=2"
    )
    with pytest.raises(
        UserError, match=r"generate.prompt_file=-: 2 ranks .* cannot share standard input"
    ):
        read_texts(job)


def test_conversations(weights, tmp_path):
    """A prompt is a message of the user, or messages; the end of a turn ends the text."""
    rows = tmp_path / "p.jsonl"
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rows.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"prompt": "d"}) + "\n")
    options = ("generate.chat=plain", "generate.max_new_tokens=3")
    found = run(weights, "prompt=x", f"generate.prompt_file={rows}", *options)["texts"]
    # <s> and </s> are one token each.
    assert [(text["prompt"], len(text["prompt"]) - text["prompt_tokens"]) for text in found] == [
        ("<s>user: x\nassistant:", 2),
        ("<s>user: a\nassistant: b</s>\nuser: c\nassistant:", 5),
        ("<s>user: d\nassistant:", 2),
    ]
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}<s>{% endfor %}")
    job = generation(weights, "prompt=x", f"generate.chat={template}")
    [prompt] = read_prompts(job, read_texts(job), build_tokenizer(job.tokenizer))
    assert (prompt.ids, prompt.end_of_turn) == ([ord("x"), 256], 256)
    template.write_text("{% macro a() %}b{% endmacro %}")
    with pytest.raises(UserError, match="the chat template renders no text; would work: "):
        read_prompts(job, read_texts(job), build_tokenizer(job.tokenizer))


def test_special_tokens_in_prompts(weights):
    """As in transformers, and the token that begins a document is not doubled."""
    job = generation(weights, "generate.prompts=['<s>a</s>b','a</s>b']")
    prompts = read_prompts(job, read_texts(job), build_tokenizer(job.tokenizer))
    assert [len(prompt.ids) for prompt in prompts] == [4, 4]


def test_batches_do_not_change_the_text(weights):
    options = (
        "generate.prompts=[a,bcdef,gh]",
        "generate.temperature=1.5",
        "generate.max_new_tokens=12",
    )
    one, two, three = (
        [text["tokens"] for text in run(weights, *options, f"generate.batch_size={size}")["texts"]]
        for size in (1, 2, 3)
    )
    assert one == two == three


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("checkpoint=nowhere prompt=x", "generate.checkpoint=nowhere: no such folder"),
        ("tokenizer=bytes", "prompt=null: there is no prompt; would work: prompt=TEXT"),
        (
            "tokenizer=bytes prompt=x generate.chat=own",
            "the tokenizer has no chat template (it has no files); would work: generate.chat=chatml, plain",
        ),
        (
            f"tokenizer=bytes prompt={'x' * 300}",
            "prompt 1: has 301 tokens, and model.max_seq_len=256; would work: at most 255",
        ),
        (
            "tokenizer=bytes prompt=abc generate.max_new_tokens=300",
            "generate.max_new_tokens=300: with a prompt of 4 tokens exceeds model.max_seq_len=256; "
            "would work: at most 252",
        ),
        (
            "tokenizer=python_2k prompt=print(hello)",
            "and model.vocab_size=258; would work: the tokenizer that the model was trained with",
        ),
    ],
    ids=lambda value: value[:40],
)
def test_mistakes(typed, message, weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        data_of(f"checkpoint={weights}", *typed.split())
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("typed", "prompt"),
    texts(r"""
        'it' and 'that'   'it' and 'that'
        'quoted'          quoted
        'it\'s'           it's
        it's              it's
        a\                a\
        [x, {y: 1}] ${z}  [x, {y: 1}] ${z}
    """),
)
def test_quotes_of_a_prompt(typed, prompt):
    assert generation(Path("x"), f"prompt={typed}", "model=llama3_tiny").prompt == prompt
