"""The results of rehearsing one rank (no torch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OUT_OF_MEMORY = "out of memory"


@dataclass
class Product:
    """Matrix products of one shape that cuBLAS ran in a step."""

    count: int
    batch: int
    rows: int
    inner: int
    columns: int
    formats: str
    """Of both operands: ``bfloat16``, or ``float8_e4m3 x float8_e5m2`` where they differ."""
    flops: float
    """Of all of them."""


@dataclass
class CollectiveCount:
    """Collectives of one kind in one group of ranks in a step."""

    axis: str
    """``dp``, ``tp``, ``cp``, ``ep``, ``pp`` or ``world``; else a description of the group."""
    kind: str
    """NCCL's name; ``exchange`` is a group of sends (an all-to-all), ``send`` one send between
    stages."""
    ranks: int
    count: int
    bytes: float
    """Bytes that the rank sends in all of them, in the algorithms that the plan assumes."""


@dataclass
class Wait:
    """Waits of the host for the device at one place in the code."""

    where: str
    """File and line in harness/; in torch if no code of the harness is on the stack."""
    what: str
    count: int


@dataclass
class Copy:
    """Copies of one direction in a step."""

    how: str
    count: int
    bytes: float


@dataclass
class RehearsalFailure:
    """Why a rehearsal failed."""

    kind: str
    """``out of memory``, or the class of the error."""
    message: str
    where: str
    """The innermost line of the harness."""
    step: int | None
    """Step in which it failed, from 0; None if the model was being built."""


_LISTS: dict[str, type] = {
    "products": Product,
    "collectives": CollectiveCount,
    "waits": Wait,
    "copies": Copy,
}
"""Lists of figures, and what is in them."""


@dataclass
class RankFigures:
    """One rank's last step, and its peak memory over all steps."""

    rank: int
    pp_rank: int
    device: str
    steps: int = 0
    """Steps that finished."""
    failure: RehearsalFailure | None = None
    memory: dict[str, float] = field(default_factory=dict)
    """Bytes: ``parameters`` (with buffers), ``gradients``, ``optimizer``; at the peak ``allocated`` and
    ``reserved``; ``pinned`` of the host."""
    allocation_retries: int = 0
    """How often the allocator had to release all of its cache."""
    kernels: dict[str, int] = field(default_factory=dict)
    products: list[Product] = field(default_factory=list)
    collectives: list[CollectiveCount] = field(default_factory=list)
    communicators: list[str] = field(default_factory=list)
    """Communicators made in the last step; all of them should exist before it."""
    waits: list[Wait] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    replays: int = 0
    """CUDA graphs that the host launched."""
    replayed: int = 0
    """Kernels and products in them."""
    unknown: list[str] = field(default_factory=list)
    """Functions of CUDA's libraries that the stand-in does not implement; the calls failed."""
    graphs: int = 0
    recompilations: int = 0
    compile_seconds: float = 0.0
    build_seconds: float = 0.0
    first_step_seconds: float = 0.0
    host_seconds: float = 0.0
    """Of the last step, from the batch to the updated parameters, on this machine."""
    cpu_seconds: float = 0.0
    """Processor time of the same."""

    @property
    def launches(self) -> int:
        """Kernels in a step, without cuBLAS's products."""
        return sum(self.kernels.values())

    @property
    def product_count(self) -> int:
        """Products in a step."""
        return sum(product.count for product in self.products)

    @property
    def host_launches(self) -> int:
        """Kernels, products and CUDA graphs that the host launched in a step."""
        return self.launches + self.product_count - self.replayed + self.replays

    @property
    def product_flops(self) -> float:
        """FLOPs of the products."""
        return sum(product.flops for product in self.products)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> RankFigures:
        """Build from the output of ``dataclasses.asdict``."""
        figures = cls(**plain)
        for name, kind in _LISTS.items():
            setattr(figures, name, [kind(**each) for each in plain[name]])
        if plain["failure"] is not None:
            figures.failure = RehearsalFailure(**plain["failure"])
        return figures
