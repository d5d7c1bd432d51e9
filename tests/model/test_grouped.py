"""Groups of rows: padding them, and what bfloat16 on GPUs relies on."""

import pytest
import torch
from equal import assert_equal
from torch.utils._python_dispatch import TorchDispatchMode

from harness.model import grouped
from harness.model.grouped import (
    grouped_linear,
    padded_positions,
    zero_gradients_where_empty,
)


def ends_of(lengths):
    return torch.tensor(lengths).cumsum(0).int()


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("lengths", [[5, 0, 130, 16], [0, 0], [128], [0, 256, 0, 0]])
def test_padding(lengths, block):
    """Groups become whole blocks, none empty; every row has a place in that of its group."""
    rows = sum(lengths)
    place_R, ends_E, places = padded_positions(ends_of(lengths), rows, block)
    assert ends_E.dtype == torch.int32 and int(ends_E[-1]) == places and places % block == 0
    sizes = torch.diff(ends_E, prepend=torch.zeros(1, dtype=torch.int32)).tolist()
    assert all(size > 0 and size % block == 0 for size in sizes)
    assert all(size >= length for size, length in zip(sizes, lengths, strict=True))
    expert_R = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    assert_equal(torch.searchsorted(ends_E, place_R.int(), right=True), expert_R)
    assert len(place_R.unique()) == rows


class _Calls(TorchDispatchMode):
    """Collects the arguments of torch's grouped product."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._grouped_mm.default:
            self.seen.append(args[:2])
        return func(*args, **(kwargs or {}))


def test_bfloat16_needs_no_padding():
    """In the gradient of the matrices both operands step by whole rows: groups may begin at any."""
    x = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(2, 24, 16, dtype=torch.bfloat16, requires_grad=True)
    ends = ends_of([3, 5])
    with _Calls() as calls:
        torch.nn.functional.grouped_mm(x, w.transpose(1, 2), offs=ends).backward(
            torch.randn(8, 24, dtype=torch.bfloat16)
        )
    [(left, right)] = [pair for pair in calls.seen if pair[0].ndim == pair[1].ndim == 2]
    # One is [width, rows], the other [rows, width].
    assert left.shape[1] == right.shape[0] == 8
    assert left.stride(0) == 1 and right.stride(1) == 1


def test_gradients_of_empty_groups_are_zeros_whatever_a_kernel_leaves():
    weight = torch.randn(3, 4, 4, requires_grad=True)
    same = zero_gradients_where_empty(weight, ends_of([2, 0, 1]))
    assert_equal(same, weight)
    left = torch.ones(3, 4, 4)
    left[1] = float("nan")
    same.backward(left)
    assert_equal(weight.grad.amax((1, 2)), torch.tensor([1.0, 0.0, 1.0]))


def test_compiled_on_blackwell_it_is_one_graph(monkeypatch):
    """Which GPU it is, is asked while it is traced."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert grouped._leaves_gradients_unwritten(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not grouped._leaves_gradients_unwritten(torch.device("cpu"))
    asked = torch.compile(
        lambda x: x + 1 if grouped._leaves_gradients_unwritten(x.device) else x,
        backend="eager",
        fullgraph=True,
    )
    assert asked(torch.ones(1)) == 1
    assert grouped_linear(torch.ones(1, 2), torch.ones(1, 2, 2), ends_of([1])).shape == (1, 2)
