"""Substitutes for what a rehearsal does not have: other ranks, values, and cuDNN's attention.

* **Other ranks.** Between GPUs NCCL's calls send nothing (library/nccl.cpp). In host memory torch's
  fake process group leaves every tensor as it is. ``LoneStore`` answers for the missing ranks.
* **Values.** All of the device's memory is zeros. Code that depends on a number from the device
  still reads it, but then gets a plausible one from this file: rows are routed to experts evenly
  (or skewed by ``rehearse.skew``, or as in the first step with ``debug.routing``), a sequence has
  four documents, stages agree that shapes are known.
* **Data.** Batches of zeros, in the job's shape, and no tokenizer.
* **FlashAttention-3 and 4**, which need packages: torch's own flash attention.
* **cuDNN's attention**, whose plans the library cannot give: tensors of the same shapes, no
  workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.testing._internal.distributed.fake_pg  # makes the backend known
from torch import Tensor
from torch._meta_registrations import alloc_with_matching_layout
from torch.distributed.fsdp._fully_shard._fsdp_collectives import ProcessGroupAllocMixin
from torch.distributed.pipelining.stage import PipelineStage
from torch.nn.attention import varlen
from torch.nn.attention._registry import _FLASH_ATTENTION_IMPLS

from harness.config.job import Job
from harness.config.training import FLASH
from harness.data.batch import AnyBatch, Batch
from harness.data.loader import Loader
from harness.model.kernels import Positions, VarlenKernel
from harness.parallelism.expert import ExpertExchange
from harness.tools.plan.costs import costs_of
from harness.tools.plan.loads import rows_of_experts
from harness.tools.rehearse.gpu import VirtualGpu
from harness.train import setup, trainer
from harness.train.engine import Engine
from harness.train.observer import Observer, Run

NCCL_ID_BYTES = 128
DOCUMENTS = 4
"""Documents in a sequence, for jobs that do not attend across documents."""


@contextmanager
def substitutes(job: Job, gpu: VirtualGpu, skew: float) -> Iterator[None]:
    """Put the substitutes in place while a rank is rehearsed."""
    replaced: list[tuple[Any, str, Any]] = [
        (trainer, "RankGroup", lambda _: None),  # nothing is saved
        (trainer, "build_tokenizer", lambda _: None),
        (trainer, "loader_of", lambda job, _, rows: Zeros(job, len(rows))),
        (ExpertExchange, "_lengths", _lengths(skew)),
        (VarlenKernel, "mask", _mask),
        (PipelineStage, "_prepare_forward_infra", _shapes_are_known),
    ]
    if job.world_size > 1:
        device = torch.cuda.current_device()
        replaced += [
            (setup, "backend_of", lambda _: "cpu:fake,cuda:nccl"),
            (dist, "init_process_group", _without_device),
            (dist, "barrier", partial(dist.barrier, device_ids=[device])),
            (ProcessGroupAllocMixin, "__init__", _after_barrier),
        ]
    with ExitStack() as undo:
        undo.enter_context(patch.dict(_FLASH_ATTENTION_IMPLS, dict.fromkeys(FLASH, lambda: None)))
        for owner, name, replacement in replaced:
            undo.enter_context(patch.object(owner, name, replacement))
        # torch 2.15 prefers cuDNN also for documents; flash attention has tensors of the same
        # shapes.
        undo.enter_context(patch.object(varlen, "_should_use_cudnn", lambda _: False, create=True))
        kernels = _cudnn_attention(gpu)
        yield
        kernels._destroy()


class LoneStore(dist.Store):
    """A store in which every key exists, as if other ranks had just set it.

    The value of a missing key is made from the key, so the id of an NCCL communicator names its
    group. For symmetric memory the other ranks' values are this rank's own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def group_of(self, communicator: str) -> str:
        """Return the key that holds a communicator's id."""
        for key, value in self._values.items():
            if value.rstrip(b"\0") == communicator.encode():
                return key
        return communicator

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        if key not in self._values and (mine := self._under_own_number(key)) is not None:
            return mine
        if key not in self._values:
            # The ends of keys differ, and an id has room for 128 bytes.
            self._values[key] = key.encode()[-NCCL_ID_BYTES + 1 :].ljust(NCCL_ID_BYTES, b"\0")
        return self._values[key]

    def _under_own_number(self, key: str) -> bytes | None:
        """Another rank's entry for symmetric memory: this rank's own, renumbered; None for other keys."""
        head, _, number = key.rpartition("/")
        own = next(
            (value for k, value in self._values.items() if k.rpartition("/")[0] == head), None
        )
        if "SymmetricMemory" not in head or own is None:
            return None
        # It begins with the number of the device, and two ranks of one device are refused
        # (CUDASymmetricMemory.cu, RendezvousRequest).
        return int(number).to_bytes(4, "little") + own[4:]

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        return None

    def clone(self) -> LoneStore:
        return self


class StepEnds(Observer):
    """Calls a function with the number of each step that begins."""

    def __init__(self, run: Run, begin: Callable[[int], None]) -> None:
        super().__init__(run)
        self._begin = begin

    def begin_step(self, step: int) -> Sequence[float]:
        self._begin(step)
        return ()


