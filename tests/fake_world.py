"""One rank of a world whose other ranks do not exist: torch's fake process group, which sends nothing."""

from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_process_group(rank, world_size):
    """Make this process a rank of a fake process group."""
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # Cached sharding decisions refer to meshes of destroyed groups.
        _clear_sharding_prop_cache()
