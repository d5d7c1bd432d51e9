"""Hooks that tell ``Phases`` where a model part computes, and where it waits for other ranks."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DispatchKey, DispatchKeySet
from torch.distributed.fsdp import FSDPModule

from harness.model.part import ModelPart
from harness.parallelism.fsdp import parameter_groups
from harness.parallelism.mesh import EXPERT, EXPERT_TENSOR, Mesh
from harness.train.observers.phase_times import Phases
from harness.util.annotation import set_phases

_FUNCTIONAL = "_c10d_functional"
_COLLECTIVES = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_to_all_single": "all_to_all",
}
# A key without a kernel of its own: it reaches torch's kernel, which is the same for all devices.
_ORIGINAL = DispatchKeySet(DispatchKey.XPU)
# Methods of FSDP's parameter groups, each with the phase that it belongs to.
_SHARDING = {
    "unshard": "dp.all_gather",
    "wait_for_unshard": "dp.all_gather",
    "post_backward": "dp.reduce",
    "finalize_backward": "dp.reduce",
}


_NO_AXIS = "other.collective"
"""Functional collectives of a group that is no axis."""


class Marks:
    """Hooks that tell ``Phases`` where a model part computes, and where it waits for other ranks.

    Marks are outside of compiled regions. Collectives inside of them are found too, because their
    operators are called by name. Recomputation is a part of backward.
    """

    def __init__(
        self, phases: Phases, parts: Sequence[ModelPart], mesh: Mesh, device: torch.device
    ) -> None:
        self._phases = phases
        self._undo: list[Callable[[], None]] = []
        for part in parts:
            for module in part.entries:
                self._mark_module(module, "embedding")
            for block in part.blocks.values():
                self._mark_module(block, "blocks")
            if part.output is not None:
                self._mark_module(part.output, "head")
            # Modules that are sharded together share a group.
            groups: dict[int, Any] = {}
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    groups |= {id(group): group for group in parameter_groups(module)}
            for group in groups.values():
                # The group gets marked methods, which hide those of its class until they are deleted.
                for name, phase in _SHARDING.items():
                    setattr(group, name, phases.inside(phase)(getattr(group, name)))
                    self._undo.append(partial(delattr, group, name))
        axes = _axes(mesh)
        if axes:
            self._mark_collectives(axes, device.type.upper())
        set_phases(phases.inside)

    def remove(self) -> None:
        """Remove all hooks."""
        set_phases(None)
        while self._undo:
            self._undo.pop()()

    def _mark_module(self, module: nn.Module, group: str) -> None:
        def begin(_module: nn.Module, _inputs: Any) -> None:
            self._phases.enter(f"forward.{group}")

        def end(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._phases.leave()
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.requires_grad:
                first.register_hook(reached)

        def reached(_gradient: Tensor) -> None:
            self._phases.change(f"backward.{group}")

        # Before and after FSDP's own hooks, so that their collectives interrupt the phase.
        self._undo.append(module.register_forward_pre_hook(begin, prepend=True).remove)
        self._undo.append(module.register_forward_hook(end).remove)

    def _mark_collectives(self, axes: dict[str, str], key: str) -> None:
        library = torch.library.Library(_FUNCTIONAL, "IMPL")
        self._undo.append(library._destroy)
        pending: dict[int, str] = {}

        def collective(operator: Any, kind: str) -> Callable[..., Any]:
            index = [each.name for each in operator._schema.arguments].index("group_name")

            def call(*arguments: Any, **options: Any) -> Any:
                axis = axes.get(arguments[index])
                phase = _NO_AXIS if axis is None else f"{axis}.{kind}"
                with self._phases.inside(phase):
                    result = operator.redispatch(_ORIGINAL, *arguments, **options)
                pending[result.data_ptr()] = phase
                return result

            return call

        def wait(tensor: Tensor) -> Any:
            phase = pending.pop(tensor.data_ptr(), None)  # None: waited for before
            with nullcontext() if phase is None else self._phases.inside(phase):
                return wait_tensor.redispatch(_ORIGINAL, tensor)

        operators = getattr(torch.ops, _FUNCTIONAL)
        wait_tensor = operators.wait_tensor.default
        library.impl("wait_tensor", wait, key)
        for name, kind in _COLLECTIVES.items():
            library.impl(name, collective(getattr(operators, name).default, kind), key)


def _axes(mesh: Mesh) -> dict[str, str]:
    """Return the axis of each process group by the group's name."""
    found: dict[str, str] = {}
    for axis in ("pp", "tp"):
        if mesh.size(axis) > 1:
            found[mesh.group(axis).group_name] = axis
    if mesh.context is not None:
        found[mesh.context.group_name] = "cp"
    if mesh.experts is not None:
        own = mesh.experts.mesh_dim_names or ()
        for axis, name in ((EXPERT, "ep"), (EXPERT_TENSOR, "tp")):
            if axis in own:
                found.setdefault(mesh.experts.get_group(axis).group_name, name)
    return found
