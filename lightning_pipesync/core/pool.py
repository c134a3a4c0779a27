"""A pool of reusable buffers."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class BufferPool:
    """Byte buffers for reuse, so that nothing is allocated after the first step."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Tensor:
        """Returns a uint8 tensor of ``num_bytes`` elements with undefined content."""
        with self._lock:
            free = self._free.get(num_bytes)
            if free:
                return free.pop()
        return torch.empty(num_bytes, dtype=torch.uint8)

    def give(self, buffers: list[Tensor]) -> None:
        with self._lock:
            for buffer in buffers:
                self._free.setdefault(buffer.numel(), []).append(buffer)

    def clear(self) -> None:
        with self._lock:
            self._free.clear()
