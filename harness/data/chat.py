"""Conversations for supervised fine-tuning: files of messages, their tokens, and which of these are learned.

Conversations are cached as documents are (``cache.py``). A cached id is twice the token, plus 1 if
the assistant wrote it.

transformers renders templates (the extra ``chat``), in its sandbox. ``strftime_now`` formats the
job's date.
"""

import datetime
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from harness.config.data import DataConfig
from harness.data.documents import LocalFiles, Span, file_stats, list_names, read_columns
from harness.data.tokenizer import Marked, Tokenizer
from harness.data.tokenizer_json import (
    CONFIG,
    SPECIAL_NAMES,
    read_transformers_settings,
    repository_of,
    token_of,
)
from harness.util.encoding import read_object
from harness.util.errors import DataError

_VERSION = 1
_TOOLS = "tools"
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

JINJA = "chat_template.jinja"
PROCESSOR = "chat_template.json"
ASSISTANT = "assistant"
_ROLES = {"human": "user", "gpt": ASSISTANT}
_EXAMPLE = '{"role": "user", "content": "Hello"}'
_NEEDED = {"chatml": ("<|im_start|>", "<|im_end|>")}
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Of surrogates: JSON can spell it, and no tokenizer can read it.
HALF_PAIR = re.compile("[\ud800-\udfff]")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
SETTING = "data.chat_template"
_WORKS = f"{', '.join(TEMPLATES)}, or the path of a template with {{% generation %}}"

Message = dict[str, Any]


class Conversations(LocalFiles):
    """Conversations of JSON lines and parquet files; a document is the JSON of where, messages and tools."""

    without_tokens = f"has no message with the role {ASSISTANT}, or all are empty"

    @property
    def identity(self) -> Any:
        return ["chat", file_stats(self.files), *self.reading[1:]]

    @property
    def reading(self) -> list[Any]:
        return ["chat", self.config.format, self.config.messages_field]

    def format_of(self, file: Path) -> str:
        return "parquet" if super().format_of(file) == "parquet" else "jsonl"

    def read_parquet(self, file: Path, span: Span) -> Iterator[str]:
        rows = read_columns(
            file, span, self.config.messages_field, _TOOLS, setting="data.messages_field"
        )
        group = f" from row group {span.begin} on" if span.begin else ""
        for number, row in enumerate(rows, start=1):
            yield self.document_of(row, f"{file}, row {number}{group}")

    def document_of(self, row: dict[str, Any], where: str) -> str:
        field = self.config.messages_field
        if field not in row:
            raise DataError(
                f"{where}: no field {field!r} among {list_names(row)}; set data.messages_field"
            )
        messages = row[field]
        tools = row.get(_TOOLS)
        for name, value in ((field, messages), (_TOOLS, tools or [])):
            if not isinstance(value, list):
                raise DataError(f"{where}: field {name!r} holds {type(value).__name__}, not a list")
        messages = [
            message_of(each, f"{where}, message {i}") for i, each in enumerate(messages, start=1)
        ]
        text = json.dumps([where, messages, tools], ensure_ascii=False)
        if bad := HALF_PAIR.search(text):
            raise DataError(f"{where}: has U+{ord(bad[0]):04X}, which is not a character")
        return text


class ConversationTokenizer(Tokenizer):
    """Encodes a document of ``Conversations``: each id is twice the token, plus 1 if the token is learned.

    A conversation in which nothing is learned has no ids.
    """

    bos_id = eos_id = None

    def __init__(self, data: DataConfig, tokenizer: Tokenizer) -> None:
        template = template_of(data, tokenizer)
        self._tokenizer = tokenizer
        self._template = template
        self.vocab_size = 2 * tokenizer.vocab_size
        self.special_ids = tokenizer.special_ids
        self.file = tokenizer.file
        key = json.dumps([_VERSION, tokenizer.fingerprint, template.identity], sort_keys=True)
        self.fingerprint = f"chat/{hashlib.sha256(key.encode()).hexdigest()}"

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        rendered = []
        for document in texts:
            where, messages, tools = json.loads(document)
            try:
                rendered.append(self._template.learned(messages, tools))
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
        marked = self._tokenizer.encode_marked([text for text, _ in rendered])
        return [
            _labelled(each, learned) for each, (_, learned) in zip(marked, rendered, strict=True)
        ]

    def encode_in_pieces(self, parts: Iterable[str]) -> Iterator[list[int]]:
        yield self.encode("".join(parts))

    def encode_marked(self, texts: Sequence[str]) -> list[Marked]:
        return self._tokenizer.encode_marked(texts)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([id >> 1 for id in ids])


