"""Copies of tensors in the memory of the host, made on a stream of their own.

[Note: who waits]
A copy starts after what the caller has enqueued, and delays neither the caller nor its stream: the thread that sends
the copies waits for them, once for all tensors of a message. The memory is pinned; a copy to other memory would block.
From pinned memory a copy to the device needs no wait at all: the allocator keeps it until the copy is complete.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopies:
    """Copies tensors of ``device`` to the host; those that are on the host are not copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Returns the tensors on the host, and the event after which they are there; None: they are.

        Args:
            tensors: contiguous, and not to be changed before that event.
        """
        on_device = [tensor for tensor in tensors if tensor.is_cuda]
        if not on_device or self._stream is None:
            return list(tensors), None
        copied = torch.cuda.Event(blocking=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies = [_copied(tensor) if tensor.is_cuda else tensor for tensor in tensors]
            copied.record(self._stream)
        for tensor in on_device:  # the caller may free it
            tensor.record_stream(self._stream)
        return copies, copied


def _copied(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