class Zeros(Loader):
    """Batches of the job's shape. All values are 0, because nothing is computed."""

    samples_per_epoch = None

    def __init__(self, job: Job, rows: int) -> None:
        self._job = job
        self._rows = rows

    def next(self) -> AnyBatch:
        batch = costs_of(self._job.model).fake_batch(self._job, self._rows)
        if self._job.data.attend_across_documents or not isinstance(batch, Batch):
            return batch
        rows, length = batch.shape
        documents_T = torch.arange(length) * DOCUMENTS // length
        return batch._replace(documents_BT=documents_T.expand(rows, length).contiguous())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return

    def reset(self) -> None:
        return


_init_process_group = dist.init_process_group


def _without_device(*args: Any, device_id: Any = None, **kwargs: Any) -> None:
    """Initialize without ``device_id``, with which torch would split all groups from the world's.

    The fake process group cannot be split. Now each group makes its own NCCL communicator at first
    use.
    """
    _init_process_group(*args, **kwargs)


def _after_barrier(buffers: ProcessGroupAllocMixin, group: dist.ProcessGroup) -> None:
    """Registered memory needs the communicator, which in training is there from the beginning."""
    dist.barrier(group)
    buffers._group = group


def rows_by_rank(rows: int, ranks: int, skew: float) -> list[int]:
    """Return how many of a rank's rows go to each rank of a group; the first one gets more by ``skew``."""
    first = round(rows / ranks * (1 + skew)) if ranks > 1 else rows
    left = rows - first
    others = max(1, ranks - 1)
    return [first, *(left // others + (place < left % others) for place in range(ranks - 1))]


def _lengths(skew: float) -> Any:
    asked = ExpertExchange._lengths

    def lengths(
        exchange: ExpertExchange, given: Tensor, got: Tensor, rows: int
    ) -> tuple[list[int], list[list[int]]]:
        asked(exchange, given, got, rows)  # as in training, with the same waits for the device
        sent = rows_by_rank(rows, exchange.ranks, skew)
        return sent, [rows_by_rank(sent[exchange.group.rank()], got.shape[1], 0)] * exchange.ranks

    return lengths


def route(job: Job, engine: Engine) -> None:
    """Give ranks of experts the rows of ``debug.routing``."""
    ranks = job.parallelism.ep
    group, sender = divmod(dist.get_rank() // engine.balance.copies, ranks)
    for part in engine.parts:
        for layer, moe in part.mixtures.items():
            exchange = moe.exchange
            if isinstance(exchange, ExpertExchange):
                every = rows_of_experts(job, layer).unflatten(2, (ranks, -1))
                rows = every[group % len(every)]  # replicas and stages have equal groups
                known = rows[sender].sum(1).tolist(), rows[:, sender].tolist()
                asked = exchange._lengths
                exchange._lengths = partial(_known, asked, known)  # type: ignore[method-assign]


def _known(asked: Any, known: Any, *arguments: Any) -> Any:
    asked(*arguments)
    return known


_asked_mask = VarlenKernel.mask


def _mask(kernel: VarlenKernel, positions: Positions) -> list[tuple[Tensor, Tensor]] | None:
    """Return offsets of documents (or chunks): as many as in training, but all zero."""
    asked = _asked_mask(kernel, positions)
    if asked is None:
        return None
    pieces = DOCUMENTS if positions.documents_BT is not None else 1
    if kernel.spec.span.chunk is not None:
        pieces = max(pieces, -(-positions.length // kernel.spec.span.chunk))
    begins = torch.empty(positions.batch * pieces, dtype=torch.int64, device=positions.device)
    offsets = F.pad(begins, (0, 1)).int()
    return [(offsets, offsets)] * len(asked)


_prepare = PipelineStage._prepare_forward_infra


def _shapes_are_known(stage: Any, *arguments: Any, **options: Any) -> Any:
    """What all stages would agree on (harness/parallelism/pipeline.py); a vote is read as 0."""
    from torch.distributed.pipelining.stage import InferenceMode  # since torch 2.12

    stage._inference_mode = InferenceMode.STATIC
    return _prepare(stage, *arguments, **options)


def _cudnn_attention(gpu: VirtualGpu) -> Any:

    def forward(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, lse: bool, p: float = 0.0,
        causal: bool = False, debug: bool = False, *, scale: float | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        gpu.launch("cuDNN attention, forward")
        B, H, T, _ = q.shape
        out_BHTE = alloc_with_matching_layout(q, (B, H, T, v.shape[-1]))
        lse_BHT1 = q.new_empty(B, H, T, 1, dtype=torch.float32)
        seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
        return out_BHTE, lse_BHT1, None, None, T, k.shape[2], seed, offset, q.new_empty(0)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any, scale: float | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        gpu.launch("cuDNN attention, backward")
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    operators = torch.library.Library("aten", "IMPL")
    name = "_scaled_dot_product_cudnn_attention"
    operators.impl(name, forward, "CUDA", allow_override=True)
    operators.impl(f"{name}_backward", backward, "CUDA", allow_override=True)
    return operators
