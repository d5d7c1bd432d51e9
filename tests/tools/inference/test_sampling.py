"""Choice of tokens, and their text while they are generated: complete characters, stop strings."""

import random

import pytest
import torch

from harness.config.data import TokenizerConfig
from harness.data.tokenizer import BytesTokenizer, build_tokenizer
from harness.tools.inference.decode import Sampler, TextStream
from harness.tools.inference.generate import GenerateConfig

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
PROBABILITIES = LOGITS.softmax(-1)
# Of the first two tokens, as if there were no others.
KEPT = torch.cat([PROBABILITIES[:2] / PROBABILITIES[:2].sum(), torch.zeros(3)])
FIRST = torch.eye(5)[0]


@pytest.mark.parametrize(
    ("options", "wanted", "most"),
    [
        ({"temperature": 0.5}, (LOGITS / 0.5).softmax(-1), 0.03),
        ({"temperature": 1.0}, PROBABILITIES, 0.03),
        ({"temperature": 2.0}, (LOGITS / 2).softmax(-1), 0.03),
        ({"temperature": 0.0}, FIRST, 0),
        ({"temperature": 1e-42}, FIRST, 0),
        ({"top_k": 2}, KEPT, 0.03),
        # The first token has 0.636 of the probability, the first two 0.870.
        ({"top_p": 0.6}, FIRST, 0),
        ({"top_p": 0.7}, KEPT, 0.03),
    ],
    ids=str,
)
def test_frequencies_are_the_probabilities(options, wanted, most):
    given = {"temperature": 1.0, "top_k": None, "top_p": 1.0, **options}
    sampler = Sampler(GenerateConfig(seed=1, **given))
    sampler.begin(range(10), 400, torch.device("cpu"))
    tokens = torch.cat([sampler.choose(LOGITS.expand(10, -1)) for _ in range(400)])
    found = tokens.bincount(minlength=len(LOGITS)) / len(tokens)
    assert (found - wanted).abs().max() <= most
    assert (found[wanted == 0] == 0).all()


def test_a_sequence_does_not_depend_on_the_others():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    together, alone = samplers = [Sampler(GenerateConfig(temperature=1, seed=7)) for _ in range(2)]
    for sampler, numbers in zip(samplers, ([4, 5, 6], [5]), strict=True):
        sampler.begin(numbers, 20, torch.device("cpu"))
    for _ in range(20):
        assert together.choose(logits)[1] == alone.choose(logits[1:2])[0]


def shown(stream, tokens):
    """The pieces of a text that are shown, until a stop string is complete."""
    pieces = []
    for token in tokens:
        pieces.append(stream.add(token))
        if stream.is_stopped:
            break
    return [*pieces, stream.finish()]


SHIPPED = TokenizerConfig(kind="sentencepiece", path="asset:python_2k.model")


@pytest.mark.parametrize("config", [TokenizerConfig(), SHIPPED], ids=["bytes", "sentencepiece"])
def test_pieces_are_the_text(config):
    tokenizer = build_tokenizer(config)
    text = "naïve 漢字 🙂👩‍🚀 and  two spaces\n\tthe end. "
    prompt, ids = tokenizer.encode("def f():"), tokenizer.encode(text)
    stream = TextStream(tokenizer, prompt)
    pieces = shown(stream, ids)
    together = tokenizer.decode([*prompt, *ids])
    assert "".join(pieces) == stream.text == together[len(tokenizer.decode(prompt)) :]
    assert not any("\ufffd" in piece for piece in pieces), "half a character was shown"
    assert sum(bool(piece) for piece in pieces) > 10, "text comes while it is generated"


def test_bytes_that_are_no_text():
    """They equal the complete text, and are not held back for ever."""
    stream = TextStream(BytesTokenizer(), [])
    assert "".join(map(stream.add, [0xFF, 0xFE, 0xFF, 0xFF, 0xFF, *b"ab"])).endswith("ab")
    generator = random.Random(0)
    pieces = [bytes([0xFF]), bytes([0xE2]), bytes([0xE2, 0x82]), "€".encode(), "🙂".encode(), b"a"]
    for _ in range(300):
        ids = [*b"".join(generator.choices(pieces, k=12))]
        stream = TextStream(BytesTokenizer(), [*b"prompt "])
        assert "".join(shown(stream, ids)) == stream.text == BytesTokenizer().decode(ids)


def test_stop_strings_equal_a_search_in_the_complete_text():
    """The text ends with the first stop string that is complete; no beginning of one is shown."""
    generator = random.Random(0)
    for _ in range(300):
        text = "".join(generator.choices("ab", k=30))
        stops = tuple("".join(generator.choices("ab", k=generator.randint(3, 7))) for _ in range(2))
        ends = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
        first = min(ends)[0] if ends else None
        wanted = (
            text if first is None else text[: min(place for end, place in ends if end == first)]
        )
        stream = TextStream(BytesTokenizer(), [], stops)
        assert "".join(shown(stream, [*text.encode()])) == stream.text == wanted
        assert stream.is_stopped == bool(ends)
