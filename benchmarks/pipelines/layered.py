"""Small classifiers as sequences of layers, which a pipeline can split into stages."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

#: Residual blocks of :func:`residual_mlp`: with the first and the last layer enough for 50 stages.
NUM_BLOCKS = 48
_NUM_CLASSES = 10


class Residual(nn.Module):
    """A residual block: layers to whose output their input is added.

    Args:
        layers: the layers of the residual branch.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the sum, shaped like ``x``."""
        result: Tensor = x + self.branch(x)
        return result


class _Joined(nn.Sequential):
    """Layers that stay on one stage: a pipeline splits a plain Sequential only."""


def mlp(inputs: int, width: int = 16, depth: int = 8) -> nn.Sequential:
    """Returns dense layers with ReLU between, for inputs of ``inputs`` values, initialized as in He et al."""
    layers = []
    for i, (before, after) in enumerate(pairwise([inputs, *[width] * (depth - 1), _NUM_CLASSES])):
        dense = nn.Linear(before, after)
        nn.init.kaiming_normal_(dense.weight)
        nn.init.zeros_(dense.bias)
        layers.append(_Joined(nn.ReLU() if i else nn.Flatten(), dense))
    return nn.Sequential(*layers)


def residual_mlp(inputs: int, width: int = 16, num_blocks: int = NUM_BLOCKS) -> nn.Sequential:
    """Returns a dense layer, residual blocks of one dense layer each, and a dense layer, without normalization.

    The branches are initialized as in He et al., less by the root of their number, so that their sum does not grow.
    """
    dense = [nn.Linear(before, after) for before, after in [(inputs, width), *[(width, width)] * num_blocks]]
    dense.append(nn.Linear(width, _NUM_CLASSES))
    for layer in dense:
        nn.init.kaiming_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
    first, *blocks, last = dense
    with torch.no_grad():
        for block in blocks:
            block.weight /= num_blocks**0.5
    return nn.Sequential(
        _Joined(nn.Flatten(), first), *(Residual(nn.ReLU(), block) for block in blocks), _Joined(nn.ReLU(), last)
    )
