"""Text of generated tokens, piece by piece: complete characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from harness.data.tokenizer_base import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer returns for bytes that are not a complete character."""
CONTEXT = 8
"""Tokens of the prompt to decode with the new ones: a token's text can depend on its neighbours."""
LONGEST_CHARACTER = 4
"""Bytes of the longest character in UTF-8; fewer undecodable bytes can be the beginning of one."""


class TextStream:
    """Decodes one sequence while it is generated.

    Args:
        tokenizer: decodes ids.
        prompt: ids of the prompt.
        stops: strings that end the text; they are not part of it.

    Attributes:
        text: the text so far.
        is_stopped: whether a stop string was found.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids = list(prompt[-CONTEXT:])
        # Ids from ``_start`` on are decoded together; the text has the first ``_taken`` characters of them.
        self._start, self._read = 0, len(self._ids)
        self._taken = len(tokenizer.decode(self._ids))
        self.text, self._shown = "", 0
        self.is_stopped = False

    def add(self, token: int) -> str:
        """Add a token; return the text that can be shown since the last call."""
        self._ids.append(token)
        self._decode(last=False)
        return self._show(last=False)

    def finish(self) -> str:
        """Return the rest of the text."""
        if not self.is_stopped:
            self._decode(last=True)
        return self._show(last=True)

    def _decode(self, *, last: bool) -> None:
        full = self._tokenizer.decode(self._ids[self._start :])
        kept = full if last else _complete(full)
        self.text += kept[self._taken :]
        self._taken = max(self._taken, len(kept))
        if kept == full:
            self._start, self._read = self._read, len(self._ids)
            self._taken = len(self._tokenizer.decode(self._ids[self._start : self._read]))
        found = [place for stop in self._stops if (place := self.text.find(stop, self._shown)) >= 0]
        if found:
            self.text, self.is_stopped = self.text[: min(found)], True

    def _show(self, *, last: bool) -> str:
        """Text that was not shown; without an end that may be the beginning of a stop string."""
        end = len(self.text)
        if not last and not self.is_stopped:
            end -= max((_overlap(self.text[self._shown :], stop) for stop in self._stops), default=0)
        shown, self._shown = self.text[self._shown : end], end
        return shown


def _complete(text: str) -> str:
    """Text without undecodable bytes at its end that later tokens can complete."""
    undecodable = len(text) - len(text.rstrip(UNFINISHED))
    return text[: len(text) - min(undecodable, LONGEST_CHARACTER - 1)]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
