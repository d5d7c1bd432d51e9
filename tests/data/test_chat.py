"""Conversations get transformers' tokens, and the assistant's are learned."""

import dataclasses
import datetime
import gzip
import json
from itertools import groupby
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import transformers
from cases import rows
from loaders import loader
from one_line import one_line
from tokenizer_files import (
    CHAT,
    config_of,
    huggingface,
    write_huggingface,
    write_sentencepiece,
    write_tiktoken,
)

from harness.compose.composer import compose_job
from harness.config.data import DataConfig
from harness.data.chat import TEMPLATES, Conversations, ConversationTokenizer, template_of
from harness.data.tokenizer import build_tokenizer
from harness.launch.inputs import require_vocabulary
from harness.util.errors import DataError


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **fields):
    return {"role": "assistant", "content": text, **fields}


ANSWER = {"role": "tool", "content": "3"}
FINE = assistant("Fine. <|im_end|> ok")
THOUGHT = assistant("<think>\ny\n</think>\n\nB")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é<"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds 'a' & \"b\" <i>"}}
CONVERSATIONS = {
    "one": ([user("Hi é ☃!"), assistant("Hello 😀!")], None),
    "two": ([user("Hi"), assistant(" Hello\n"), user("How  are\n you?"), FINE], None),
    "system": ([{"role": "system", "content": "Be brief."}, user("Hi"), assistant("Hello")], None),
    "reasoning": ([user("Hi"), assistant("A", reasoning_content="x"), user("q"), THOUGHT], None),
    "tools": ([user("1+2"), assistant(None, tool_calls=[CALL]), ANSWER, assistant("3")], [TOOL]),
    "question_last": ([user("Hi"), assistant("Hello"), user("bye")], None),
}

