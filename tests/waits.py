"""Find where the host would wait for a GPU, without one: tensors on ``meta`` have no values to read."""

from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}
"""Copying operations, and the index of the argument they copy from."""
ON_HOST = "harness.on_host.default"


class _Operations(TorchDispatchMode):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if str(operation) == ON_HOST:
            self.found.append(ON_HOST)
        elif operation in COPIES and not (kwargs or {}).get("non_blocking", False):
            source = args[COPIES[operation]].device.type
            if source != result.device.type:
                self.found.append(f"{operation} from {source} to {result.device.type}")
        return result


class _Numbers(TorchFunctionMode):
    """Finds tensors made from Python numbers, which dispatch does not show as a copy."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.tensor, torch.as_tensor) and result.device.type != "cpu":
            self.found.append(f"{function.__name__} on {result.device.type}")
        return result


@contextmanager
def waits():
    """List the operations for which the host waits, in order. Reading a meta tensor's value raises anyway."""
    found = []
    with _Numbers(found), _Operations(found):
        yield found
