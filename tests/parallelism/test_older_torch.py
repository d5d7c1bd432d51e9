"""torch 2.11 and 2.12: what is refused, and what takes the place of names that they lack."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from cases import rows
from jobs import tiny
from one_line import one_line
from torch.distributed.fsdp import FSDPModule
from torch.torch_version import TorchVersion

from harness.parallelism.compile import prepare_compiler
from harness.parallelism.fsdp import parameter_groups, reshard
from harness.parallelism.mesh import refuse_older_torch
from harness.util.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1", "2.13.0", "2.15.0+cpu"])
@pytest.mark.parametrize(
    ("layout", "device", "says"),
    rows("""
        tp=2                   cpu   "parallelism.tp=2: needs torch 2.13 or newer, and this is VERSION; .* 1,"
        pp=2                   cpu   "parallelism.pp=2: needs torch 2.13 or newer, and this is VERSION; .* 1,"
        cp=2 cp_method=gather  cpu   "parallelism.cp_method=gather: needs torch 2.13 .* ring, ulysses, or"
        dp_shard=2             cuda  "cluster.device=cuda: with 2 ranks needs torch 2.13.*one rank, cpu, or"
        dp_shard=2             cpu   null
        dp_shard=1             cuda  null
    """),
)
def test_layouts_that_need_torch_2_13(version, layout, device, says, monkeypatch):
    monkeypatch.setattr("torch.__version__", TorchVersion(version))
    job = tiny(*(f"parallelism.{each}" for each in layout.split()))
    device = torch.device(device)
    if says is None or version >= "2.13":
        refuse_older_torch(job.parallelism, device)
        return
    with one_line(ConfigError, says.replace("VERSION", version.replace("+", r"\+"))):
        refuse_older_torch(job.parallelism, device)


@dataclass
class OlderGroup:
    """FSDP's group of parameters after a forward pass."""

    comm_ctx: SimpleNamespace
    _post_forward_indices: list[int] = field(default_factory=lambda: [0])


class OlderModule(FSDPModule, torch.nn.Module):
    """A module wrapped by FSDP of torch 2.11, which has no ``reset_iter_state``."""

    reset_iter_state = property()  # so that hasattr is false

    def __new__(cls, *_):
        return object.__new__(cls)  # FSDPModule's looks for the class that was wrapped

    def __init__(self, group, *inside):
        super().__init__()
        self.state = SimpleNamespace(_fsdp_param_group=group)
        self.inside = torch.nn.ModuleList(inside)
        self.reshard = MagicMock()

    def _get_fsdp_state(self):
        return self.state


def test_a_forward_pass_is_forgotten():
    order = SimpleNamespace(post_forward_order=[1, 2])
    group = OlderGroup(order)
    root = OlderModule(None, OlderModule(group))
    assert parameter_groups(root) == [] and parameter_groups(root.inside[0]) == [group]
    reshard(root)
    assert order.post_forward_order == [] and group._post_forward_indices == []
    assert root.reshard.called and root.inside[0].reshard.called


def test_the_compiler_has_no_size_of_a_mesh(monkeypatch):
    options = torch._functorch.config
    older = SimpleNamespace(**{name: getattr(options, name) for name in WRITTEN})
    monkeypatch.setattr(torch._functorch, "config", older)
    prepare_compiler(tiny("compile=on"), CPU)
    assert older.donated_buffer and not hasattr(older, "unsafe_treat_script_objects_as_zero_size")


WRITTEN = ("activation_memory_budget", "donated_buffer")
