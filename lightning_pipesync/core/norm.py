"""The norm of many tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_pipesync.core.torch_private import foreach_norm


class SquaredNorm:
    """The squared L2 norm of a whole gradient, computed in one pass without waiting for the device.

    Args:
        gradients: dense tensors on one device; the norm of none is 0.
    """

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self._ready: torch.cuda.Event | None = None
        if not gradients:
            self._result = torch.zeros(())
            return
        squares = torch.stack(foreach_norm(list(gradients))).double().square_().sum()
        if squares.is_cuda:
            self._result = torch.empty((), dtype=squares.dtype, pin_memory=True)
            self._result.copy_(squares, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(squares.device))
        else:
            self._result = squares

    def item(self) -> float:
        """Returns the value; on CUDA the host waits for the backward pass, not for work enqueued since."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._result.item()
