"""What a rehearsal of one rank found (no torch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OUT_OF_MEMORY = "out of memory"


@dataclass
class Product:
    """Products of one shape that cuBLAS was asked for in a step."""

    count: int
    batch: int
    rows: int
    inner: int
    columns: int
    formats: str
    """Of both sides, as ``bfloat16``, or ``float8_e4m3 x float8_e5m2`` where they differ."""
    flops: float
    """Of all of them."""


@dataclass
class Collective:
    """Collectives of one kind in one group of ranks in a step."""

    axis: str
    """``dp``, ``tp``, ``cp``, ``ep``, ``pp`` or ``world``; else what is known of the group."""
    kind: str
    """As NCCL has them; ``exchange`` is a group of sends, ``send`` one between stages."""
    ranks: int
    count: int
    bytes: float
    """Bytes that the rank sends in all of them, in the algorithms that the plan assumes."""


@dataclass
class Wait:
    """Moments of a step at which the host waits for the device."""

    where: str
    """File and line in harness/, or in torch where no code of the harness is under way."""
    what: str
    count: int


@dataclass
class Copy:
    """Copies of one direction in a step."""

    how: str
    count: int
    bytes: float


@dataclass
class Failure:
    """How a rehearsal ended that did not come to its end."""

    kind: str
    """``out of memory``, or the class of the error."""
    message: str
    where: str
    """The innermost line of the harness."""
    step: int | None
    """Step it happened in, from 0; None while the model was built."""


@dataclass
class RankFigures:
    """One rank's last step, and the memory of all of them."""

    rank: int
    pp_rank: int
    device: str
    steps: int = 0
    """Steps that were done."""
    failure: Failure | None = None
    memory: dict[str, float] = field(default_factory=dict)
    """Bytes: ``parameters`` (with buffers), ``gradients``, ``optimizer``; at the peak ``allocated`` and
    ``reserved``; ``pinned`` of the host."""
    allocation_retries: int = 0
    """How often the allocator had to give all it had cached back."""
    kernels: dict[str, int] = field(default_factory=dict)
    products: list[Product] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    communicators: list[str] = field(default_factory=list)
    """Communicators that were made in the step, and not before it."""
    waits: list[Wait] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Functions of CUDA's libraries that the stand-in does not have, and that failed."""
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
        """Kernels in a step, products of cuBLAS not among them."""
        return sum(self.kernels.values())

    @property
    def product_count(self) -> int:
        """Products in a step."""
        return sum(product.count for product in self.products)

    @property
    def product_flops(self) -> float:
        """FLOPs of the products."""
        return sum(product.flops for product in self.products)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> RankFigures:
        """Reads what ``dataclasses.asdict`` gave."""
        parts = {"products": Product, "collectives": Collective, "waits": Wait, "copies": Copy}
        made = {name: [kind(**each) for each in plain[name]] for name, kind in parts.items()}
        failure = None if plain["failure"] is None else Failure(**plain["failure"])
        return cls(**(plain | made | {"failure": failure}))
