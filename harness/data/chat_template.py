"""Chat templates: the text of a conversation, and the parts of it that the assistant wrote.

Templates are rendered as transformers' ``apply_chat_template`` does (transformers 5.23,
utils/chat_template_utils.py): the same sandbox, filters, functions and variables.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from harness.data.config import DataConfig
from harness.data.tokenizer_base import Tokenizer
from harness.data.tokenizer_json import CONFIG, read_json, read_transformers_settings, token_of
from harness.errors import DataError

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "plain": (
        "{{ bos_token }}{% for message in messages %}{{ message['role'] }}:"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %} {{ message['content'] }}{{ eos_token }}{% endgeneration %}"
        "{% else %} {{ message['content'] }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    ),
}
"""Templates by the names of data.chat_template."""

JINJA, PROCESSOR = "chat_template.jinja", "chat_template.json"
_NEEDED = {"chatml": ("<|im_start|>", "<|im_end|>")}
_VARIABLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Unicode's noncharacters, which no text may contain, delimit the generation blocks while a template renders.
MARKS = "\ufdd0\ufdd1"
_BEGIN, _END = MARKS
_WORKS = f"data.chat_template={', '.join(TEMPLATES)}, or the path of a template with {{% generation %}}"

Message = dict[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, and the variables that it can read.

    Attributes:
        text: the template.
        text_with_tools: the template of conversations that have tools.
        variables: special tokens by name (``bos_token``), and data.chat_template_options.
        special: texts of all special tokens.
        date: what ``strftime_now`` formats; None: the template may not ask for the date.
        only_last: whether only the last turn of the assistant is learned.
    """

    text: str
    text_with_tools: str
    variables: dict[str, Any]
    special: tuple[str, ...]
    date: str | None
    only_last: bool

    @property
    def identity(self) -> Any:
        """JSON-serializable; changes whenever a conversation's text or learned parts may change."""
        return [self.text, self.text_with_tools, self.variables, self.special, self.date, self.only_last]

    def render(
        self, messages: list[Message], tools: list[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """Return the text of a conversation.

        Raises:
            DataError: the template refuses the conversation.
        """
        return self._rendered(messages, tools, add_generation_prompt).replace(_BEGIN, "").replace(_END, "")

    def learned(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the ranges of characters that the assistant wrote.

        A range includes the token that ends the turn. The ranges are the template's generation blocks, if it
        has any. Otherwise a turn is the difference of two texts: the conversation up to the turn, and before
        it with the generation prompt.

        Raises:
            DataError: the template refuses the conversation, or the turns cannot be found.
        """
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            return "", []
        if self.only_last:
            turns = turns[-1:]
        if _GENERATION.search(self.text_with_tools if tools else self.text):
            skipped = self._rendered(messages[: turns[0]], tools).count(_BEGIN) if self.only_last else 0
            text, marked = _split_marks(self._rendered(messages, tools))
            return text, marked[skipped:]
        text = self.render(messages, tools)
        return text, [self._turn(messages, tools, index, text) for index in turns]

    def _turn(
        self, messages: list[Message], tools: list[Any] | None, index: int, text: str
    ) -> tuple[int, int]:
        """The range of characters of message ``index`` in the text of all messages."""
        before = self.render(messages[:index], tools, add_generation_prompt=True)
        after = self.render(messages[: index + 1], tools)
        if not text.startswith(before):
            rule = "the generation prompt is not the beginning of a turn"
            raise DataError(f"the tokenizer's chat template cannot be used: {rule}; would work: {_WORKS}")
        if text.startswith(after) and after.startswith(before):
            # A template may write a line break after the token that ends the turn. It is not learned.
            ended = after.rstrip()
            return len(before), len(ended if ended.endswith(self.special) else after)
        end = self._end_of_changed(messages[index], text, len(before))
        if end is None:
            rule = "messages that follow a turn change its text"
            works = _WORKS if self.only_last else f"data.train_on=last, {_WORKS}"
            raise DataError(f"the tokenizer's chat template cannot be used: {rule}; would work: {works}")
        return len(before), end

    def _end_of_changed(self, message: Message, text: str, begin: int) -> int | None:
        """The end of a turn whose text depends on the messages that follow it; None if it is not certain.

        Qwen 3 removes the reasoning of earlier turns, and Phi 3 writes a token at the end of a conversation.
        Such a turn ends with the first special token that the message's content precedes, or a part of it
        up to its end.
        """
        content = message.get("content")
        if not isinstance(content, str) or not content.strip() or message.get("tool_calls"):
            return None
        content = content.strip()
        for token in re.finditer("|".join(map(re.escape, self.special)), text[begin:]):
            turn = text[begin : begin + token.start()].strip()
            if turn and (turn.endswith(content) or content.endswith(turn)):
                return begin + token.end()
        return None

    def _rendered(
        self, messages: list[Message], tools: list[Any] | None, add_generation_prompt: bool = False
    ) -> str:
        """The text with the marks of generation blocks."""
        template = _compile(self.text_with_tools if tools else self.text, self.date)
        try:
            return template.render(
                messages=[_with_reasoning(message) for message in messages],
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except DataError:
            raise
        except Exception as error:  # a template is a program, which can raise anything
            raise DataError(f"the chat template refuses it: {' '.join(str(error).split())}") from error


def find_template(data: DataConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template of data.chat_template, or else that of the files beside the tokenizer's.

    Raises:
        DataError: there is none, or it is not a template.
    """
    folder = _folder_of(tokenizer)
    settings = read_transformers_settings(folder / CONFIG) if folder else {}
    texts = {"default": _chosen_text(data.chat_template, tokenizer)} if data.chat_template else {}
    if not texts and folder:
        texts = _stored_texts(folder, settings)
    if "default" not in texts:
        where = f"no {JINJA} and no chat_template in {CONFIG} in {folder}" if folder else "it has no files"
        raise DataError(f"the tokenizer has no chat template ({where}); would work: {_WORKS}")
    tokens = {name: token_of(settings, name) for name in _VARIABLES}
    ends = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    by_id = {id: token for token, id in tokenizer.special_ids.items()}
    tokens |= {name: by_id.get(id) for name, id in ends.items() if not tokens[name] and id is not None}
    template = ChatTemplate(
        text=texts["default"],
        text_with_tools=texts.get("tool_use", texts["default"]),
        variables={name: token for name, token in tokens.items() if token} | data.chat_template_options,
        special=tuple(sorted(tokenizer.special_ids)),
        date=data.chat_date,
        only_last=data.train_on == "last",
    )
    for text in texts.values():
        try:
            _compile(text, data.chat_date)
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template is not a Jinja template: {error}") from error
    return template


def _folder_of(tokenizer: Tokenizer) -> Path | None:
    """The folder with transformers' files; Meta's repositories have tokenizer.model in ``original/``."""
    if tokenizer.file is None:
        return None
    folder = tokenizer.file.parent
    return folder.parent if folder.name == "original" else folder


def _chosen_text(name: str, tokenizer: Tokenizer) -> str:
    if name not in TEMPLATES:
        try:
            return Path(name).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise DataError(f"data.chat_template={name}: {reason}; would work: {_WORKS}") from error
    missing = [token for token in _NEEDED.get(name, ()) if token not in tokenizer.special_ids]
    if missing:
        raise DataError(f"data.chat_template={name}: the tokenizer has no token {missing[0]}; try plain")
    return TEMPLATES[name]


def _stored_texts(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Templates in transformers' files by name, in transformers' order of precedence."""
    if (folder / JINJA).is_file():
        return {"default": (folder / JINJA).read_text(encoding="utf-8")}
    stored = settings.get("chat_template")
    if stored is None and (folder / PROCESSOR).is_file():
        stored = read_json(folder / PROCESSOR).get("chat_template")
    if isinstance(stored, list):
        stored = {each["name"]: each["template"] for each in stored}
    return stored if isinstance(stored, dict) else {"default": stored} if stored else {}


def _with_reasoning(message: Message) -> Message:
    """A message without null fields, and with its reasoning under each name that templates read."""
    message = {name: value for name, value in message.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _split_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Remove the marks of generation blocks; return the text, and the range of each block."""
    parts, ranges, begin, length = [], [], 0, 0
    for part in re.split(f"([{_BEGIN}{_END}])", marked):
        if part == _BEGIN:
            begin = length
        elif part == _END:
            ranges.append((begin, length))
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), ranges


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``: marks the text that the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore, which could leave the sandbox."""

    def __init__(*args: Any, **values: Any) -> None:  # a template may name a value ``self``
        self, *positional = args
        attributes = dict(*positional, **values)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot store {name!r}")


class _Dict:
    """``dict`` without its other attributes."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own ``tojson`` escapes the characters of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


@lru_cache(maxsize=16)
def _compile(text: str, date: str | None) -> jinja2.Template:
    def strftime_now(format: str) -> str:
        if date is None:
            rule = "the chat template asks for today's date, so the samples would differ from day to day"
            raise DataError(f"{rule}; would work: data.chat_date=2026-01-31")
        return datetime.date.fromisoformat(date).strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(text)
