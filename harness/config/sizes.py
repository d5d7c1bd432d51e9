"""Sizes of a run's steps: the number of sequences, the tokens per sequence, and the position of each step.

Steps are numbered from 1. T is ``training.seq_len``, the length of a sample. A position is a number of
tokens: token p is token p % T of sample p // T. Shorter sequences are consecutive pieces of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Changes = Sequence[tuple[int, int]]
"""``(last step, size)`` of the phases before the final size, in order."""


@dataclass(frozen=True)
class Phase:
    """Consecutive steps of one size."""

    first_step: int
    last_step: int | None
    """None: the end of the run."""
    batch_size: int
    """Sequences per step, over all ranks."""
    seq_len: int
    """Tokens per sequence."""

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch_size * self.seq_len

    def steps_until(self, step: int) -> int:
        """Number of the phase's steps up to ``step``."""
        last = step if self.last_step is None else min(self.last_step, step)
        return max(0, last - self.first_step + 1)

    def begin(self, position: int) -> int:
        """Return the position at which a step begins if the step before it ended at ``position``.

        It is a multiple of seq_len, so that no piece crosses a sample: less than one piece is left out.
        """
        return -(-position // self.seq_len) * self.seq_len

    def share(self, rows: range, batch_size: int) -> range:
        """Return the rows of a rank that has ``rows`` of a batch of ``batch_size``: the same fraction."""
        return range(rows.start * self.batch_size // batch_size, rows.stop * self.batch_size // batch_size)


class Sizes:
    """Sizes of all steps of a run.

    Args:
        batch_size: final number of sequences per step.
        seq_len: final tokens per sequence, T.
        batch_sizes: numbers of sequences before.
        seq_lens: tokens per sequence before; each divides T.
    """

    def __init__(
        self, batch_size: int, seq_len: int, batch_sizes: Changes = (), seq_lens: Changes = ()
    ) -> None:
        self.batch_size, self.seq_len = batch_size, seq_len
        self.phases: list[Phase] = []
        first = 1
        for last in sorted({last for last, _ in (*batch_sizes, *seq_lens)}):
            sizes = _size_at(first, batch_sizes, batch_size), _size_at(first, seq_lens, seq_len)
            self.phases.append(Phase(first, last, *sizes))
            first = last + 1
        self.phases.append(Phase(first, None, batch_size, seq_len))

    @property
    def lengths(self) -> list[int]:
        """The different lengths of sequences, in order of appearance."""
        return list(dict.fromkeys(phase.seq_len for phase in self.phases))

    def at(self, step: int) -> Phase:
        """Return the phase of a step."""
        return next(each for each in self.phases if each.last_step is None or step <= each.last_step)

    def changes_length(self, step: int) -> bool:
        """Whether the sequences of a step have another length than those of the step before."""
        return step > 1 and self.at(step).seq_len != self.at(step - 1).seq_len

    def tokens(self, steps: int) -> int:
        """Return the tokens trained in the first ``steps`` steps."""
        return sum(phase.steps_until(steps) * phase.tokens for phase in self.phases)

    def steps_for(self, tokens: int) -> int:
        """Return the smallest number of steps that train at least ``tokens`` tokens."""
        done = 0
        for phase in self.phases:
            steps = -(-(tokens - done) // phase.tokens)
            if phase.last_step is None or steps <= phase.steps_until(phase.last_step):
                break
            done += phase.steps_until(phase.last_step) * phase.tokens
        return phase.first_step - 1 + steps

    def position(self, steps: int) -> int:
        """Return the position after the first ``steps`` steps."""
        position = 0
        for phase in self.phases:
            if number := phase.steps_until(steps):
                position = phase.begin(position) + number * phase.tokens
        return position


def _size_at(step: int, changes: Changes, final: int) -> int:
    return next((size for last, size in changes if step <= last), final)
