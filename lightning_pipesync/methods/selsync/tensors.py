"""What is done to lists of tensors, whosever they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def differing(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[bool]:
    """Returns for each pair of tensors on one device whether their shapes or bits differ; a NaN equals itself."""
    if not tensors:
        return []
    differ = [
        (_bits(tensor) != _bits(other)).any()
        if tensor.shape == other.shape
        else torch.ones((), dtype=torch.bool, device=tensor.device)
        for tensor, other in zip(tensors, others, strict=True)
    ]
    result: list[bool] = torch.stack(differ).tolist()  # the host waits for the device once, not for each
    return result


def can_be_averaged(tensor: Tensor) -> bool:
    """Returns whether the values are real numbers of 16 bits or more. 8-bit floats are codes, as integers may be."""
    return tensor.is_floating_point() and tensor.element_size() > 1


def to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies on the CPU."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
