"""Tasks of lm-evaluation-harness (the package lm_eval), answered by a model on any layout."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm_eval
import numpy as np
import torch.distributed as dist
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from harness.model.decoder import Decoder
from harness.run.result import LM_EVAL
from harness.tools.inference.decode import generate_texts
from harness.tools.inference.evaluate import EvaluateJob
from harness.tools.inference.generate import GenerateConfig, Prompt
from harness.tools.inference.model import InferenceModel
from harness.tools.inference.tasks import ScoredRow, Setting, encode_pair, windows
from harness.util.errors import ConfigError, HarnessError, UserError, one_line

if TYPE_CHECKING:
    from harness.tools.inference.scoring import Scorer

NEW_TOKENS = 256
"""New tokens of a text where a task does not say, as in lm_eval's own models."""
# Names that tasks use for the number of new tokens.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# Nearest names to show for a misspelled one.
_SHOWN = 5


class Library:
    """Tasks by name, and their evaluation.

    Every rank runs lm_eval with the same requests, and all ranks compute each answer together. So
    lm_eval takes each rank for the only one.

    Args:
        job: the resolved job.
        names: tasks as typed, ``lm_eval:NAME``.

    Raises:
        ConfigError: lm_eval has no such task, or the folder with tasks does not exist.
    """

    def __init__(self, job: EvaluateJob, names: Sequence[str]) -> None:
        self.job = job
        self.names = [name.removeprefix(LM_EVAL) for name in names]
        if dist.is_initialized() and dist.get_rank() > 0:
            logging.getLogger("lm_eval").setLevel(logging.ERROR)
        folder = job.evaluate.include_path
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError("evaluate.include_path", folder, "no such folder")
        self.manager = _manager(folder, self.names)
        known = self.manager.all_tasks
        for name in self.names:
            if name not in known:
                near = difflib.get_close_matches(name, known, _SHOWN, 0.0)
                works = [f"{LM_EVAL}{each}" for each in near]
                rule = "lm-evaluation-harness has no such task"
                raise ConfigError("evaluate.tasks", f"{LM_EVAL}{name}", rule, works)

    def evaluate(
        self, model: InferenceModel, scorer: Scorer, setting: Setting
    ) -> dict[str, dict[str, Any]]:
        """Return the metrics of each task."""
        return {
            f"{LM_EVAL}{name}": self._evaluate(name, HarnessLM(model, scorer, setting))
            for name in self.names
        }

    def _evaluate(self, name: str, lm: HarnessLM) -> dict[str, Any]:
        options = self.job.evaluate
        try:
            found = lm_eval.simple_evaluate(
                model=lm,
                tasks=[name],
                task_manager=self.manager,
                num_fewshot=options.num_fewshot,
                limit=options.limit,
                log_samples=False,
            )
        except HarnessError:
            raise
        except Exception as error:
            # Until the first request, lm_eval reads files of others and the hub, which can raise
            # anything.
            if lm.has_answered:
                raise
            reason = one_line(f"{type(error).__name__}: {error}")
            raise UserError(
                f"{LM_EVAL}{name}: lm-evaluation-harness cannot prepare the task: {reason}"
            ) from error
        # Under torchrun lm_eval returns results on the first rank of a node only.
        return {} if found is None else metrics_of(name, found)


def _manager(folder: str | None, names: Sequence[str]) -> TaskManager:
    """lm_eval's index of tasks; without its own thousands of files if the folder has all that are needed."""
    if folder is not None:
        manager = TaskManager(include_path=folder, include_defaults=False)
        if set(names) <= set(manager.all_subtasks):
            return manager
    return TaskManager(include_path=folder)


