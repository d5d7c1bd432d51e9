"""Memory measurement for tests: bytes of live tensors."""

import weakref
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Ledger(TorchDispatchMode):
    """Tracks storages from allocation to release, and counts operations by name.

    Attributes:
        live: bytes alive now that were allocated since the ledger was entered.
        peak: maximum of ``live``.
        calls: number of calls of each operation.
    """

    def __init__(self):
        super().__init__()
        self.live, self.peak = 0, 0
        self.calls = Counter()
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Storages that existed before (parameters, inputs) and views of them are not counted.
        self._track((args, kwargs), counts=False)
        result = func(*args, **(kwargs or {}))
        self.calls[str(func)] += 1
        self._track(result, counts=True)
        return result

    def _track(self, tree, *, counts):
        for leaf in tree_leaves(tree):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            key, size = storage.data_ptr(), storage.nbytes() if counts else 0
            if key and key not in self._known:
                self._known.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._release, key, size)

    def _release(self, key, size):
        self._known.discard(key)
        self.live -= size
