"""What tests measure of memory: bytes of tensors that are alive, as they are made and freed."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Ledger(TorchDispatchMode):
    """Books every storage that an operation makes, from its making to its end; counts operations by name.

    Attributes:
        live: bytes alive now of what was made since the ledger was opened.
        peak: the most there were.
        calls: how often each operation ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self.calls: Counter[str] = Counter()
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What was there before (parameters, inputs) is known, and costs nothing; neither do views of it.
        self._book((args, kwargs), counts=False)
        result = func(*args, **(kwargs or {}))
        self.calls[str(func)] += 1
        self._book(result, counts=True)
        return result

    def _book(self, tree: Any, *, counts: bool) -> None:
        for leaf in tree_leaves(tree):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            key, size = storage.data_ptr(), storage.nbytes() if counts else 0
            if key and key not in self._known:
                self._known.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._strike, key, size)

    def _strike(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