def metrics_of(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten lm_eval's results of a task or group: ``acc``, or ``acc.<filter>`` for a named filter.

    Metrics of the tasks in a group begin with the task's name.
    """
    metrics: dict[str, Any] = {}
    for task, values in found["results"].items():
        before = "" if task == name else f"{task}."
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            if isinstance(value, int | float | np.number):
                metrics[f"{before}{metric}{'' if chosen in ('', 'none') else f'.{chosen}'}"] = (
                    float(value)
                )
        counts = found.get("n-samples", {}).get(task, {})
        if "effective" in counts:
            metrics[f"{before}examples"] = counts["effective"]
        for label in ("n-shot", "versions"):
            if found.get(label, {}).get(task) is not None:
                metrics[f"{before}{label}"] = found[label][task]
    return metrics


class HarnessLM(LM):  # type: ignore[misc]
    """lm_eval's interface to a model; all ranks call each method together, with the same requests."""

    def __init__(self, model: InferenceModel, scorer: Scorer, setting: Setting) -> None:
        super().__init__()
        self.model = model
        self.scorer = scorer
        self.setting = setting
        self.has_answered = False

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether it is the greedy one.

        A context that is too long loses its beginning.
        """
        self.has_answered = True
        rows = [self._row(*request.args) for request in requests]
        return [(float(nats), not misses) for nats, misses in self.scorer.score(rows)]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Log-probability of each text, in windows."""
        self.has_answered = True
        rows = []
        owners = []
        for number, request in enumerate(requests):
            # As hf does: after a begin token, bos is scored too if the tokenizer has it.
            tokens = [*self.setting.prefix, *self.setting.encode(request.args[0])]
            found = list(windows(tokens, self.setting.window))
            rows += found
            owners += [number] * len(found)
        sums = np.zeros(len(requests))
        np.add.at(sums, np.asarray(owners, dtype=np.int64), self.scorer.score(rows)[:, 0])
        return [float(nats) for nats in sums]

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Text after each context, up to a stop string."""
        self.has_answered = True
        layout = self.model.job.parallelism
        for name in ("pp", "cp"):
            if getattr(layout, name) > 1:
                rule = "the task generates text, one position at a time"
                raise ConfigError(f"parallelism.{name}", getattr(layout, name), rule, "1")
        texts = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        for numbers in groups.values():
            config = generation(requests[numbers[0]].args[1], self.model.job.local_batch_size)
            prompts = [
                self._prompt(requests[number].args[0], config.max_new_tokens) for number in numbers
            ]
            longest = max(len(prompt.ids) for prompt in prompts)
            with _caching(self.model.part, longest + config.max_new_tokens):
                made = generate_texts(self.model, prompts, config, self.setting.tokenizer)
            for number, text in zip(numbers, made.texts, strict=True):
                texts[number] = text.text
        return texts

    def _row(self, context: str, continuation: str) -> ScoredRow:
        tokens, start = encode_pair(context, continuation, self.setting)
        left_out = max(0, len(tokens) - 1 - self.setting.window)
        if left_out >= start:
            raise UserError(
                f"{LM_EVAL} a continuation of {len(tokens) - start} tokens does not fit into "
                f"evaluate.seq_len={self.setting.window}"
            )
        return ScoredRow(tokens[left_out:], start - left_out)

    def _prompt(self, context: str, new: int) -> Prompt:
        setting = self.setting
        room = self.setting.window - new
        if room < 1:
            raise UserError(
                f"{LM_EVAL} a task generates {new} tokens, which leaves no room for a prompt in "
                f"evaluate.seq_len={setting.window}"
            )
        return Prompt(context, (setting.encode(context) or setting.prefix)[-room:])


def generation(wanted: Mapping[str, Any], batch_size: int) -> GenerateConfig:
    """The options that a task's ``generation_kwargs`` mean.

    Raises:
        UserError: one has no meaning here.
    """
    left = dict(wanted)
    until = left.pop("until", None) or []
    lengths = [int(left.pop(name)) for name in _LENGTHS if left.get(name) is not None]
    temperature = float(left.pop("temperature", None) or 0.0)
    samples = left.pop("do_sample", None)
    top_k = left.pop("top_k", None)
    top_p = left.pop("top_p", None)
    unknown = [name for name, value in left.items() if value is not None]
    if unknown:
        raise UserError(f"{LM_EVAL} generation_kwargs {', '.join(unknown)}: not supported")
    return GenerateConfig(
        max_new_tokens=lengths[0] if lengths else NEW_TOKENS,
        batch_size=batch_size,
        temperature=temperature if samples is not False else 0.0,
        top_k=top_k or None,
        top_p=1.0 if top_p is None else float(top_p),
        stop=[each for each in ([until] if isinstance(until, str) else until) if each],
    )


@contextmanager
def _caching(part: Decoder, capacity: int) -> Iterator[None]:
    """Context manager in which mixers have a cache; scoring passes have none."""
    before = [(module, module.inner) for module in (*part.kernels, *part.scans)]
    part.use_cache(capacity)
    try:
        yield
    finally:
        for module, inner in before:
            module.inner = inner
