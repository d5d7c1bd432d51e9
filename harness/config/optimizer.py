"""Configuration of the optimizer, and of the schedules of learning rate, batch size and sequence length."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from harness.config.fields import Switch, added_numerics, execution, numerics
from harness.config.registry import Registry
from harness.util.errors import ConfigError


@dataclass(frozen=True)
class Kind:
    """The update rule of some tensors."""

    build: str
    """``module:function`` that returns the optimizer for an ``OptimizerConfig``, parameter groups
    with ``params``, ``kind``, ``lr``, ``weight_decay``, ``betas`` and ``eps`` (if it has them), and
    the process group of the ranks that hold shards of them (None for one rank). Options are a
    fourth argument."""
    state: tuple[str, ...]
    """Names of its state tensors that have the parameter's shape. Checkpoints have these, and the
    numbers that it keeps for each parameter or in its parameter groups. Anything else ends a run
    after its first update."""
    counts_steps: bool = False
    """Whether the state also has a float32 scalar ``step`` for every tensor."""
    has_betas: bool = True
    """Whether ``optimizer.beta1`` and ``beta2`` apply."""
    has_eps: bool = True
    """Whether ``optimizer.eps`` applies."""
    others: str | None = None
    """If set, it updates hidden matrices only (``TensorSpec.is_hidden_matrix``), and by default
    this kind updates the other tensors."""
    exchanges: bool = False
    """Whether the ranks that hold pieces of a matrix exchange them, so that all update at once."""
    is_torchs: bool = False
    """Whether torch implements it, so that optimizer.implementation applies."""
    moved_bytes: int = 28
    """Bytes that the update reads and writes per float32 value of a parameter, without what it
    exchanges and orthogonalizes. AdamW reads four tensors and writes three."""
    options: type | None = None
    """Dataclass of ``optimizer.options``; None: there are none."""
    mup: str | None = None
    """The learning rate of hidden matrices in muP, by the size of the updates: ``entries`` (every
    value changes by about the learning rate), ``spectral`` (all singular values do); None: no rule
    is known."""


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
            "harness.optimizer.build:lion",
            ("exp_avg",),
            has_eps=False,
            moved_bytes=20,
            mup="entries",
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
    expects="harness.config.optimizer:Kind",
    has_files=True,
)


LR_SCALES: dict[str, Callable[[float, float], float]] = {
    "original": lambda outputs, inputs: math.sqrt(max(1.0, outputs / inputs)),
    "match_rms_adamw": lambda outputs, inputs: 0.2 * math.sqrt(max(outputs, inputs)),
}
"""Factors of the learning rate by a matrix's outputs and inputs. Sources: ``original``,
github.com/KellerJordan/Muon; ``match_rms_adamw``, arXiv:2502.16982, section 2.2."""
IMPLEMENTATIONS = ("auto", "fused", "foreach", "for-loop")
STATE_DTYPES = ("float32", "bfloat16")
EIGHT_BIT = "8bit"
BLOCK = 128
"""Format of running means: 8-bit codes with a float32 scale for each block of so many values of a
row."""
# A mean m shrinks by (1 - beta) m per step. The change is rounded away if it is less than half a
# bfloat16 step, which is at most 2**-8 m.
LARGEST_BFLOAT16_BETA = 0.99
BETA_RULE = "a running mean in bfloat16 (eight bits) would lose its updates to rounding"
NEWTON_SCHULZ_STEPS = 5
"""Iterations that orthogonalize an update of Muon (arXiv:2502.16982)."""
MUON = Switch("optimizer.kind", "optimizer=muon", lambda kinds: "muon" in kinds, "optimizer.kinds")
muon_numerics = functools.partial(added_numerics, needs=MUON)
BETAS = Switch("optimizer.kind", "optimizer=adamw", reads="optimizer.has_betas")
EPS = Switch("optimizer.kind", "optimizer=adamw", reads="optimizer.has_eps")
QK_CLIP = Switch("optimizer.qk_clip", "optimizer.qk_clip=100", lambda tau: tau is not None)
DECAY = Switch("schedule.decay_ratio", "schedule=wsd", lambda ratio: ratio != 0)


@dataclass(frozen=True)
class Decay:
    """A shape of the learning rate's decay.

    Attributes:
        shape: from the progress of the decay, 0 to 1, to the rate, 1 to 0; the second argument are
            the options, if there are any.
        options: dataclass of schedule.options; None: it has none.
    """

    shape: Callable[..., float]
    options: type | None = None

    def __call__(self, progress: float, options: Mapping[str, Any]) -> float:
        """Return the rate, as a fraction between the smallest (0) and the peak (1)."""
        typed = [] if self.options is None else [self.options(**options)]
        return self.shape(progress, *typed)


DECAYS: Registry[Decay] = Registry(
    "schedule",
    {
        "linear": Decay(lambda x: 1 - x),
        "sqrt": Decay(lambda x: 1 - math.sqrt(x)),
        "cosine": Decay(lambda x: 0.5 * (1 + math.cos(math.pi * x))),
    },
    field="schedule.decay_type",
    expects="harness.config.optimizer:Decay",
    has_files=True,
)
"""Shapes of the decay."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv:1711.05101), Adam (arXiv:1412.6980), Lion (arXiv:2302.06675), or Muon
    (kellerjordan.github.io/posts/muon) for hidden matrices with AdamW for all other tensors."""

    kind: str = added_numerics("adamw", choices=KINDS)
    """The update rule, or FILE.py:NAME of another. Muon orthogonalizes the updates of hidden
    matrices; AdamW updates embeddings, the output projection, routers, norms and other vectors."""
    lr: float = numerics(8e-4, least=0)
    """Peak learning rate, reached at the end of the warm-up."""
    beta1: float = numerics(0.9, least=0, below=1, needs=BETAS)
    """Decay of the running mean of gradients, per step; Lion: weight of that mean in the update."""
    beta2: float = numerics(0.95, least=0, below=1, needs=BETAS)
    """Decay of the running mean of squared gradients, per step; Lion: of the mean of gradients."""
    eps: float = numerics(1e-8, above=0, needs=EPS)
    """Added to the root of the second moment (AdamW, Adam)."""
    weight_decay: float = numerics(0.1, least=0)
    """Weight decay per step, multiplied by the learning rate; Adam: added to the gradient, as the
    gradient of an L2 penalty. One-dimensional parameters (norm weights, biases) do not decay; a
    group can change that."""
    groups: list[dict[str, Any]] = added_numerics(factory=list)
    """Settings of the tensors whose name matches a regular expression: [{match: 'layers\\..*\\.wq',
    lr_factor: 0.5, weight_decay: 0, betas: [0.9,0.98], kind: adamw}]."""
    momentum: float = muon_numerics(0.95, least=0, below=1)
    """Muon: decay of the running mean of gradients, per step (with Nesterov's momentum)."""
    newton_schulz_dtype: str | None = muon_numerics(None, choices=STATE_DTYPES)
    """Muon: format of the iterations of Newton-Schulz that orthogonalize an update, float32 or
    bfloat16; null: precision.param_dtype."""
    lr_scale: str = muon_numerics("match_rms_adamw", choices=LR_SCALES)
    """Muon: factor of the learning rate for a matrix [outputs, inputs]. original:
    sqrt(max(1, outputs / inputs)); match_rms_adamw: 0.2 sqrt(max(outputs, inputs)), with which
    AdamW's learning rate and weight decay apply (arXiv:2502.16982, section 2.2)."""
    ema_decay: float = added_numerics(0.0, least=0, below=1)
    """Decay per step of an exponential moving average of the weights, in float32; 0: none. It is
    saved with the optimizer's state. ``ema=true`` makes harness generate and harness evaluate use
    it, and ``convert.ema=true`` exports it."""
    qk_clip: float | None = added_numerics(None, above=0)
    """QK-clip (Kimi K2, arXiv:2507.20534, section 2.1), with any optimizer: a head of attention
    whose largest logit in the step's batch exceeds this, for example 100, gets queries and keys
    scaled by it over that logit, after the update. null: none. Logits are measured by one more
    forward pass over the batch, without gradients: about a third of the products of a step."""
    qk_clip_interval: int = added_numerics(1, least=1, needs=QK_CLIP)
    """Steps between two clips, each of which costs that forward pass. Logits grow slowly: 10 costs
    about 3 % of a step's products in place of a third."""
    options: dict[str, Any] = added_numerics(factory=dict)
    """Options of a kind that another package has added."""
    state_dtype: str | None = numerics(None, choices=(*STATE_DTYPES, EIGHT_BIT))
    """Format of the running means: float32, bfloat16, or, for AdamW and Adam, 8bit
    (arXiv:2110.02861), which leaves vectors and rows that 128 does not divide in float32. Updates
    are computed in float32. null means that of the parameters, precision.master_dtype."""
    implementation: str = execution("auto", choices=IMPLEMENTATIONS)
    """torch's implementation of the update: auto (fused), fused, foreach or for-loop. bfloat16
    state or parameters need auto, which uses our own loop: torch does not update them in float32.
    With foreach and for-loop, debug.non_finite=skip or debug.spikes=skip makes the host wait for
    the norm in every step."""

    def resolve(self, master_dtype: str, param_dtype: str) -> OptimizerConfig:
        iterations = self.newton_schulz_dtype
        if "muon" in self.kinds:
            iterations = iterations or param_dtype
        kind = KINDS.recorded(self.kind)
        groups = []
        for group in map(dict, self.groups):
            if "kind" in group:
                group["kind"] = KINDS.recorded(group["kind"])
            groups.append(group)
        return replace(
            self,
            kind=kind,
            groups=groups,
            state_dtype=self.state_dtype or master_dtype,
            newton_schulz_dtype=iterations,
            options=KINDS.resolve_options(kind, self.options),
        )

    def validate(self, master_dtype: str = "float32") -> None:
        if self.state_dtype == EIGHT_BIT and (others := sorted(self.kinds - {"adamw", "adam"})):
            rule = f"is a format of AdamW's and Adam's state, and {others[0]} updates tensors too"
            raise ConfigError(
                "optimizer.state_dtype", EIGHT_BIT, rule, "bfloat16, or optimizer=adamw"
            )
        if self.implementation != "auto" and self._is_rounded(master_dtype):
            rule = "torch's AdamW does not update parameters or state of fewer bits in float32"
            works = "auto, or optimizer.state_dtype=float32 and precision.master_dtype=float32"
            raise ConfigError("optimizer.implementation", self.implementation, rule, works)
        kind = KINDS[self.kind]
        if self.implementation != "auto" and not kind.is_torchs and not kind.others:
            rule = f"torch has no {self.kind}"
            raise ConfigError("optimizer.implementation", self.implementation, rule, "auto")
        means = ("beta1", "beta2", *(["momentum"] if "muon" in self.kinds else []))
        for name in means if self.state_dtype == "bfloat16" else ():
            if getattr(self, name) > LARGEST_BFLOAT16_BETA:
                works = f"at most {LARGEST_BFLOAT16_BETA}, or optimizer.state_dtype=float32"
                raise ConfigError(f"optimizer.{name}", getattr(self, name), BETA_RULE, works)

    def compiles(self, master_dtype: str) -> bool:
        """Whether GPUs update a parameter by compiled code (optimizer/elementwise.py)."""
        return "lion" in self.kinds or self._is_rounded(master_dtype)

    def _is_rounded(self, master_dtype: str) -> bool:
        return bool({"bfloat16", EIGHT_BIT} & {master_dtype, self.state_dtype})

    @property
    def has_betas(self) -> bool:
        return any(KINDS[kind].has_betas for kind in self.kinds)

    @property
    def has_eps(self) -> bool:
        return any(KINDS[kind].has_eps for kind in self.kinds)

    @property
    def kinds(self) -> set[str]:
        """Every kind that may update a tensor; a group's kind that does not exist is left out."""
        others = KINDS[self.kind].others
        of_groups = {str(each) for group in self.groups if (each := group.get("kind")) in KINDS}
        return {self.kind, *([] if others is None else [others]), *of_groups}


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate by step: warm-up, a stable phase and a decay (WSD, arXiv:2404.06395); cosine
    has no stable phase. Batch size and sequence length by step."""

    warmup_steps: int = numerics(200, least=0)
    """Steps of linear warm-up from 0 to optimizer.lr."""
    decay_ratio: float | None = numerics(None, least=0, most=1)
    """Fraction of the curve, at the end, in which the rate decays; null: all steps after the
    warm-up."""
    decay_type: str = numerics("linear", choices=DECAYS, needs=DECAY)
    """Shape of the decay: linear, sqrt (1 - sqrt), cosine, or FILE.py:NAME of another."""
    options: dict[str, Any] = added_numerics(factory=dict)
    """Options of a shape that another package has added."""
    min_lr_factor: float = numerics(0.0, least=0, most=1, needs=DECAY)
    """Learning rate at the end of the decay, as a fraction of optimizer.lr."""
    total_steps: int | None = added_numerics(None, least=1)
    """Steps of the learning-rate curve, if more than training.steps: a shorter run then has the
    learning rates of a run of total_steps."""
    batch_size: list[dict[str, int]] = added_numerics(factory=list)
    """Sequences per step before training.global_batch_size applies: [{until_step:100,sequences:8}].
    At most that many; each at least the data-parallel ranks."""
    seq_len: list[dict[str, int]] = added_numerics(factory=list)
    """Tokens per sequence before training.seq_len applies: [{until_step:100,tokens:512}]. Each
    length divides training.seq_len."""

    def resolve(self) -> ScheduleConfig:
        decay_type = DECAYS.recorded(self.decay_type)
        return replace(
            self,
            decay_type=decay_type,
            options=DECAYS.resolve_options(decay_type, self.options),
        )

    def curve_steps(self, steps: int) -> int:
        return max(steps, self.total_steps or 0)

    @property
    def batch_sizes(self) -> list[tuple[int, int]]:
        """``(last step, sequences)`` of each phase of batch_size."""
        return [(phase["until_step"], phase["sequences"]) for phase in self.batch_size]

    @property
    def seq_lens(self) -> list[tuple[int, int]]:
        """``(last step, tokens)`` of each phase of seq_len."""
        return [(phase["until_step"], phase["tokens"]) for phase in self.seq_len]

    def validate_phases(self) -> None:
        for name, unit in (("batch_size", "sequences"), ("seq_len", "tokens")):
            field = f"schedule.{name}"
            phases = getattr(self, name)
            works = f"[{{until_step:10,{unit}:8}},{{until_step:20,{unit}:16}}]"
            for phase in phases:
                if set(phase) != {"until_step", unit} or min(phase.values()) < 1:
                    rule = f"each phase has until_step and {unit}, both at least 1"
                    raise ConfigError(field, phases, rule, works)
            if any(a["until_step"] >= b["until_step"] for a, b in pairwise(phases)):
                raise ConfigError(field, phases, "until_step must rise from phase to phase", works)

    def validate(self, steps: int) -> None:
        curve = self.curve_steps(steps)
        name = "schedule.total_steps" if curve > steps else "training.steps"
        for sizes in ("batch_size", "seq_len"):
            last = max((phase["until_step"] for phase in getattr(self, sizes)), default=0)
            if last >= curve:
                rule = f"the size after step {last} is never reached: {name} is {curve}"
                longer = f"training.steps={last + 1}, or, of a longer run, schedule.total_steps={last + 1}"
                works = f"until_step at most {curve - 1}, {longer}"
                raise ConfigError(f"schedule.{sizes}", getattr(self, sizes), rule, works)
        decay_steps = 0 if self.decay_ratio is None else round(self.decay_ratio * curve)
        if self.warmup_steps + decay_steps > curve:
            works = f"at most {curve - decay_steps}, or more training.steps or schedule.total_steps"
            rule = f"warm-up and decay ({decay_steps} steps) must fit into {name}={curve}"
            raise ConfigError("schedule.warmup_steps", self.warmup_steps, rule, works)
