"""Memory for short-lived copies."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor


class Scratch:
    """Copies of tensors in memory that is used again after :meth:`reset`.

    A processor takes longer to map new memory than to fill it, and what was used last is still in its cache.

    Args:
        kept_mb: the most MiB of a copy whose memory is kept.
    """

    def __init__(self, kept_mb: float) -> None:
        self._kept_bytes = kept_mb * 2**20
        self._buffers: dict[torch.dtype, list[Tensor]] = {}
        self._taken: Counter[torch.dtype] = Counter()

    def reset(self) -> None:
        """Takes back the memory of all copies."""
        self._taken.clear()

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a copy, valid until :meth:`reset`; in memory of its own if it is large, or on an accelerator."""
        if not tensor.is_contiguous() or tensor.device.type != "cpu" or tensor.nbytes > self._kept_bytes:
            return tensor.clone()
        buffers, index = self._buffers.setdefault(tensor.dtype, []), self._taken[tensor.dtype]
        self._taken[tensor.dtype] += 1
        if index == len(buffers):
            buffers.append(tensor.new_empty(0))
        if buffers[index].numel() < tensor.numel():
            buffers[index] = tensor.new_empty(tensor.numel())
        return buffers[index][: tensor.numel()].view(tensor.shape).copy_(tensor)
