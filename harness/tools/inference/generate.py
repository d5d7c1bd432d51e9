"""The verb ``generate``: its options, its prompts, and the text that decoders make."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, ClassVar, Self

from harness.compose.generator import Generator, Request, generator_of
from harness.compose.verb import Result, Verb
from harness.config.fields import label, part, with_value
from harness.config.job import Job
from harness.config.parallelism import degrees_in_words
from harness.config.registry import resolve_options
from harness.data.chat import find_template, message_of, require_text
from harness.data.tokenizer import Tokenizer, build_tokenizer, with_bos
from harness.model.architecture import architecture_of
from harness.tools.inference.inference import InferenceJob, is_first, run_on_ranks, use_checkpoint
from harness.train.objective import objective_of
from harness.train.process import launched_ranks
from harness.util.encoding import parse
from harness.util.errors import EXIT_OK, ConfigError, UserError
from harness.util.words import formatted

STDIN = "-"
HELP = """`harness generate`: generate text with the weights of a run or a checkpoint.

Tensor, data and expert parallel generate the same as one process. Text goes to stdout, rates to stderr.
Models of other architectures make what their `Generator` says.

    harness generate checkpoint=runs/NAME/ID prompt="The parser reads"
    harness generate checkpoint=... prompt=... generate.temperature=0.8 generate.top_p=0.95
    harness generate checkpoint=... generate.prompt_file=prompts.txt --json
    harness generate checkpoint=... prompt=... parallelism=tp parallelism.tp=2
