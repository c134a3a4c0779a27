"""What ACP-SGD costs a step, for predictions: the bytes of its factors, and the products that make and use them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from lightning_pipesync.core.clock import Clock
from lightning_pipesync.core.layer_limits import LayerTimes
from lightning_pipesync.methods.gradients.low_rank import FactorizedGradient, P, is_factorized

#: How often the products are measured; each time they make the other factor.
REPEATS = 6


def bytes_sent(tensor: LayerTimes, rank: int, side: int) -> int:
    """Returns the bytes of a tensor's factor P or Q; those of its gradient, if it is not factorized."""
    shape = torch.Size(tensor.shape)
    width = max(4, tensor.num_bytes // max(1, shape.numel()))  # values of 16 bits are sent in fp32
    if not is_factorized(shape, rank):
        return width * shape.numel()
    return width * rank * (shape[0] if side == P else shape[1:].numel())


@torch.no_grad()
def measure_products(gradients: Sequence[Tensor], rank: int) -> float:
    """Returns the seconds of a step in which a rank makes factors of its gradients, and multiplies their averages.

    It takes the memory of one gradient more and its residual at a time.

    Args:
        gradients: which stay as they are.
    """
    seconds = 0.0
    for gradient in gradients:
        if not is_factorized(gradient.shape, rank):
            continue
        factorized, into, clock = FactorizedGradient(gradient, rank, True), gradient.clone(), Clock(gradient.device)
        parts = [torch.empty_like(factor) for factor in factorized.factors]
        moments = [clock.now()]
        for _ in range(REPEATS):
            part = parts[factorized.side]
            factorized.add(gradient)
            factorized.take_factor(orthonormal=True)
            factorized.project(part)
            factorized.subtract(part)
            factorized.receive(part)
            factorized.approximate(into)
            moments.append(clock.now())
        seconds += median(clock.seconds_between(*pair) for pair in pairwise(moments))
    return seconds
