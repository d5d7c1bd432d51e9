"""Batches of encoded pictures.

B is the number of a rank's rows, L the tokens of a caption; C, H and W are those of latents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class ImageBatch(NamedTuple):
    """A rank's rows of one global step of encoded pictures, in row order.

    A sample is a sequence of L text tokens and one token for each square of 2 x 2 latents.
    """

    mean_BCHW: Tensor
    """Mean of the autoencoder's posterior, shifted and scaled for the model, float32. C: channels of the
    autoencoder; H, W: height and width of the picture / 8."""
    std_BCHW: Tensor | None
    """Standard deviation of the same, scaled; None: the mean is used as it is."""
    text_BLD: Tensor
    """Embedding of the caption's tokens (T5). Rows of dropped captions have that of the empty caption."""
    pooled_BP: Tensor
    """Embedding of the caption (CLIP)."""
    numbers_B: Tensor
    """Number of each row's sample, ``step * global_batch_size + row``: noise and times are functions of the
    seed and this number. int64, always in host memory."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and tokens of each."""
        return len(self.mean_BCHW), self.text_BLD.shape[1] + self.image_tokens

    @property
    def sources_B(self) -> None:
        """Pictures come from one source."""
        return None

    @property
    def image_tokens(self) -> int:
        """Tokens of a picture."""
        return self.mean_BCHW.shape[2] * self.mean_BCHW.shape[3] // 4

    def count_valid(self) -> int:
        """Number of tokens that have a loss: those of the pictures."""
        return len(self.mean_BCHW) * self.image_tokens

    def each(self, function: Callable[[Tensor], Tensor]) -> ImageBatch:
        """Apply ``function`` to every tensor."""
        return ImageBatch(*(None if tensor is None else function(tensor) for tensor in self))  # type: ignore[arg-type]

    def to(self, device: torch.device) -> ImageBatch:
        """Copy to the device asynchronously, through pinned memory; the sample numbers stay."""
        if device.type == "cpu":
            return self
        copy = self.each(
            lambda tensor: (
                tensor if tensor.device.type != "cpu" else tensor.pin_memory().to(device, non_blocking=True)
            )
        )
        return copy._replace(numbers_B=self.numbers_B)
