"""Text of tokens while they are generated: complete characters, stop strings."""

from __future__ import annotations

import random

import pytest

from harness.config.data import TokenizerConfig
from harness.data.tokenizer import BytesTokenizer, build_tokenizer
from harness.tools.inference.decode import TextStream

TEXT = "naïve 漢字 🙂👩‍🚀 and  two spaces\n\tthe end. "
SHIPPED = TokenizerConfig(kind="sentencepiece", path="asset:python_2k.model")


def streamed(stream: TextStream, ids: list[int]) -> list[str]:
    return [*(stream.add(token) for token in ids), stream.finish()]


@pytest.mark.parametrize("config", [TokenizerConfig(), SHIPPED], ids=["bytes", "sentencepiece"])
def test_pieces_are_the_text(config: TokenizerConfig) -> None:
    tokenizer = build_tokenizer(config)
    prompt, ids = tokenizer.encode("def f():"), tokenizer.encode(TEXT)
    stream = TextStream(tokenizer, prompt)
    pieces = streamed(stream, ids)
    together = tokenizer.decode([*prompt, *ids])
    assert "".join(pieces) == stream.text == together[len(tokenizer.decode(prompt)) :]
    assert not any("\ufffd" in piece for piece in pieces), "half a character was shown"
    assert sum(bool(piece) for piece in pieces) > 10, "text comes while it is generated"


def test_bytes_that_are_no_text_are_not_held_back_for_ever() -> None:
    stream = TextStream(BytesTokenizer(), [])
    shown = "".join(stream.add(token) for token in [0xFF, 0xFE, 0xFF, 0xFF, 0xFF, ord("a"), ord("b")])
    assert shown.endswith("ab")


def test_random_bytes_equal_the_complete_text() -> None:
    generator = random.Random(0)
    pieces = [bytes([0xFF]), bytes([0xE2]), bytes([0xE2, 0x82]), "€".encode(), "🙂".encode(), b"a"]
    for _ in range(300):
        ids = [*b"".join(generator.choices(pieces, k=12))]
        stream = TextStream(BytesTokenizer(), [*b"prompt "])
        assert "".join(streamed(stream, ids)) == stream.text == BytesTokenizer().decode(ids)


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (("two",), "one "),
        (("wo t", "three"), "one t"),
        (("absent",), "one two three"),
        (("e t", "one"), ""),
        (("three",), "one two "),
    ],
)
def test_stop_strings(stops: tuple[str, ...], text: str) -> None:
    stream, shown = TextStream(BytesTokenizer(), [], stops), ""
    for token in b"one two three":
        shown += stream.add(token)
        assert text.startswith(shown), "a stop string, or its beginning, was shown"
        if stream.is_stopped:
            break
    assert shown + stream.finish() == stream.text == text
    assert stream.is_stopped == (text != "one two three")


def test_random_stops_equal_a_search_in_the_complete_text() -> None:
    generator = random.Random(0)
    for _ in range(300):
        text = "".join(generator.choices("ab", k=30))
        stops = ["".join(generator.choices("ab", k=generator.randint(3, 7))) for _ in range(2)]
        stream, shown = TextStream(BytesTokenizer(), [], stops), ""
        for token in text.encode():
            shown += stream.add(token)
            if stream.is_stopped:
                break
        # The text ends with the first stop string that is complete.
        ends = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
        first = min(ends)[0] if ends else None
        wanted = text if first is None else text[: min(place for end, place in ends if end == first)]
        assert shown + stream.finish() == wanted
