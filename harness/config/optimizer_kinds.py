"""The kinds of optimizers, without torch: what config, plan and builder know of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from harness.config.registry import Registry


@dataclass(frozen=True)
class Kind:
    """The update rule of some tensors."""

    build: str
    """``module:function`` that returns the optimizer for an ``OptimizerConfig``, parameter groups with
    ``params``, ``kind``, ``lr``, ``weight_decay``, ``betas`` and ``eps``, and the process group of the ranks
    that hold shards of them (None for one rank). Options are a fourth argument."""
    state: tuple[str, ...]
    """Names of its state tensors that have the parameter's shape."""
    counts_steps: bool = False
    """Whether the state also has a float32 scalar ``step`` for every tensor."""
    has_betas: bool = True
    """Whether ``optimizer.beta1`` and ``beta2`` apply."""
    has_eps: bool = True
    """Whether ``optimizer.eps`` applies."""
    others: str | None = None
    """If set, it updates hidden matrices only (``TensorSpec.is_hidden_matrix``), and by default this kind
    updates the other tensors."""
    exchanges: bool = False
    """Whether the ranks that hold pieces of a matrix exchange them, so that all update at once."""
    is_torchs: bool = False
    """Whether torch implements it, so that optimizer.implementation applies."""
    moved_bytes: int = 28
    """Bytes that the update reads and writes per float32 value of a parameter, without what it exchanges and
    orthogonalizes. AdamW reads four tensors and writes three."""
    options: type | None = None
    """Dataclass of ``optimizer.options``; None: there are none."""
    mup: str | None = None
    """The learning rate of hidden matrices in muP, by the size of the updates: ``entries`` (every value
    changes by about the learning rate), ``spectral`` (all singular values do); None: no rule is known."""


_ADAM = Kind(
    "harness.optimizer.build:adam",
    ("exp_avg", "exp_avg_sq"),
    counts_steps=True,
    is_torchs=True,
    mup="entries",
)

KINDS: Registry[Kind] = Registry(
    "optimizer",
    {
        "adamw": _ADAM,
        "adam": _ADAM,
        "lion": Kind(
            "harness.optimizer.build:lion", ("exp_avg",), has_eps=False, moved_bytes=20, mup="entries"
        ),
        "muon": Kind(
            "harness.optimizer.build:muon",
            ("momentum_buffer",),
            has_betas=False,
            has_eps=False,
            others="adamw",
            exchanges=True,
            mup="spectral",
        ),
    },
    field="optimizer.kind",
    expects="harness.config.optimizer_kinds:Kind",
)


def lr_scale(name: str) -> Callable[[float, float], float]:
    """Return the factor of the learning rate as a function of a matrix's outputs and inputs.

    Sources: ``original``, github.com/KellerJordan/Muon; ``match_rms_adamw``, arXiv:2502.16982, section 2.2.
    """
    scales: dict[str, Callable[[float, float], float]] = {
        "original": lambda outputs, inputs: math.sqrt(max(1.0, outputs / inputs)),
        "match_rms_adamw": lambda outputs, inputs: 0.2 * math.sqrt(max(outputs, inputs)),
    }
    return scales[name]