# A template for each feature that published ones use. The first two mark what the assistant wrote.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{% endgeneration %}"
    "{% generation %}<|im_end|>{%- endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML = (
    "{{ bos_token }}{%- if tools %}{{ tools | tojson(indent=1) }}{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m['role'] + '\n' + (m['content'] or '') | trim }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = """
{%- macro turn(role, text) -%}<|im_start|>{{ role }}
{{ text }}<|im_end|>
{% endmacro -%}
{%- set ns = namespace(last=-1, seen=dict(a=0)) -%}
{%- for m in messages -%}
    {%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
Today is {{ strftime_now('%Y-%m-%d') }}.
{% for m in messages -%}
    {%- if m.role == 'tool' -%}{%- continue -%}{%- endif -%}
    {%- set text = m.content or '' -%}
    {%- if '</think>' in text -%}{%- set reason, text = text.split('</think>') -%}{%- endif -%}
    {%- if m.role == 'assistant' and loop.index0 > ns.last -%}
        {%- set text = '<think>' + (m.reasoning_content or '') + '</think>' + text -%}
    {%- endif -%}
    {{ turn(m.role, text | trim) }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if not enable_thinking -%}{% endif %}{%- endif -%}
"""
MARKED_ONES = {"marked": MARKED, **TEMPLATES}
PUBLISHED = {**MARKED_ONES, "chatml_own": CHATML, "forgetful": FORGETFUL}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    settings = {**CHAT, "bos_token": "<|endoftext|>"}
    return write_huggingface(tmp_path_factory.mktemp("chat"), settings, pads=False).parent


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def ours(folder):
    return build_tokenizer(huggingface(folder / "tokenizer.json"))


def chat(**fields):
    common = {
        "kind": "chat",
        "paths": ["*.jsonl"],
        "attend_across_documents": False,
        "cache_dir": "cache",
    }
    config = DataConfig(**{**common, **fields})
    config.validate()
    return config


def template_file(folder, text):
    path = folder / "template.jinja"
    path.write_text(text)
    return str(path)


def encoded(tokenizer, config, messages, tools=None):
    """The tokens of a conversation, and those that are learned in texts of adjacent ones."""
    both = ConversationTokenizer(config, tokenizer).encode(json.dumps(["file", messages, tools]))
    turns = [
        [id >> 1 for id in part]
        for is_learned, part in groupby(both, lambda id: id & 1)
        if is_learned
    ]
    return (
        [id >> 1 for id in both],
        [id & 1 for id in both],
        [tokenizer.decode(turn) for turn in turns],
    )


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_tokens_are_those_of_transformers(name, conversation, ours, theirs, tmp_path):
    messages, tools = CONVERSATIONS[conversation]
    config = chat(
        chat_template=template_file(tmp_path, PUBLISHED[name]),
        chat_date=datetime.date.today().isoformat(),
    )
    tokens, learned, _ = encoded(ours, config, messages, tools)
    masks = {"return_dict": True, "return_assistant_tokens_mask": name in MARKED_ONES}
    out = theirs.apply_chat_template(messages, tools=tools, chat_template=PUBLISHED[name], **masks)
    assert tokens == out["input_ids"]
    if name in MARKED_ONES:
        assert learned == out["assistant_masks"]


@pytest.mark.parametrize(
    ("template", "conversation", "expected"),
    # "forgetful" changes earlier turns: they have no reasoning.
    rows(r"""
        chatml_own  two            ["Hello<|im_end|>", "Fine. <|im_end|> ok<|im_end|>"]
        chatml_own  tools          ['{"a": 1, "b": "é<"}<|im_end|>', "3<|im_end|>"]
        chatml_own  question_last  ["Hello<|im_end|>"]
        forgetful   two            ["Hello<|im_end|>", "<think></think>Fine. <|im_end|> ok<|im_end|>"]
        forgetful   reasoning      ["A<|im_end|>", "<think></think>\n\nB<|im_end|>"]
        forgetful   question_last  ["Hello<|im_end|>"]
        marked      two            [" Hello\n<|im_end|>", "Fine. <|im_end|> ok<|im_end|>"]
        plain       one            [" Hello 😀!<|im_end|>"]
    """),
)
def test_the_turns_of_the_assistant_are_learned(template, conversation, expected, ours, tmp_path):
    config = chat(
        chat_template=template_file(tmp_path, PUBLISHED[template]), chat_date="2026-01-31"
    )
    *_, turns = encoded(ours, config, *CONVERSATIONS[conversation])
    assert turns == expected
    only_last = dataclasses.replace(config, train_on="last")
    tokens, _, turns = encoded(ours, only_last, *CONVERSATIONS[conversation])
    assert turns == expected[-1:]
    assert "2026-01-31" in ours.decode(tokens) or template != "forgetful"


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "tiktoken"])
def test_tokenizers_without_a_tokenizer_json(kind, tmp_path):
    merged = write_tiktoken(tmp_path / "ranks") if kind == "tiktoken" else None
    tokenizer = build_tokenizer(merged or config_of(kind, tmp_path))
    messages = [user("Hi é☃ the\n\n"), assistant(" x▁y 😀"), user("  more"), assistant("ok")]
    tokens, _, turns = encoded(tokenizer, chat(chat_template="plain"), messages)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    assert bos is not None and eos is not None
    assert tokens[0] == bos and (tokens.count(bos), tokens.count(eos)) == (1, 2)
    assert turns == [
        tokenizer.decode([*tokenizer.encode(f" {m['content']}"), eos]) for m in messages[1::2]
    ]


def test_a_tokenizer_that_changes_text_is_refused(tmp_path):
    tokenizer = build_tokenizer(
        write_sentencepiece(tmp_path / "prefix.model", add_dummy_prefix=True)
    )
    with one_line(DataError, r"changes the text .* would work: tokenizer\.kind=huggingface"):
        encoded(tokenizer, chat(chat_template="plain"), [user("Hi"), assistant("Hello")])


# -- where the template is ----


def found(folder, **fields):
    tokenizer = build_tokenizer(huggingface(folder / "tokenizer.json"))
    return template_of(chat(**fields), tokenizer)


def test_the_repository_has_the_template(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())

    def store(name, content):
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))

    store("chat_template.json", {"chat_template": "1"})
    assert found(tmp_path).text == "1"
    store("tokenizer_config.json", {**settings, "chat_template": "2"})
    assert found(tmp_path).text == "2"
    both = [{"name": "default", "template": "3"}, {"name": "tool_use", "template": "4"}]
    store("tokenizer_config.json", {**settings, "chat_template": both})
    with one_line(DataError, "chat_template is not one text; would work: chatml, plain"):
        found(tmp_path)
    store("chat_template.jinja", "{{ bos_token }}{{ day }}")
    assert found(tmp_path, chat_template_options={"day": 5}).render([]) == "<|endoftext|>5"
    assert found(tmp_path, chat_template="chatml").text == TEMPLATES["chatml"]
    assert (
        transformers.AutoTokenizer.from_pretrained(tmp_path).chat_template
        == "{{ bos_token }}{{ day }}"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    rows(r"""
        {}  'the tokenizer has no chat template \(.*would work: data.chat_template=chatml, plain'
        {chat_template: no.jinja}  'data.chat_template=no.jinja: No such file'
        {chat_template: bad.jinja}  'is not a Jinja template: '
        {chat_template: deep.jinja}  'is not a Jinja template: maximum recursion depth'
    """),
)
def test_a_template_that_cannot_be_used(fields, message, folder):
    Path("bad.jinja").write_text("{% for %}")
    Path("deep.jinja").write_text(f"{{{{ {'(' * 3000}1{')' * 3000} }}}}")
    with one_line(DataError, message):
        found(folder, **fields)


def test_templates_are_checked_before_ranks_start():
    typed = ["data=chat", "data.paths=[x.jsonl]", "model.vocab_size=2048", "training.seq_len=32"]
    require_vocabulary(compose_job([*typed, "data.chat_template=plain"]))
    for more, says in (
        ([], "the tokenizer has no chat template"),
        (["data.chat_template=chatml"], r"chatml: the tokenizer has no token <\|im_start\|>"),
    ):
        with one_line(DataError, says):
            require_vocabulary(compose_job([*typed, *more]))


@pytest.mark.parametrize(
    ("template", "turns", "message"),
    [
        ("{{ raise_exception('no\nsystem') }}", 1, "refuses it: no system"),
        ("{{ 'a' * 10**18 }}", 1, "the chat template refuses it: MemoryError$"),
        ("{{ '\\ud800' }}", 1, r"renders U\+D800, which is not a character$"),
        ("{% macro a() %}b{% endmacro %}", 1, "renders no text; would work: data.chat_"),
        (FORGETFUL, 1, "asks for today's date.*would work: data.chat_date="),
        (
            "{{ messages[-1].content }}",
            1,
            "not the beginning of a turn; would work: data.chat_template=chatml",
        ),
        (
            "{% for m in messages %}{{ m.content if m.role == 'user' or loop.last }};{% endfor %}",
            2,
            "messages that follow a turn change its text; would work: data.train_on=last, data.chat",
        ),
    ],
)
def test_a_conversation_that_has_no_text(template, turns, message, ours, tmp_path):
    config = chat(chat_template=template_file(tmp_path, template))
    with one_line(DataError, rf"^file: .*{message}"):
        encoded(ours, config, [user("a"), assistant("b"), user("c"), assistant("d")][: 2 * turns])


def test_a_generation_prompt_that_begins_to_think(ours, tmp_path):
    """Conversations are refused; a turn can be generated."""
    text = CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif")
    config = chat(chat_template=template_file(tmp_path, text))
    assert template_of(config, ours).end_of_turn == "<|im_end|>"
    with one_line(DataError, "the generation prompt is not the beginning of a turn"):
        encoded(ours, config, *CONVERSATIONS["one"])


# -- files ----


def documents(**fields):
    return [json.loads(text)[1:] for text in Conversations(chat(**fields), "train").documents()]


def test_all_formats_have_the_same_conversations():
    rows = [{"messages": CONVERSATIONS[name][0]} for name in ("one", "two")]
    roles = {"user": "human", "assistant": "gpt"}
    shared = [
        {
            "conversations": [
                {"from": roles[m["role"]], "value": m["content"]} for m in row["messages"]
            ]
        }
        for row in rows
    ]
    lines, shared_lines = (
        "".join(json.dumps(row) + "\n" for row in each) for each in (rows, shared)
    )
    Path("a.jsonl").write_text(lines)
    Path("b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "c.parquet")
    Path("d.txt").write_text(shared_lines)
    expected = [[row["messages"], None] for row in rows]
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        assert documents(paths=[name]) == expected, name
    assert documents(paths=["d.txt"], messages_field="conversations") == expected


def test_files_without_an_assistant():
    Path("a.jsonl").write_text(f'{{"messages": [{HELLO}]}}\n')
    message = (
        r"^data\.paths=\[\*\.jsonl\] has no message with the role assistant, or all are empty$"
    )
    with one_line(DataError, message):
        loader(chat(chat_template="plain"))


HELLO = '{"role": "user", "content": "Hello"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not a JSON object"),
        ('{"text": "a"}', "line 2: no field 'messages' among text; set data.messages_field"),
        ('{"messages": "a"}', "line 2: field 'messages' holds str, not a list"),
        (f'{{"messages": [{HELLO}], "tools": "a"}}', "line 2: field 'tools' holds str, not a list"),
        (f'{{"messages": [{HELLO}, "a"]}}', "line 2, message 2: has no role; would work: "),
        ('{"messages": [{"role": "user"}]}', "line 2, message 1: has no content; would work: "),
        (
            '{"messages": [{"role": "user", "content": "\\ud800"}]}',
            "line 2: has U\\+D800, which is not a cha",
        ),
    ],
)
def test_a_wrong_line_is_named(line, message):
    Path("a.jsonl").write_text(f'{{"messages": [{HELLO}]}}\n{line}\n')
    with one_line(DataError, rf"a\.jsonl, {message}"):
        documents()
