"""How a layout differs from one process, and its row of the table."""

from dataclasses import dataclass

HEADER = f"{'layout':<28} {'ranks':>5} {'loss':>9} {'gradient':>9} {'norm':>9}  verdict  worst parameter\n"


@dataclass(frozen=True)
class Verdict:
    """Largest relative differences between one layout and one process."""

    layout: str
    ranks: int
    loss: float
    gradient: float
    worst_parameter: str
    norm: float
    """That of the gradient norm, of one gradient's part of it, of the norm of a tensor, or of a statistic of
    activations."""
    passed: bool
    wrong_step: int = 0
    """The first step with a value that differs, from 0."""
    first_wrong: str = ""
    """The first value that departs, where the layout differs."""


def line(verdict: Verdict) -> str:
    """One row of the table."""
    return (
        f"{verdict.layout:<28} {verdict.ranks:>5} "
        f"{verdict.loss:>9.1e} {verdict.gradient:>9.1e} {verdict.norm:>9.1e}  "
        f"{'ok     ' if verdict.passed else 'DIFFERS'}  {verdict.worst_parameter}\n"
        + (f"    first wrong: {verdict.first_wrong}\n" if verdict.first_wrong else "")
    )
