"""The modules of the block ``relu2``."""

import torch.nn.functional as F
from torch import Tensor, nn

from harness.config.model import ModelConfig
from harness.model.decoder import Block


class Relu2FeedForward(nn.Module):
    """w2(relu(w1 x)^2)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.w2(F.relu(self.w1(x_BTC)).square())


class Relu2Block(Block):
    """A pre-norm block with this feed-forward."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.feed_forward = Relu2FeedForward(config.dim, config.ffn_hidden_dim)
