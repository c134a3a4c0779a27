"""The norm of many tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_pipesync.core.sharding import copies_of
from lightning_pipesync.core.torch_private import foreach_norm


def norm_of_gradients(parameters: Sequence[Tensor]) -> SquaredNorm:
    """Returns the norm of the gradients of ``parameters``, in the sum of all ranks of a replica once for all copies."""
    present = [(p.grad, copies_of(p)) for p in parameters if p.grad is not None]
    return SquaredNorm([gradient for gradient, _ in present], [copies for _, copies in present])


class SquaredNorm:
    """The squared L2 norm of a whole gradient, computed in one pass without waiting for the device.

    Args:
        gradients: dense tensors on one device; the norm of none is 0.
        copies: for each how many ranks have it, each of which counts its share; none: no other rank has any.
    """

    def __init__(self, gradients: Sequence[Tensor], copies: Sequence[int] = ()) -> None:
        self._ready: torch.cuda.Event | None = None
        if not gradients:
            self._result = torch.zeros(())
            return
        of_each = torch.stack(foreach_norm(list(gradients))).double().square_()
        if any(number > 1 for number in copies):
            of_each.div_(torch.tensor(copies).to(of_each.device, non_blocking=True))
        squares = of_each.sum()
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
