"""What a Hugging Face folder says beside a model's geometry: ids that end a text, and settings of generation.

An export keeps what the folder said that the model came from, and adds the ids that it learned to
end with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.data import DataConfig, TokenizerConfig
from harness.config.model import FAMILIES, ModelConfig
from harness.data.tokenizer import build_tokenizer
from harness.util.errors import ConfigError, DataError
from harness.weights.config_json import CONFIG, decoder_part, read_object
from harness.weights.families.harmless import is_listed

GENERATION = "generation_config.json"
_NOT_KEPT = ("auto_map",)  # names Python files, which are not exported


@dataclass(frozen=True)
class Origin:
    """Where a model came from: a folder of Hugging Face's, and the data that it was trained with."""

    folder: Path | None = None
    data: DataConfig | None = None

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder, such as generation_config.json; empty if there is none."""
        file = None if self.folder is None else self.folder / name
        return read_object(file) if file is not None and file.is_file() else {}

    def config(self, model: ModelConfig) -> dict[str, Any]:
        """The fields of the folder's config.json that are no geometry; empty without a folder."""
        found = self.read(CONFIG)
        if not found:
            return {}
        decoder = decoder_part(FAMILIES[model.family], found)
        return {
            name: value
            for name, value in decoder.items()
            if is_listed(name) and name not in _NOT_KEPT
        }


def special_ids(
    model: ModelConfig, tokenizer: TokenizerConfig | None, origin: Origin
) -> tuple[int | None, list[int]]:
    """The id before a text, and the ids that end it: of a turn, if there are turns, and of a document."""
    if tokenizer is None:
        return None, []
    built = build_tokenizer(tokenizer)
    if built.vocab_size > model.vocab_size:
        rule = f"has {built.vocab_size} ids, more than model.vocab_size={model.vocab_size}"
        works = (
            "the tokenizer that the model was trained with, or tokenizer=none, which writes none"
        )
        raise ConfigError("tokenizer", tokenizer.path or tokenizer.kind, rule, works)
    ends = [built.eos_id]
    if origin.data is not None and origin.data.kind == "chat":
        from harness.data.chat import template_of

        try:
            turn = template_of(origin.data, built).end_of_turn
        except DataError:
            turn = None  # a template that refuses two plain messages has no end of a turn that is known
        ends.insert(0, built.special_ids.get(turn or ""))
    return built.bos_id, list(dict.fromkeys(end for end in ends if end is not None))


def with_ends(ends: Sequence[int], found: Any) -> int | list[int] | None:
    """Add ids to a value of eos_token_id: an id, a list, or null. It is unchanged if it has all of them."""
    listed = found if isinstance(found, list) else [found]
    if found is not None and all(end in listed for end in ends):
        return found  # type: ignore[no-any-return]
    merged = [*ends, *(end for end in listed if end is not None and end not in ends)]
    return merged if len(merged) > 1 else next(iter(merged), None)