def _labelled(marked: Marked, learned: list[tuple[int, int]]) -> list[int]:
    """Twice each id, plus 1 where it has a character that is learned; no ids if none has."""
    begins, ends = np.asarray(marked.ranges, dtype=np.int64).reshape(-1, 2).T
    labels = np.zeros(len(begins), dtype=np.int64)
    for begin, end in learned:
        labels[(begins < end) & (ends > begin)] = 1
    return (2 * np.asarray(marked.ids) + labels).tolist() if labels.any() else []


# -- Templates: the text of a conversation, and the parts of it that the assistant wrote ----


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, and the variables that it can read.

    Attributes:
        variables: special tokens by name (``bos_token``), and data.chat_template_options.
        special: texts of all special tokens.
        date: what ``strftime_now`` formats; None: the template may not ask for the date.
        only_last: whether only the last turn of the assistant is learned.
    """

    text: str
    variables: dict[str, Any]
    special: tuple[str, ...]
    date: str | None
    only_last: bool = False

    @property
    def identity(self) -> Any:
        """JSON-serializable; changes whenever a conversation's text or learned parts may change."""
        return [
            self.text,
            self.text,  # once a template of its own for conversations with tools
            self.variables,
            self.special,
            self.date,
            self.only_last,
        ]

    def render(
        self,
        messages: list[Message],
        tools: list[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        return self._rendered(messages, tools, add_generation_prompt=add_generation_prompt)[0]

    @cached_property
    def end_of_turn(self) -> str | None:
        """The special token that ends a turn of the assistant, or None."""
        messages = [
            {"role": "user", "content": "Good morning"},
            {"role": ASSISTANT, "content": "Hello"},
        ]
        text = self.render(messages)
        turn = text[: self._end_after_content(messages[-1], text, 0)]
        return next((token for token in self.special if turn.endswith(token)), None)

    def learned(
        self, messages: list[Message], tools: list[Any] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the ranges of characters that the assistant wrote.

        A range includes the token that ends the turn. The ranges are the template's generation
        blocks, if it has any. Otherwise a turn is the difference of two texts: the conversation up
        to the turn, and before it with the generation prompt.

        Raises:
            DataError: the template refuses the conversation, or the turns cannot be found.
        """
        turns = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not turns:
            return "", []
        if self.only_last:
            turns = turns[-1:]
        if _GENERATION.search(self.text):
            text, marked = self._rendered(messages, tools, marks=True)
            earlier = messages[: turns[0]] if self.only_last else []
            first = len(self._rendered(earlier, tools, marks=True)[1]) if earlier else 0
            return require_text(text), marked[first:]
        text = require_text(self.render(messages, tools))
        return text, [self._turn(messages, tools, index, text) for index in turns]

    def _turn(
        self, messages: list[Message], tools: list[Any] | None, index: int, text: str
    ) -> tuple[int, int]:
        before = self.render(messages[:index], tools, add_generation_prompt=True)
        after = self.render(messages[: index + 1], tools)
        if not text.startswith(before):
            rule = "the generation prompt is not the beginning of a turn"
            raise DataError(
                f"the chat template cannot be used: {rule}; would work: {SETTING}={_WORKS}"
            )
        if text.startswith(after) and after.startswith(before):
            # A template may write a line break after the token that ends the turn. It is not
            # learned.
            ended = after.rstrip()
            return len(before), len(ended if ended.endswith(self.special) else after)
        # Qwen 3 removes the reasoning of earlier turns, and Phi 3 ends a conversation with another
        # token.
        end = self._end_after_content(messages[index], text, len(before))
        if end is None:
            rule = "messages that follow a turn change its text"
            works = f"{SETTING}={_WORKS}"
            if not self.only_last:
                works = f"data.train_on=last, {works}"
            raise DataError(f"the chat template cannot be used: {rule}; would work: {works}")
        return len(before), end

    def _end_after_content(self, message: Message, text: str, begin: int) -> int | None:
        """The end of the special token after a message's content; None if it is not certain.

        It is the first special token after ``begin`` such that the text before it ends with the
        content, or is a part of the content up to its end.
        """
        content = message.get("content")
        content = content.strip() if isinstance(content, str) else ""
        if not content or not self.special or message.get("tool_calls"):
            return None
        for token in re.finditer("|".join(map(re.escape, self.special)), text[begin:]):
            turn = text[begin : begin + token.start()].strip()
            if turn and (turn.endswith(content) or content.endswith(turn)):
                return begin + token.end()
        return None

    def _rendered(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        *,
        add_generation_prompt: bool = False,
        marks: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and with ``marks`` the ranges of its generation blocks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        _compile(self.text, self.date)
        try:
            result: Any = render_jinja_template(
                [[_with_reasoning(message) for message in messages]],
                tools=tools or None,
                chat_template=self.text,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except DataError:
            raise
        except Exception as error:  # a template is a program, which can raise anything
            reason = (
                " ".join(str(error).split()) or type(error).__name__
            )  # a MemoryError says nothing
            raise DataError(f"the chat template refuses it: {reason}") from error
        [rendered], ranges = result
        if bad := HALF_PAIR.search(rendered):
            raise DataError(
                f"the chat template renders U+{ord(bad[0]):04X}, which is not a character"
            )
        return rendered, ranges[0] if ranges else []


def _compile(text: str, date: str | None) -> None:
    """Compile a template as ``render_jinja_template`` does; it finds the result in its cache."""
    # Private, in transformers 4.56 to 5.23: the only way to another date than today's.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    def strftime_now(format: str) -> str:
        if date is None:
            rule = "the chat template asks for today's date, so the samples would differ from day to day"
            raise DataError(f"{rule}; would work: data.chat_date=2026-01-31")
        return datetime.date.fromisoformat(date).strftime(format)

    try:
        _compile_jinja_template(text).globals["strftime_now"] = strftime_now
    except (ImportError, DataError):
        raise
    except Exception as error:  # of jinja2 or of Python's compiler
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"the chat template is not a Jinja template: {reason}") from error


def require_text(text: str) -> str:
    """Return the text of a conversation."""
    if not text.strip():
        raise DataError(f"the chat template renders no text; would work: {SETTING}={_WORKS}")
    return text


def template_of(data: DataConfig, tokenizer: Tokenizer) -> ChatTemplate:
    template = find_template(tokenizer, data.chat_template, data.chat_date)
    return replace(
        template,
        variables=template.variables | data.chat_template_options,
        only_last=data.train_on == "last",
    )


def find_template(
    tokenizer: Tokenizer, name: str | None, date: str | None, setting: str = SETTING
) -> ChatTemplate:
    """Return a template of ``TEMPLATES``, of a file, or of the tokenizer's repository.

    Args:
        name: name or path of the template; None: that of the files beside the tokenizer's.
        date: today's date for the template, as YYYY-MM-DD.
        setting: the field with the name, for errors.

    Raises:
        DataError: there is none, or it is not a template.
    """
    folder = repository_of(tokenizer.file) if tokenizer.file else None
    settings = read_transformers_settings(folder / CONFIG) if folder else {}
    text = None
    if name in TEMPLATES:
        text = TEMPLATES[name]
        for token in _NEEDED.get(name, ()):
            if token not in tokenizer.special_ids:
                raise DataError(f"{setting}={name}: the tokenizer has no token {token}; try plain")
    elif name:
        text = _read(Path(name).expanduser(), f"{setting}={name}")
    elif folder:
        text = _stored_text(folder, settings)
    if text is None:
        where = (
            f"no {JINJA} and no chat_template in {CONFIG} in {folder}"
            if folder
            else "it has no files"
        )
        raise DataError(
            f"the tokenizer has no chat template ({where}); would work: {setting}={_WORKS}"
        )
    tokens = {variable: token_of(settings, variable) for variable in SPECIAL_NAMES}
    by_id = {id: token for token, id in tokenizer.special_ids.items()}
    for variable, id in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
        tokens[variable] = tokens[variable] or by_id.get(-1 if id is None else id)
    template = ChatTemplate(
        text=text,
        variables={variable: token for variable, token in tokens.items() if token},
        special=tuple(sorted(tokenizer.special_ids)),
        date=date,
    )
    _compile(text, date)
    return template


def message_of(message: Any, where: str) -> dict[str, Any]:
    """A message with ``role`` and ``content``; ShareGPT's has ``from`` and ``value``."""
    if isinstance(message, dict) and "from" in message and "role" not in message:
        role = message["from"]
        message = {"role": _ROLES.get(role, role), "content": message.get("value")}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"{where}: has no role; would work: {_EXAMPLE}")
    if message.get("content") is None and not message.get("tool_calls"):
        raise DataError(f"{where}: has no content; would work: {_EXAMPLE}")
    return message


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise DataError(f"{what}: {reason}; would work: {_WORKS}") from error


def _stored_text(folder: Path, settings: dict[str, Any]) -> str | None:
    """The template in transformers' files, in transformers' order of precedence."""
    if (folder / JINJA).is_file():
        return _read(folder / JINJA, str(folder / JINJA))
    stored = settings.get("chat_template")
    if stored is None and (folder / PROCESSOR).is_file():
        stored = read_object(folder / PROCESSOR, DataError).get("chat_template")
    if stored is not None and not isinstance(stored, str):
        raise DataError(f"{folder / CONFIG}: chat_template is not one text; would work: {_WORKS}")
    return stored


def _with_reasoning(message: Message) -> Message:
    """A message without null fields, and with its reasoning under each name that templates read."""
    message = {name: value for name, value in message.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
