"""Bitwise comparison of tensors."""

import torch


def assert_equal(found, expected, note=""):
    """Fail with the tensor's name, the number of different elements and the largest difference.

    Args:
        found: a tensor, or a mapping or sequence of tensors.
        expected: the same structure.
        note: text before the message, such as a layout or a rank.
    """
    torch.testing.assert_close(
        found, expected, rtol=0, atol=0, msg=lambda text: f"{note} {text}".strip()
    )