"""


@dataclass(frozen=True)
class GenerateConfig:
    """Weights, prompts, and how tokens are chosen."""

    checkpoint: str | None = label(None)
    """Weights: a run folder (its newest complete checkpoint), a DCP checkpoint, or a folder of
    safetensors. ``checkpoint=PATH`` is short for it."""
    prompts: list[str] = label(factory=list)
    """Several prompts; ``prompt=TEXT`` is one."""
    prompt_file: str | None = label(None)
    """File with a prompt on each line; of a .jsonl file, the field ``prompt`` of each line. ``-``:
    lines of standard input."""
    chat: str | None = label(None)
    """Chat template: ``own`` (that of the tokenizer's repository), ``chatml``, ``plain``, or the
    path of one. Each prompt is then a message of the user, or the field ``messages`` of a line of a
    .jsonl file, and the next turn of the assistant is generated. Null: prompts are text."""
    max_new_tokens: int = label(100, least=1)
    """Largest number of tokens to generate after each prompt."""
    batch_size: int = label(8, least=1)
    """Prompts per data-parallel rank that are generated together."""
    temperature: float = label(0.0, least=0)
    """Logits are divided by it before sampling; 0: always the most probable token."""
    top_k: int | None = label(None, least=1)
    """Sample from this many most probable tokens; null: from all."""
    top_p: float = label(1.0, above=0, most=1)
    """Sample from the most probable tokens whose probabilities sum to this (arXiv:1904.09751)."""
    seed: int = label(0, least=0)
    """Seed of sampling. The result of the i-th prompt depends on the seed and i only."""
    stop: list[str] = label(factory=list)
    """Strings that end a text; they are not part of it."""
    stop_at_end: bool = label(True)
    """Whether the tokenizer's end-of-document token ends a text; with ``chat`` also the end of a
    turn."""
    options: dict[str, Any] = label(factory=dict)
    """Options of generating, for an architecture that another package has added."""


@dataclass(frozen=True)
class GenerateJob(InferenceJob):
    """A job plus the options of a generation."""

    WEIGHTS: ClassVar[str] = "generate.checkpoint"

    prompt: str | None = label(None, verbatim=True)
    """The prompt, one line; brackets, commas and quotes in it need no quotes around."""
    generate: GenerateConfig = part(GenerateConfig)
    """Weights, prompts, and how tokens are chosen."""

    def resolve(self, *, launched_ranks: int | None = None, gpus: int | None = None) -> Self:
        """Also check the options of the generation; raise ConfigError for a wrong one."""
        if "" in self.generate.stop:
            raise ConfigError(
                "generate.stop", self.generate.stop, "an empty string is in every text", "[]"
            )
        generator = generator_of(self.model)
        config = self.generate
        makes = architecture_of(self.model).makes
        for name in generator.ignores:
            value = getattr(config, name)
            if value != getattr(GenerateConfig(), name):
                rule = f"has no effect: model={self.model.name} makes {makes}"
                raise ConfigError(f"generate.{name}", value, rule, "leave it out")
        owner = f"model.architecture={self.model.architecture}"
        options = resolve_options(config.options, generator.options, "generate.options", owner)
        job = replace(
            self,
            generate=replace(config, options=options),
            **objective_of(self.model).for_generation(self.data, self.training, self.model),
        )
        return super(GenerateJob, job).resolve(launched_ranks=launched_ranks, gpus=gpus)


OWN = "own"
"""Value of generate.chat: the template of the tokenizer's repository."""
Conversation = list[dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """A prompt and its token ids, with the token that begins a document.

    Attributes:
        end_of_turn: id that ends the assistant's turn, or None.
    """

    text: str
    ids: list[int]
    end_of_turn: int | None = None


def read_prompts(
    job: GenerateJob, found: Sequence[str | Conversation], tokenizer: Tokenizer
) -> list[Prompt]:
    """Tokenize all prompts, as ``read_texts`` returns them."""
    config = job.generate
    if config.chat:
        prompts = _turns(config.chat, found, tokenizer)
    else:
        prompts = []
        for text in map(str, found):
            # The text of a special token (<|im_start|>) is that token, as in transformers.
            prompts.append(Prompt(text, with_bos(tokenizer.encode_prompt(text), tokenizer)))
    for number, prompt in enumerate(prompts, start=1):
        if not prompt.ids:
            raise UserError(
                f"prompt {number}: is empty, and the tokenizer has no token to begin with"
            )
        if max(prompt.ids) >= job.model.vocab_size:
            raise UserError(
                f"prompt {number}: has token {max(prompt.ids)}, and model.vocab_size={job.model.vocab_size}; "
                "would work: the tokenizer that the model was trained with"
            )
    return prompts


def read_texts(job: GenerateJob) -> list[str | Conversation]:
    """Read all prompts, as text; with generate.chat also conversations."""
    config = job.generate
    found: list[str | Conversation] = [*config.prompts]
    if job.prompt is not None:
        found.insert(0, job.prompt)
    if config.prompt_file is not None:
        found += _lines(config.prompt_file, with_messages=config.chat is not None)
    if not found:
        works = "prompt=TEXT, generate.prompts=[A,B], generate.prompt_file=FILE, or generate.prompt_file=-"
        raise ConfigError("prompt", None, "there is no prompt", works)
    return found


def _turns(chat: str, found: Sequence[str | Conversation], tokenizer: Tokenizer) -> list[Prompt]:
    """Return each conversation as a prompt that ends where the assistant's turn begins."""
    template = find_template(
        tokenizer, None if chat == OWN else chat, date.today().isoformat(), "generate.chat"
    )
    end = tokenizer.special_ids.get(template.end_of_turn or "")
    texts = []
    for prompt in found:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        texts.append(require_text(template.render(messages, add_generation_prompt=True)))
    encoded = tokenizer.encode_marked(texts)
    return [Prompt(text, each.ids, end) for text, each in zip(texts, encoded, strict=True)]


def require_room(prompts: Sequence[Prompt], job: GenerateJob) -> int:
    """Return the length of the longest sequence: the longest prompt and all new tokens."""
    longest = max(len(prompt.ids) for prompt in prompts)
    most = job.model.max_seq_len
    if longest >= most:
        number = next(i for i, prompt in enumerate(prompts, start=1) if len(prompt.ids) == longest)
        raise UserError(
            f"prompt {number}: has {longest} tokens, and model.max_seq_len={most}; "
            f"would work: at most {most - 1}"
        )
    new = job.generate.max_new_tokens
    if longest + new > most:
        rule = f"with a prompt of {longest} tokens exceeds model.max_seq_len={most}"
        raise ConfigError("generate.max_new_tokens", new, rule, f"at most {most - longest}")
    return longest + new


def _lines(file: str, *, with_messages: bool) -> list[str | Conversation]:
    """Read the prompts of the lines of a file or of standard input that are not blank."""
    name = f"generate.prompt_file={file}"
    ranks = launched_ranks() or 1
    if file == STDIN and ranks > 1:
        rule = f"{ranks} ranks of a launcher cannot share standard input"
        raise ConfigError("generate.prompt_file", file, rule, "a file")
    try:
        text = sys.stdin.read() if file == STDIN else Path(file).read_text(encoding="utf-8")
        # Standard input has surrogates for bytes that are not UTF-8; encoding them raises.
        text.encode("utf-8")
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}") from error
    except UnicodeError as error:
        raise UserError(f"{name}: is not UTF-8 text") from error
    prompts: list[str | Conversation] = []
    # Not splitlines(), which also splits at separators that JSON allows inside of a text.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        if file.endswith(".jsonl"):
            prompts.append(_prompt_of(line, f"{name}, line {number}", with_messages))
        else:
            prompts.append(line)
    if not prompts:
        raise UserError(f"{name}: is empty; would work: a prompt on each line")
    return prompts


def _prompt_of(line: str, place: str, with_messages: bool) -> str | Conversation:
    try:
        row = parse(line)
        # Half a surrogate pair, which no tokenizer can read, raises too.
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except ValueError as error:
        raise UserError(f"{place}: is not JSON of UTF-8 text: {error}") from error
    row = row if isinstance(row, dict) else {}
    if with_messages and isinstance(row.get("messages"), list):
        return [
            message_of(message, f"{place}, message {i}")
            for i, message in enumerate(row["messages"], start=1)
        ]
    prompt = row.get("prompt")
    if not isinstance(prompt, str):
        raise UserError(f'{place}: has no text in "prompt"; would work: {{"prompt": "..."}}')
    return prompt


class Texts(Generator):
    """Generates text after each prompt, with a decoder."""

    def generate(self, request: Request) -> int | Result:
        job: GenerateJob = request.job
        prompts = read_prompts(job, request.prompts, build_tokenizer(job.tokenizer))
        job = with_value(job, "training.seq_len", require_room(prompts, job))
        streams = len(prompts) == 1
        outcome = request.run(job, "harness.tools.inference.decode:generate", prompts, streams)
        if outcome is None:
            return EXIT_OK
        data = as_dict(job, request.found.path, outcome)
        sys.stderr.write(
            f"{data['prefill_tokens']} prompt tokens in {outcome.prefill_seconds:.2f} s "
            f"({formatted(data['prefill_tokens_per_second'], ',.0f')} tokens/s), "
            f"{data['decode_tokens']} more in {outcome.decode_seconds:.2f} s "
            f"({formatted(data['decode_tokens_per_second'], ',.0f')} tokens/s); "
            f"weights loaded in {outcome.load_seconds:.1f} s\n"
        )
        count = len(outcome.texts)
        shown = [
            f"--- {text.number + 1} of {count} ({text.ended_by})\n{text.prompt}{text.text}\n"
            for text in outcome.texts
        ]
        return Result(data, "" if streams else "".join(shown))


SECONDS = ("load_seconds", "prefill_seconds", "decode_seconds")


def as_dict(job: GenerateJob, path: str, outcome: Any) -> dict[str, Any]:
    """The texts, numbers of tokens and rates as plain containers; a rate without tokens is None."""
    data = {
        "checkpoint": path,
        "model": job.model.name,
        "layout": degrees_in_words(job.parallelism.degrees),
        "texts": [dataclasses.asdict(text) for text in outcome.texts],
        **{name: getattr(outcome, name) for name in SECONDS},
        "prefill_tokens": sum(text.prompt_tokens for text in outcome.texts),
        # The first new token of a text is chosen in the pass over its prompt.
        "decode_tokens": sum(len(text.tokens) - 1 for text in outcome.texts),
    }
    for name in ("prefill", "decode"):
        tokens = data[f"{name}_tokens"]
        seconds = data[f"{name}_seconds"]
        data[f"{name}_tokens_per_second"] = tokens / seconds if tokens and seconds else None
    return data


def generate(job: GenerateJob, overrides: list[str]) -> int | Result:
    """Generate the answer of the architecture's models to each prompt."""
    generator = generator_of(job.model)
    job, found = use_checkpoint(job, overrides, has_text=generator.has_text)

    def run(job: Job, function: str, *arguments: Any) -> Any:
        on_rank = "harness.tools.inference.model:with_model"
        result = run_on_ranks(job, on_rank, function, found, *arguments)
        return result if is_first() else None

    return generator.generate(Request(job, overrides, found, read_texts(job), run))


VERB = Verb("generate", generate, help=HELP, job=GenerateJob, has_json=True)
